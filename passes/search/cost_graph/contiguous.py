"""Place a cost graph contiguously: the forward graph's quotient over devices has no circle.

groups ─► all downsets ─► dynamic program: the optimum
       └► too many     ─► downsets along good orders ─► dynamic program ─► more downsets near its cuts ─┐
                                                          └───────────── while it helps ────────────────┘
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable

from cost_models.errors import InfeasibleError
from passes.search.anywhere.bound import simple_bound
from passes.search.cost_graph.chains import Chain, Chains, multiplications
from passes.search.cost_graph.downsets import Order, linear_orders, prefixes
from passes.search.cost_graph.graph import PlacementGraph, evaluate
from passes.search.cost_graph.groups import GroupProblem, contiguous_groups, free_groups
from passes.search.cost_graph.result import PROVED, PlacementResult, certified, check_feasible
from passes.search.cost_graph.set_bound import SetBound

MOST_DOWNSETS = 40_000
"""Downsets up to which the dynamic program runs over all of them; 2,774 take 0.4 s and time grows with their square
(docs/14-graphs-from-elsewhere.md)."""
MULTIPLICATIONS_PER_SECOND = 3e9
"""Speed of the dynamic program on one core of a common machine, by which its time is estimated."""
LISTED_SHARE = 0.5
"""Share of the time limit that the program over all downsets may take."""
FAMILY, NEAR = 2500, 200
"""Downsets of a restricted family, and those looked at around each cut."""
ORDERS = 4
"""Random orders through the best cuts, per round."""
QUIET_FAMILIES = 12
"""Families without a better chain after which the search ends."""
SPACE = "placements with an acyclic quotient of the forward graph over devices, equal colours together"


def place_contiguous(
    graph: PlacementGraph, time_limit: float = 60.0, *, prove: bool = True
) -> PlacementResult:
    """Find the least largest load over contiguous placements.

    ``prove`` spends time on a bound where the method has none.
    """
    started = time.perf_counter()
    deadline = started + time_limit
    until = started + (0.6 if prove else 1.0) * time_limit
    exact = _DownsetSearch(contiguous_groups(graph), time_limit)
    check_feasible(graph, exact.problem)
    attempts = [exact]
    if exact.listed is None and exact.problem.memory_binds:
        attempts.insert(0, _DownsetSearch(contiguous_groups(graph, join_sized=True), time_limit))
    for i, attempt in enumerate(attempts, 1):
        attempt.search(time.perf_counter() + (until - time.perf_counter()) * i / len(attempts))
    best = min(attempts, key=lambda attempt: attempt.chain.value)
    if best.chain.homes is None:
        raise InfeasibleError(
            "no contiguous placement that fits the accelerators' memory was found",
            [f"{len(graph.nodes)} nodes on {len(graph.machine.devices)} devices; {best.method}"],
            ["use more devices or more memory, or plan without --contiguous"],
        )
    placement = best.problem.of_nodes(best.chain.homes)
    value = evaluate(graph, placement).max_load
    bound = max(attempt.bound(value, deadline) for attempt in attempts)
    if prove and value - bound > PROVED * value:
        free = free_groups(graph)
        search = SetBound(free, value)
        search.know(free.of_groups(placement))
        bound = max(bound, search.improve(simple_bound(free.placement), deadline).seconds)
    return certified(
        graph,
        placement,
        value,
        bound,
        space=SPACE,
        method=best.method,
        started=started,
        time_limit=time_limit,
        contiguous=True,
    )


class _DownsetSearch:
    """A search over the downsets of one way to group nodes."""

    def __init__(self, problem: GroupProblem, time_limit: float) -> None:
        self.problem = problem
        self.listed = _listed(problem, time_limit)
        self.chain, self.method, self.complete = Chain(None, math.inf), "", False

    def search(self, deadline: float) -> None:
        """Find the best chain, and say by which method; ``complete`` if it is the optimum."""
        problem, listed, order = self.problem, self.listed, Order(self.problem)
        lines = [prefixes(line) for line in linear_orders(problem, order)]
        self.chain = Chains(problem, _union(lines, order.full, FAMILY)).solve()
        if listed is not None:
            full = Chains(problem, listed, limit=_above(self.chain.value), deadline=deadline).solve()
            if full.finished:
                self.chain = full if full.homes is not None else self.chain
                self.method = f"dynamic program over all {len(listed):,} downsets of {problem.count} groups"
                self.complete = True
                return
        rounds, quiet, dice = 0, 0, random.Random(0)
        while time.perf_counter() < deadline and quiet < QUIET_FAMILIES:
            cuts = self.chain.cuts
            through = [prefixes(_through(order, cuts, dice)) for _ in range(ORDERS)]
            near = [_near(order, cut, NEAR) for cut in cuts]
            wider = _union([*through, *near, cuts], order.full, FAMILY)
            found = Chains(problem, wider, limit=_above(self.chain.value), deadline=deadline).solve()
            rounds += 1
            better = found.homes is not None and found.value < self.chain.value * (1 - 1e-9)
            self.chain = found if better else self.chain
            quiet = 0 if better else quiet + 1
        self.method = (
            f"dynamic programs over {rounds + 1} families of downsets, each near the best cuts before"
        )

    def bound(self, value: float, deadline: float) -> float:
        """Bound all contiguous placements: by the optimum, if this is it, or by that without limits on memory."""
        simple = simple_bound(self.problem.placement).seconds
        if not self.complete or self.listed is None:
            return simple
        if self.problem.lossless:
            return max(simple, min(value, self.chain.value))
        # weights joined their readers: without memory limits that loses nothing
        limit = _above(value)
        chains = Chains(self.problem, self.listed, limit=limit, memory_size=math.inf, deadline=deadline)
        relaxed = chains.solve()
        return max(simple, min(value, relaxed.value)) if relaxed.homes is not None else simple


def _listed(problem: GroupProblem, time_limit: float) -> list[int] | None:
    """List all downsets, where time suffices to look at all pairs of them."""
    affordable = LISTED_SHARE * time_limit * MULTIPLICATIONS_PER_SECOND
    most = MOST_DOWNSETS
    while most > 64 and multiplications(problem, most) > affordable:
        most = most * 3 // 4
    return Order(problem).all_downsets(most)


def _through(order: Order, cuts: Iterable[int], dice: random.Random) -> list[int]:
    """Draw a topological order that fills one cut after the other."""
    slices = [0] * order.count
    for cut in cuts:
        for g in range(order.count):
            slices[g] += not cut >> g & 1
    chance = [dice.random() for _ in range(order.count)]
    if dice.random() < 0.5:  # along the graph rather than anywhere
        chance = [chance[g] * 8 + order.count - order.before[g].bit_length() for g in range(order.count)]
    return order.linear(lambda g: (slices[g], chance[g]))


def _above(value: float) -> float:
    """Return a limit that admits ``value`` itself."""
    return value * (1 + 1e-9) if math.isfinite(value) else math.inf


def _union(families: Iterable[Iterable[int]], full: int, most: int) -> list[int]:
    """Unite downsets of all families, evenly taken from each where there are too many; the empty and the full one stay."""
    members = [list(family) for family in families]
    found: dict[int, None] = {0: None, full: None}
    share = max(2, most // max(1, len(members)))
    for family in members:
        found.update(dict.fromkeys(family[:: max(1, -(-len(family) // share))]))
    return list(found)


def _near(order: Order, cut: int, most: int) -> list[int]:
    """List downsets that differ from ``cut`` by the fewest groups, breadth first."""
    found = {cut: None}
    waiting = [cut]
    while waiting and len(found) < most:
        following: list[int] = []
        for downset in waiting:
            steps = [downset | 1 << g for g in order.addable(downset)]
            steps += [downset & ~(1 << g) for g in order.removable(downset)]
            for step in steps:
                if step not in found and len(found) < most:
                    found[step] = None
                    following.append(step)
        waiting = following
    return list(found)
