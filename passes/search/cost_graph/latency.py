"""Place a cost graph so that one batch is done soonest.

The model, beside that of ``graph``: a device runs one node at a time, without interruption. An output is there at
once on the device that made it; on another device that needs it, it is there

    output_cost · (accelerators among the two devices)      after the node that makes it has ended

once per producer and device, as loads count it, beside whatever the devices compute. So from accelerator to accelerator it
takes two output costs (out and in), to or from a CPU one, between CPUs none. Nodes are run in the order of a list schedule:
whenever a device is free, of its nodes whose inputs are there, the one with the longest way to the end (every node on it at
its cheapest). Makespan: when the last node ends.

Search: each group where it ends soonest, in the order of the longest way (HEFT: Topcuoglu, Hariri, Wu 2002), placements for
throughput and on one device, then local search (``anywhere.climb``).
Bound: the longest path with each node at its cheapest and nothing sent; all work shared without loss; the largest group.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import networkx as nx

from cost_models.errors import InfeasibleError
from passes.search.anywhere.bound import simple_bound
from passes.search.anywhere.climb import Neighbourhood, climb
from passes.search.anywhere.problem import Home, legal
from passes.search.cost_graph.contiguous import place_contiguous
from passes.search.cost_graph.graph import PlacementGraph
from passes.search.cost_graph.groups import GroupProblem, colour_groups
from passes.search.cost_graph.result import PROVED, PlacementResult, certified, check_feasible
from passes.search.cost_graph.throughput import lines
from passes.search.heft import earliest_finish

START_SHARE = 0.15
"""Share of the time limit for the contiguous placement to start from."""
QUIET_MOVES = 20_000
"""Moves without a better placement after which the search ends; at least twenty per group."""
MAKESPAN = "makespan of one batch"
SPACE = "all placements with equal colours together, nodes in the order of a list schedule"


class Scheduler:
    """List schedules of one graph: the makespan of any placement.

    Its own list scheduler: that of the free search (``free.makespan``) queues messages on links and knows backwards and
    weight halves; here messages do not wait for each other, and a forward and a backward node are alike.
    """

    def __init__(self, graph: PlacementGraph) -> None:
        self.graph = graph
        self.accelerators = graph.machine.accelerators
        self.consumers = graph.consumers
        self.waiting = [0] * len(graph.nodes)
        for targets in graph.consumers:
            for v in targets:
                self.waiting[v] += 1
        self.order: list[int] = list(nx.topological_sort(graph.directed))
        self.least = [self._least(v) for v in range(len(graph.nodes))]
        self.way = [0.0] * len(graph.nodes)
        for v in reversed(self.order):
            self.way[v] = self.least[v] + max((self.way[w] for w in self.consumers[v]), default=0.0)

    def _least(self, v: int) -> float:
        node, machine = self.graph.nodes[v], self.graph.machine
        costs = [node.accelerator_cost] if machine.accelerators and node.on_accelerator else []
        return min([*costs, node.cpu_cost] if machine.cpus else costs, default=math.inf)

    def delay(self, v: int, source: int, target: int) -> float:
        """Return the time from the end of node ``v`` on one device until its output is on the other."""
        if source == target:
            return 0.0
        ends = (source < self.accelerators) + (target < self.accelerators)
        return self.graph.nodes[v].output_cost * ends

    def starts(self, placement: Sequence[int]) -> tuple[list[float], float]:
        """Return the start of every node, and the makespan."""
        nodes, way = self.graph.nodes, self.way
        waiting = list(self.waiting)
        there = [0.0] * len(nodes)
        devices = len(self.graph.machine.devices)
        free = [0.0] * devices
        ready: list[list[tuple[float, int]]] = [[] for _ in range(devices)]
        events: list[tuple[float, int, int]] = []
        start = [0.0] * len(nodes)
        for v, count in enumerate(waiting):
            if not count:
                events.append((0.0, 0, v))
        heapq.heapify(events)
        end = 0.0
        while events:
            now = events[0][0]
            touched = set()
            while events and events[0][0] <= now:
                _, kind, v = heapq.heappop(events)
                if kind == 0:  # the inputs of v are there
                    heapq.heappush(ready[placement[v]], (-way[v], v))
                    touched.add(placement[v])
                else:  # a device is free
                    touched.add(v)
            for device in touched:
                if free[device] > now or not ready[device]:
                    continue
                _, v = heapq.heappop(ready[device])
                node = nodes[v]
                start[v] = now
                done = now + (node.accelerator_cost if device < self.accelerators else node.cpu_cost)
                free[device] = done
                end = max(end, done)
                heapq.heappush(events, (done, 1, device))
                for w in self.consumers[v]:
                    there[w] = max(there[w], done + self.delay(v, device, placement[w]))
                    waiting[w] -= 1
                    if not waiting[w]:
                        heapq.heappush(events, (there[w], 0, w))
        return start, end

    def makespan(self, placement: Sequence[int]) -> float:
        """Return the time when the last node ends."""
        return self.starts(placement)[1]


def latency_bound(graph: PlacementGraph) -> float:
    """Return a lower bound on the time of any placement."""
    scheduler = Scheduler(graph)
    problem = colour_groups(graph)
    return max(max(scheduler.way, default=0.0), simple_bound(problem.placement).seconds)


def place_for_latency(graph: PlacementGraph, time_limit: float = 60.0, *, seed: int = 0) -> PlacementResult:
    """Find the least makespan of one batch over placements that fit."""
    started = time.perf_counter()
    problem = colour_groups(graph)
    check_feasible(graph, problem)
    bound, scheduler, tried = latency_bound(graph), Scheduler(graph), 0

    def measure(home: Home) -> float:
        nonlocal tried
        if not legal(problem.placement, home):
            return math.inf
        tried += 1
        return scheduler.makespan(problem.of_nodes(home))

    starts = _starts(graph, problem, scheduler, START_SHARE * time_limit)
    home = min(starts, key=measure)
    if math.isinf(measure(home)):
        raise InfeasibleError(
            "no placement that fits the accelerators' memory was found",
            [f"{len(graph.nodes)} nodes on {len(graph.machine.devices)} devices"],
            ["use more devices or more memory"],
        )
    around = Neighbourhood(problem.placement, lines(graph, problem))
    home = climb(
        measure,
        home,
        partial(around.draw, draw=random.Random(seed)),
        quiet=max(QUIET_MOVES, 20 * problem.count),
        deadline=started + time_limit,
        least=bound * (1 + PROVED),
    )
    placement = problem.of_nodes(home)
    return certified(
        graph,
        placement,
        scheduler.makespan(placement),
        bound,
        objective=MAKESPAN,
        space=SPACE,
        method=f"list schedules of {tried:,} placements; bound: longest path, work, largest group",
        started=started,
        time_limit=time_limit,
    )


def _starts(graph: PlacementGraph, problem: GroupProblem, scheduler: Scheduler, seconds: float) -> list[Home]:
    starts = [*problem.alone(), _earliest_finish(problem, scheduler)]
    with suppress(InfeasibleError):  # contiguity is not asked for: one start less
        starts.append(problem.of_groups(place_contiguous(graph, seconds, prove=False).placement))
    return starts


def _earliest_finish(problem: GroupProblem, scheduler: Scheduler) -> tuple[int, ...]:
    """Place groups by HEFT: a group goes where the first of its nodes ends soonest."""
    graph, machine = scheduler.graph, problem.machine
    group_of = {v: g for g, nodes in enumerate(problem.members) for v in nodes}
    before: list[list[int]] = [[] for _ in graph.nodes]
    for u, targets in enumerate(graph.consumers):
        for v in targets:
            before[v].append(u)
    position = {v: i for i, v in enumerate(scheduler.order)}
    on_accelerator = [node.accelerator_cost for node in graph.nodes]
    on_cpu = [node.cpu_cost for node in graph.nodes]
    cpus = range(machine.accelerators, len(machine.devices))
    return earliest_finish(
        sorted(range(len(graph.nodes)), key=lambda v: (-scheduler.way[v], position[v])),
        before,
        [on_accelerator] * machine.accelerators + [on_cpu] * machine.cpus,
        lambda u, end, source, target: end + scheduler.delay(u, source, target),
        [group_of[v] for v in range(len(graph.nodes))],
        [cpus if math.isinf(cost) else range(len(machine.devices)) for cost in problem.accelerator_cost],
        sizes=problem.size.tolist(),
        room=[machine.memory_size] * machine.accelerators + [math.inf] * machine.cpus,
    )
