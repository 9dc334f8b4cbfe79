"""The list scheduler's clock: plays a step and writes down what every rank started, in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from cost_models.errors import InternalError, UsageError
from runtime.program.program import ComputeOrder, SegmentGraph
from runtime.schedules.list_work import Work
from runtime.schedules.schedule import INSTRUCTION


def play(graph: SegmentGraph, work: Work, microbatches: int, limits: Sequence[int]) -> ListClock:
    """Play ``microbatches`` with at most ``limits`` of them unfinished on each rank; return the clock, run out."""
    problems = []
    if microbatches < 1:
        problems.append(f"there must be a micro-batch, not {microbatches}")
    if len(limits) != graph.world_size or min(limits) < 1:
        problems.append(f"each of {graph.world_size} ranks needs a limit of 1 or more, not {list(limits)}")
    if problems:
        raise UsageError("the list scheduler cannot order these segments", problems)
    clock = ListClock(graph, work, microbatches, limits)
    clock.run()
    return clock


class ListClock:
    """The state of a step that is being played.

    task   node * m + microbatch
    unit   a device group: the ranks that run a segment together
    key    ranks the tasks of a unit, smaller first: (urgency, microbatch, place) as one integer
    event  (time, task) when the last input of a task arrives, (time, tasks + task) when a task is done
    """

    def __init__(self, graph: SegmentGraph, work: Work, microbatches: int, limits: Sequence[int]) -> None:
        self.work = work
        self.microbatches = m = microbatches
        self.nodes = count = len(work.nodes)
        self.limits = limits
        groups = tuple(dict.fromkeys(segment.ranks for segment in graph.segments))
        unit_of = {ranks: unit for unit, ranks in enumerate(groups)}
        self.unit_ranks = groups
        self.node_unit = [unit_of[node.segment.ranks] for node in work.nodes]
        self.units_at: list[list[int]] = [[] for _ in range(graph.world_size)]
        for ranks, unit in unit_of.items():
            for rank in ranks:
                self.units_at[rank].append(unit)
        self.nodes_at = [0] * graph.world_size
        for unit in self.node_unit:
            for rank in groups[unit]:
                self.nodes_at[rank] += 1

        self.forward = [node.kind == "F" for node in work.nodes]
        self.seconds = [node.seconds for node in work.nodes]
        self.node_at_place = sorted(range(count), key=work.place.__getitem__)
        self.base_key = [
            node.urgency * m * count + place for node, place in zip(work.nodes, work.place, strict=True)
        ]

        self.missing = [need for need in work.needs for _ in range(m)]
        for node in range(count):
            if self.forward[node]:
                for microbatch in range(1, m):
                    self.missing[node * m + microbatch] += 1  # the segment's forward before
        self.arrival_seconds = [0.0] * (count * m)
        self.unstarted_or_running = [n for n in self.nodes_at for _ in range(m)]  # per rank * m + microbatch
        self.opened = [0] * graph.world_size
        self.idle = [True] * graph.world_size
        self.ready: list[list[int]] = [[] for _ in groups]
        self.held_back: list[list[int]] = [[] for _ in groups]
        self.started: list[list[int]] = [[] for _ in self.units_at]
        self.first_seconds = [math.inf] * graph.world_size
        self.last_seconds = [0.0] * graph.world_size
        self.events: list[tuple[float, int]] = []

    def run(self) -> None:
        tasks = self.nodes * self.microbatches
        events = self.events
        events += [(0.0, task) for task in range(tasks) if self.missing[task] == 0]
        heapify(events)
        finished = 0
        while events:
            now = events[0][0]
            touched: set[int] = set()
            while events and events[0][0] <= now:
                event = heappop(events)[1]
                if event < tasks:
                    self._arrive(event, touched)
                else:
                    finished += 1
                    self._finish(event - tasks, now, touched)
            # Units that share a rank: whoever has the most urgent task goes first.
            waiting = [unit for unit in touched if self.ready[unit]]
            if len(waiting) > 1:
                waiting.sort(key=lambda unit: (self.ready[unit][0], unit))
            for unit in waiting:
                if all(self.idle[rank] for rank in self.unit_ranks[unit]):
                    self._start_next(unit, now)
        if finished != tasks:
            raise InternalError(
                "the list scheduler could not run every segment",
                [
                    f"{tasks - finished} of {tasks} forwards and backwards wait for each other",
                    "so values must form a cycle",
                ],
            )

    def _arrive(self, task: int, touched: set[int]) -> None:
        node, microbatch = divmod(task, self.microbatches)
        unit = self.node_unit[node]
        heappush(self.ready[unit], self.base_key[node] + microbatch * self.nodes)
        touched.add(unit)

    def _start_next(self, unit: int, now: float) -> None:
        m = self.microbatches
        ready = self.ready[unit]
        ranks = self.unit_ranks[unit]
        while ready:
            key = heappop(ready)
            node = self.node_at_place[key % self.nodes]
            microbatch = key // self.nodes % m
            opening = [r for r in ranks if self.unstarted_or_running[r * m + microbatch] == self.nodes_at[r]]
            if opening and self.forward[node] and any(self.opened[r] >= self.limits[r] for r in opening):
                self.held_back[unit].append(key)
                continue
            task = node * m + microbatch
            for rank in ranks:
                self.idle[rank] = False
                self.started[rank].append(task)
                if self.first_seconds[rank] > now:
                    self.first_seconds[rank] = now
            for rank in opening:
                self.opened[rank] += 1
            heappush(self.events, (now + self.seconds[node], self.nodes * m + task))
            return

    def _finish(self, task: int, now: float, touched: set[int]) -> None:
        m = self.microbatches
        node, microbatch = divmod(task, m)
        for rank in self.unit_ranks[self.node_unit[node]]:
            self.idle[rank] = True
            self.last_seconds[rank] = now
            self.unstarted_or_running[rank * m + microbatch] -= 1
            units = self.units_at[rank]
            touched.update(units)
            if self.unstarted_or_running[rank * m + microbatch] == 0:
                self.opened[rank] -= 1
                for unit in units:
                    for key in self.held_back[unit]:
                        heappush(self.ready[unit], key)
                    self.held_back[unit].clear()
        for successor, seconds in self.work.after[node]:
            self._deliver(successor * m + microbatch, now, seconds, touched)
        if self.forward[node] and microbatch + 1 < m:
            self._deliver(task + 1, now, 0.0, touched)

    def _deliver(self, task: int, now: float, seconds: float, touched: set[int]) -> None:
        arrival = max(self.arrival_seconds[task], now + seconds)
        self.missing[task] -= 1
        if self.missing[task]:
            self.arrival_seconds[task] = arrival
        elif arrival > now:
            heappush(self.events, (arrival, task))
        else:
            self._arrive(task, touched)

    def order(self) -> ComputeOrder:
        """Return what every rank started, in order."""
        nodes, m = self.work.nodes, self.microbatches
        made = [(INSTRUCTION[node.kind], node.segment.index) for node in nodes]
        return tuple(
            tuple(made[task // m][0](made[task // m][1], task % m) for task in tasks)
            for tasks in self.started
        )

    @property
    def step_seconds(self) -> float:
        return max(self.last_seconds)

    def span_seconds(self) -> list[float]:
        """Return the seconds of each rank from its first start to its last finish."""
        return [
            max(0.0, last - first) if tasks else 0.0
            for first, last, tasks in zip(self.first_seconds, self.last_seconds, self.started, strict=True)
        ]
