"""Place a cost graph so that one batch is done soonest.

The model, beside that of ``graph``: a device runs one node at a time, without interruption. An output is there at
once on the device that made it; on another device that needs it, it is there

    output_cost · (accelerators among the two devices)      after the node that makes it has ended

once per producer and device, as loads count it, beside whatever the devices compute. So from accelerator to accelerator it
takes two output costs (out and in), to or from a CPU one, between CPUs none. Nodes are run in the order of a list schedule:
whenever a device is free, of its nodes whose inputs are there, the one with the longest way to the end (every node on it at
its cheapest). Makespan: when the last node ends.

Search: each group where it ends soonest, in the order of the longest way (HEFT: Topcuoglu, Hariri, Wu 2002), placements for
throughput and on one device, then single groups and stretches of the graph moved, better and, while hot, sometimes worse.
Bound: the longest path with each node at its cheapest and nothing sent; all work shared without loss; the largest group.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import networkx as nx

from cost_models.errors import InfeasibleError
from passes.search.cost_graph.bound import load_bound
from passes.search.cost_graph.contiguous import place_contiguous
from passes.search.cost_graph.graph import PlacementGraph
from passes.search.cost_graph.groups import GroupProblem, colour_groups, fits
from passes.search.cost_graph.result import PROVED, PlacementResult, certified, check_feasible
from passes.search.cost_graph.throughput import lines
from passes.search.cost_graph.tuning import TUNING
from passes.search.heft import earliest_finish

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
    """Return a time that no placement is done before."""
    scheduler = Scheduler(graph)
    problem = colour_groups(graph)
    return max(max(scheduler.way, default=0.0), load_bound(problem).value)


def place_for_latency(graph: PlacementGraph, time_limit: float = 60.0, *, seed: int = 0) -> PlacementResult:
    """Find the least makespan of one batch over placements that fit."""
    started = time.monotonic()
    problem = colour_groups(graph)
    check_feasible(graph, problem)
    bound = latency_bound(graph)
    search = _LatencySearch(graph, problem, started + time_limit, random.Random(seed))
    for homes in _starts(graph, problem, search.scheduler, TUNING.start_share * time_limit):
        search.offer(homes)
    if search.homes is None:
        raise InfeasibleError(
            "no placement that fits the accelerators' memory was found",
            [f"{len(graph.nodes)} nodes on {len(graph.machine.devices)} devices"],
            ["use more devices or more memory"],
        )
    search.climb(bound)
    placement = problem.of_nodes(search.homes)
    return certified(
        graph,
        placement,
        search.scheduler.makespan(placement),
        bound,
        objective=MAKESPAN,
        space=SPACE,
        method=f"list schedules of {search.tried:,} placements; bound: longest path, work, largest group",
        started=started,
        time_limit=time_limit,
    )


def _starts(
    graph: PlacementGraph, problem: GroupProblem, scheduler: Scheduler, seconds: float
) -> list[tuple[int, ...]]:
    machine = problem.machine
    found = [
        (device,) * problem.count for device in {0, machine.accelerators} if device < len(machine.devices)
    ]
    found.append(_earliest_finish(problem, scheduler))
    with suppress(InfeasibleError):  # contiguity is not asked for: one start less
        found.append(problem.of_groups(place_contiguous(graph, seconds, prove=False).placement))
    return found


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


@dataclass
class _LatencySearch:
    graph: PlacementGraph
    problem: GroupProblem
    deadline: float
    dice: random.Random
    homes: tuple[int, ...] | None = None
    value: float = math.inf
    tried: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.graph)
        self.lines = lines(self.graph, self.problem)

    def offer(self, homes: tuple[int, ...]) -> float:
        """Keep a placement if it fits and is the best so far, and return its makespan."""
        if not fits(self.problem, homes):
            return math.inf
        self.tried += 1
        value = self.scheduler.makespan(self.problem.of_nodes(homes))
        if value < self.value * (1 - 1e-12):
            self.homes, self.value = homes, value
        return value

    def climb(self, bound: float) -> None:
        """Move on from the best placement, at a temperature that falls with the time that is left."""
        devices, count = len(self.problem.machine.devices), self.problem.count
        if self.homes is None or devices < 2:
            return
        started = time.monotonic()
        current, value = self.homes, self.value
        quiet, patience = 0, max(TUNING.quiet_moves, 20 * count)
        while quiet < patience and self.value - bound > PROVED * self.value:
            now = time.monotonic()
            if now > self.deadline:
                break
            share = (now - started) / max(self.deadline - started, 1e-9)
            heat = 0.02 * self.value * (1 - share) ** 2
            changed = self._changed(current, devices)
            before = self.value
            found = self.offer(changed)
            quiet = 0 if self.value < before else quiet + 1
            if found - value <= heat * self.dice.expovariate(1.0):
                current, value = changed, found
            elif quiet % 2000 == 1999:
                current, value = self.homes, self.value

    def _changed(self, homes: tuple[int, ...], devices: int) -> tuple[int, ...]:
        line = self.dice.choice(self.lines)
        length = (
            1
            if self.dice.random() < 0.6
            else min(len(line), int(2 * (len(line) / 4 + 1) ** self.dice.random()))
        )
        start = self.dice.randrange(len(line) - length + 1)
        target = self.dice.randrange(devices)
        found = list(homes)
        if length == 1 and self.dice.random() < 0.3:
            other = self.dice.randrange(len(line))
            found[line[start]], found[other] = found[other], found[line[start]]
        else:
            for g in line[start : start + length]:
                found[g] = target
        return tuple(found)
