"""Place a cost graph freely, so that the busiest device has least to do: anytime, with a proved bound.

contiguous optimum, random placements ─► annealing ─► pairs of devices divided anew ─┐
                               ▲                                                     ├─ until both meet
                               └──── longer ──── bound from what one device can hold ┘   or time is up
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress

import networkx as nx
import numpy as np

from cost_models.errors import InfeasibleError
from cost_models.units import counted
from passes.search.anywhere.anneal import anneal
from passes.search.anywhere.bound import simple_bound
from passes.search.anywhere.pairs import divided
from passes.search.anywhere.placements import PlacementBatch
from passes.search.anywhere.problem import Home, evaluate, legal
from passes.search.anywhere.program import MOST_CHOICES, solve_program
from passes.search.bound import Bound, BoundMethod
from passes.search.cost_graph.contiguous import place_contiguous
from passes.search.cost_graph.graph import PlacementGraph
from passes.search.cost_graph.graph import evaluate as graph_loads
from passes.search.cost_graph.groups import GroupProblem, free_groups
from passes.search.cost_graph.result import PROVED, PlacementResult, certified, check_feasible
from passes.search.cost_graph.set_bound import SetBound

FIRST_STEPS = 2000
"""Steps of the first round of annealing, at least; each round takes twice as many as the last."""
MOST_STEPS = 640_000
"""Steps of a round of annealing at most."""
MOST_CHAINS, LEAST_CHAINS = 64, 16
"""Placements annealed at once: up to 200 groups, and of many groups."""
LARGE = 300
"""Groups from which on the first round begins at the contiguous placement: from anywhere it takes too long."""
CONTIGUOUS_SHARE, LARGE_CONTIGUOUS_SHARE = 0.2, 0.5
"""Share of the time limit for the contiguous placement to start from; of large graphs, where little beats it."""
ROUND_SHARE = 0.25
"""Share of the time left for a round of annealing at most; of a large graph, twice that."""
QUIET_ROUNDS = 6
"""Rounds of annealing without a better placement or bound after which the search ends."""
SPACE = "all placements with equal colours together"


def place_for_throughput(
    graph: PlacementGraph, time_limit: float = 60.0, *, seed: int = 0
) -> PlacementResult:
    """Find the least largest load over all placements that fit."""
    started = time.perf_counter()
    problem = free_groups(graph)
    check_feasible(graph, problem)
    search = _ThroughputSearch(graph, problem, started, time_limit, seed)
    search.run()
    if search.home is None:
        raise InfeasibleError(
            "no placement that fits the accelerators' memory was found",
            [
                f"{len(graph.nodes)} nodes on {len(graph.machine.devices)} devices, {search.rounds} rounds of annealing"
            ],
            ["use more devices, more memory or a larger --time-limit"],
        )
    home = refined(graph, problem, search.home)
    loads = evaluate(problem.placement, home)
    if not legal(problem.placement, home) or loads.objective_seconds > search.value:
        home = search.home  # by a rounding error
    placement = problem.of_nodes(home)
    return certified(
        graph,
        placement,
        graph_loads(graph, placement).max_load,
        min(search.bound.seconds, search.value),
        space=SPACE,
        method=f"annealing ({counted(search.rounds, 'round')}), integer programs over pairs of devices; "
        f"bound: {search.bound.method.value}",
        started=started,
        time_limit=time_limit,
    )


class _ThroughputSearch:
    def __init__(
        self, graph: PlacementGraph, problem: GroupProblem, started: float, limit: float, seed: int
    ) -> None:
        self.graph, self.problem, self.seed = graph, problem, seed
        self.space = problem.placement
        self.limit, self.deadline = limit, started + limit
        self.random = np.random.default_rng(seed)
        self.home: Home | None = None
        self.value = math.inf
        self.bound = simple_bound(self.space)
        self.sets: SetBound | None = None
        self.rounds = 0
        self.exact = False
        self.large = problem.count > LARGE
        self.chains = min(MOST_CHAINS, max(LEAST_CHAINS, MOST_CHAINS * 200 // max(1, problem.count)))
        self.lines = lines(graph, problem)

    @property
    def proved(self) -> bool:
        return self.home is not None and self.value - self.bound.seconds <= PROVED * self.value

    def run(self) -> None:
        """Look at starts, then anneal and prove in turn."""
        for home in self._starts():
            self._offer(home)
        steps, quiet = max(FIRST_STEPS, 60 * self.problem.count), 0
        while not self.proved and time.perf_counter() < self.deadline and quiet < QUIET_ROUNDS:
            value, bound, begun = self.value, self.bound.seconds, time.perf_counter()
            self._anneal(steps)
            if self.home is not None and not self.proved:
                spent = time.perf_counter() - begun
                # after a round that found nothing better the value is more likely the optimum
                longer = 3 if self.value >= value else 1
                self._prove(min(self.deadline, time.perf_counter() + max(longer * spent, 0.5)))
                if not self.proved and quiet and not self.exact:
                    self._solve_whole(self.home)
            self.rounds += 1
            steps = min(2 * steps, MOST_STEPS)
            quiet = 0 if self.value < value or self.bound.seconds > bound * (1 + 1e-6) else quiet + 1

    def _starts(self) -> list[Home]:
        starts = self.problem.alone()
        with suppress(
            InfeasibleError
        ):  # contiguity is not asked for, and a free placement may fit all the same
            share = LARGE_CONTIGUOUS_SHARE if self.large else CONTIGUOUS_SHARE
            contiguous = place_contiguous(self.graph, share * self.limit, prove=False)
            starts.append(self.problem.of_groups(contiguous.placement))
        return starts

    def _offer(self, home: Home) -> None:
        value = evaluate(self.space, home).objective_seconds
        if value < self.value and legal(self.space, home):
            self.home, self.value = home, value

    def _anneal(self, steps: int) -> None:
        """Anneal one round: in turn they begin anywhere and hot, or at the best placement and warm."""
        problem = self.problem
        warm = self.rounds % 2 == (0 if self.large else 1) and self.home is not None
        accelerators = problem.machine.accelerators or self.space.devices
        drawn = self.random.integers(0, accelerators, (self.chains, problem.count)).tolist()
        starts = [self.space.obeying(home) for home in drawn]
        if self.home is not None:
            known = self.chains if warm else max(1, self.chains // 4)
            starts[:known] = [self.home] * known
        now = time.perf_counter()
        homes = anneal(
            self.space,
            starts,
            self.lines,
            steps=steps,
            hottest=0.01 if warm else 0.05,
            seed=self.seed + self.rounds,
            deadline=now + (2 if self.large else 1) * ROUND_SHARE * (self.deadline - now),
        )
        self._offer(homes[0])
        if self.home is not None:
            self._offer(
                divided(self.space, self.home, min(self.deadline, time.perf_counter() + 0.05 * self.limit))
            )
            for home in (self.home, *homes[:16]):
                self._sets().know(home)

    def _solve_whole(self, home: Home) -> None:
        """Solve one integer program over everything, where that is small."""
        self.exact = True
        if self.problem.count * self.space.devices > MOST_CHOICES:
            return
        left = self.deadline - time.perf_counter()
        answer = solve_program(
            self.space,
            home,
            self.value,
            bound_seconds=self.bound.seconds,
            limit_seconds=max(0.1, 0.5 * left),
            gap=1e-8,
        )
        if answer.home is not None:
            self._offer(answer.home)
        if answer.bound_seconds > self.bound.seconds:
            self.bound = Bound(answer.bound_seconds, BoundMethod.INTEGER_PROGRAM)

    def _sets(self) -> SetBound:
        if self.sets is None:
            self.sets = SetBound(self.problem, self.value)
            self.sets.know_stretches(self.lines)
        self.sets.value = min(self.sets.value, self.value)
        return self.sets

    def _prove(self, deadline: float) -> None:
        self.bound = self._sets().improve(self.bound, deadline)


def lines(graph: PlacementGraph, problem: GroupProblem) -> tuple[list[int], ...]:
    """Line the groups up along the graph, broad first and deep first: neighbours there are moved together."""
    depth = [0.0] * len(graph.nodes)
    for number, layer in enumerate(nx.topological_generations(graph.directed)):
        for v in layer:
            depth[v] = number
    for v in range(len(graph.nodes)):
        if depth[v] == 0 and graph.consumers[v]:  # weights and inputs lie where they are read
            depth[v] = min(depth[w] for w in graph.consumers[v]) - 0.5
    deep = {v: i for i, v in enumerate(nx.dfs_postorder_nodes(graph.directed.reverse(copy=False)))}
    keys: tuple[Sequence[float], ...] = (
        [min(depth[v] for v in nodes) for nodes in problem.members],
        [min(deep[v] for v in nodes) for nodes in problem.members],
    )
    return tuple(sorted(range(problem.count), key=key.__getitem__) for key in keys)


ROUNDING = 1e-9
PASSES = 8
"""Passes over all groups, at most: each ends where nothing moves any more, mostly after two."""


def refined(graph: PlacementGraph, problem: GroupProblem, homes: Home) -> Home:
    """Reduce communication without raising the largest load; return ``homes`` itself where nothing helps.

    A search for the largest load alone does not care where groups go that make no difference to it. Group by group goes to
    a device of one of its neighbours in the graph while the largest load does not rise and (Σ loads, edges between devices)
    falls.
    """
    group_of = {v: g for g, nodes in enumerate(problem.members) for v in nodes}
    beside: dict[int, Counter[int]] = defaultdict(Counter)
    for u, v in graph.edges:
        if group_of[u] != group_of[v]:
            beside[group_of[u]][group_of[v]] += 1
            beside[group_of[v]][group_of[u]] += 1
    space = problem.placement
    every = np.arange(space.devices)
    # one placement for each device that a group may go to: all equal until one is chosen for all
    now = PlacementBatch(space, [homes] * space.devices)
    top = float(now.load[0].max())
    for _ in range(PASSES):
        moved = False
        for g in range(problem.count):
            home = int(now.home[g, 0])
            edges = np.zeros(space.devices)
            for h, count in beside[g].items():
                edges[now.home[h, 0]] += count
            trial = now.trial([g], every[None, :])
            sent, crossing = trial.load.sum(axis=1) - now.load[0].sum(), edges[home] - edges
            legal = (trial.load <= np.maximum(now.load[0], top)).all(axis=1) & space.allowed[:, g]
            legal &= (trial.memory <= np.maximum(now.memory[0], space.capacity_bytes)).all(axis=1)
            less = (sent <= -ROUNDING * top) | ((np.abs(sent) <= ROUNDING * top) & (crossing < 0))
            better = np.flatnonzero(legal & less & (edges > 0))
            if len(better):
                target = int(better[np.lexsort((crossing[better], sent[better]))[0]])
                now.accept(trial, every == target)
                now.copy(np.full(space.devices, target), every)
                moved = True
        if not moved:
            break
    return now.homes()[0]
