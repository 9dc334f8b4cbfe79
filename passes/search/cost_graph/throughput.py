"""Place a cost graph freely, so that the busiest device has least to do: anytime, with a proved bound.

contiguous optimum, random placements ─► annealing ─► pairs of devices divided anew ─┐
                               ▲                                                     ├─ until both meet
                               └──── longer ──── bound from what one device can hold ┘   or time is up
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import networkx as nx
import numpy as np

from cost_models.errors import InfeasibleError
from cost_models.units import counted
from passes.search.cost_graph.anneal import AnnealingChains
from passes.search.cost_graph.bisect_pairs import bisect_pairs
from passes.search.cost_graph.bound import LoadBound, SetBound, load_bound
from passes.search.cost_graph.contiguous import place_contiguous
from passes.search.cost_graph.graph import PlacementGraph, evaluate
from passes.search.cost_graph.groups import GroupProblem, fits, free_groups, group_loads
from passes.search.cost_graph.ilp import PlacementProgram
from passes.search.cost_graph.refine import refined
from passes.search.cost_graph.result import PROVED, PlacementResult, certified, check_feasible
from passes.search.cost_graph.tuning import TUNING

SPACE = "all placements with equal colours together"


def place_for_throughput(
    graph: PlacementGraph, time_limit: float = 60.0, *, seed: int = 0
) -> PlacementResult:
    """Find the least largest load over all placements that fit."""
    started = time.monotonic()
    problem = free_groups(graph)
    check_feasible(graph, problem)
    search = _ThroughputSearch(graph, problem, started, time_limit, seed)
    search.run()
    if search.homes is None:
        raise InfeasibleError(
            "no placement that fits the accelerators' memory was found",
            [
                f"{len(graph.nodes)} nodes on {len(graph.machine.devices)} devices, {search.rounds} rounds of annealing"
            ],
            ["use more devices, more memory or a larger --time-limit"],
        )
    homes = refined(graph, problem, search.homes)
    if not fits(problem, homes) or max(group_loads(problem, homes)) > search.value:
        homes = search.homes  # by a rounding error
    placement = problem.of_nodes(homes)
    return certified(
        graph,
        placement,
        evaluate(graph, placement).max_load,
        min(search.bound.value, search.value),
        space=SPACE,
        method=f"annealing ({counted(search.rounds, 'round')}), integer programs over pairs of devices; "
        f"bound: {search.bound.method}",
        started=started,
        time_limit=time_limit,
    )


class _ThroughputSearch:
    def __init__(
        self, graph: PlacementGraph, problem: GroupProblem, started: float, limit: float, seed: int
    ) -> None:
        self.graph, self.problem, self.seed = graph, problem, seed
        self.started, self.limit, self.deadline = started, limit, started + limit
        self.random = np.random.default_rng(seed)
        self.homes: tuple[int, ...] | None = None
        self.value = float("inf")
        self.bound = load_bound(problem)
        self.sets: SetBound | None = None
        self.rounds = 0
        self.exact = False
        self.chains = min(
            TUNING.most_chains, max(TUNING.least_chains, TUNING.most_chains * 200 // max(1, problem.count))
        )
        self.lines = lines(graph, problem)

    @property
    def proved(self) -> bool:
        return self.homes is not None and self.value - self.bound.value <= PROVED * self.value

    def run(self) -> None:
        """Look at starts, then anneal and prove in turn."""
        for homes in self._starts():
            self._offer(homes)
        steps, quiet = max(TUNING.first_steps, 60 * self.problem.count), 0
        while not self.proved and time.monotonic() < self.deadline and quiet < TUNING.quiet_rounds:
            value, bound, begun = self.value, self.bound.value, time.monotonic()
            self._anneal(steps)
            if self.homes is not None and not self.proved:
                spent = time.monotonic() - begun
                # after a round that found nothing better the value is more likely the optimum
                longer = 3 if self.value >= value else 1
                self._prove(min(self.deadline, time.monotonic() + max(longer * spent, 0.5)))
                if not self.proved and quiet and not self.exact:
                    self._solve_whole()
            self.rounds += 1
            steps = min(2 * steps, TUNING.most_steps)
            quiet = 0 if self.value < value or self.bound.value > bound * (1 + 1e-6) else quiet + 1

    def _starts(self) -> list[tuple[int, ...]]:
        machine, count = self.problem.machine, self.problem.count
        starts = [(device,) * count for device in {0, machine.accelerators} if device < len(machine.devices)]
        with suppress(
            InfeasibleError
        ):  # contiguity is not asked for, and a free placement may fit all the same
            share = TUNING.large_contiguous_share if count > TUNING.large else TUNING.contiguous_share
            contiguous = place_contiguous(self.graph, share * self.limit, prove=False)
            starts.append(self.problem.of_groups(contiguous.placement))
        return starts

    def _offer(self, homes: tuple[int, ...]) -> bool:
        value = max(group_loads(self.problem, homes))
        if value < self.value and fits(self.problem, homes):
            self.homes, self.value = homes, value
            return True
        return False

    def _anneal(self, steps: int) -> None:
        """Anneal one round: in turn they begin anywhere and hot, or at the best placement and warm."""
        devices, count = len(self.problem.machine.devices), self.problem.count
        large = count > TUNING.large
        warm = self.rounds % 2 == (0 if large else 1) and self.homes is not None
        accelerators = self.problem.machine.accelerators or devices
        starts = self.random.integers(0, accelerators, (self.chains, count))
        if self.homes is not None:
            starts[: self.chains if warm else max(1, self.chains // 4)] = self.homes
        chains = AnnealingChains(self.problem, starts, self.seed + self.rounds, self.lines)
        now = time.monotonic()
        until = now + (2 if large else 1) * TUNING.round_share * (self.deadline - now)
        self._offer(chains.anneal(steps, 0.01 if warm else 0.05, until))
        if self.homes is not None:
            loads = group_loads(self.problem, self.homes)
            deadline = min(self.deadline, time.monotonic() + 0.05 * self.limit)
            self._offer(bisect_pairs(self.problem, self.homes, loads, deadline))
            self._sets().know(self.homes)
            for r in np.argsort(chains.best)[:16].tolist():
                self._sets().know(chains.best_home[:, r].tolist())

    def _solve_whole(self) -> None:
        """Solve one integer program over everything, where that is small."""
        self.exact = True
        if self.problem.count * len(self.problem.machine.devices) > TUNING.most_choices:
            return
        left = self.deadline - time.monotonic()
        program = PlacementProgram(self.problem, self.bound.value, self.value)
        homes, bound = program.solve(max(0.1, 0.5 * left))
        if homes is not None:
            self._offer(homes)
        if bound > self.bound.value:
            self.bound = LoadBound(bound, "integer program over all devices")

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
