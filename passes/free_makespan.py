"""How long one micro-batch takes on a placement: a list schedule of tasks, forward and backward.

    task      ops that run as one, without interruption; tasks form a DAG
    forward   a task starts when its device is free and what it reads has arrived
    backward  after its own forward and the backwards of all its readers that carry a gradient
    message   value and gradient once per device; messages between a pair of devices wait for each other

Of what is ready on a device the one with the longest way to the end runs first, backward before forward at equal length.
The step of m micro-batches is about  makespan + (m - 1) · the busiest device's seconds per micro-batch:  the first
micro-batch alone, then one per period.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from passes.free_problem import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """T tasks in a topological order, for one micro-batch; K devices."""

    readers: tuple[tuple[int, ...], ...]
    forward: FloatArray
    """[K, T] seconds"""
    backward: FloatArray
    """[K, T] seconds, 0 where there is none"""
    sent_bytes: FloatArray
    """[T] of the values that leave the task"""
    gradient_bytes: FloatArray
    """[T] sent back by each device that reads it"""
    passes_gradient: BoolArray
    """[T]"""
    latency: FloatArray
    """[K, K]"""
    seconds_per_byte: FloatArray
    """[K, K]"""

    def __len__(self) -> int:
        return len(self.readers)

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.readers]
        for task, readers in enumerate(self.readers):
            for reader in readers:
                found[reader].append(task)
        return tuple(map(tuple, found))

    @cached_property
    def gradient_readers(self) -> tuple[tuple[int, ...], ...]:
        """Readers that send a gradient back to each task."""
        passing = self.passes_gradient.tolist()
        return tuple(
            tuple(v for v in readers if passing[v]) if passing[u] else ()
            for u, readers in enumerate(self.readers)
        )

    @cached_property
    def urgency(self) -> list[float]:
        """[2T] the longest way to the end from the start of each forward, then of each backward, nothing sent."""
        count = len(self)
        forward, backward = self.forward.mean(axis=0).tolist(), self.backward.mean(axis=0).tolist()
        way = [0.0] * (2 * count)
        longest_back = [0.0] * count
        for task in range(count):  # backward runs from readers to producers
            longest_back[task] = backward[task] + max(
                (longest_back[p] for p in self.producers[task] if task in self.gradient_readers[p]),
                default=0.0,
            )
        for task in reversed(range(count)):
            after = max((way[r] for r in self.readers[task]), default=0.0)
            way[task] = forward[task] + max(after, longest_back[task])
            way[count + task] = longest_back[task]
        return way

    @cached_property
    def _lists(self) -> tuple[list[list[float]], ...]:
        both = np.concatenate([self.forward, self.backward], axis=1)
        return both.tolist(), self.latency.tolist(), self.seconds_per_byte.tolist()

    @cached_property
    def _waiting(self) -> list[int]:
        """[2T] what each instruction waits for: producers; own forward and readers' backwards."""
        forward = [len(p) for p in self.producers]
        return forward + [1 + len(r) for r in self.gradient_readers]


def makespan(tasks: TaskGraph, home: IntArray | list[int]) -> float:
    """Seconds of one micro-batch, forward and backward, with task t on device ``home[t]``. O((T + edges) log T)."""
    return Clock(tasks, [int(h) for h in home]).run()


class Clock:
    """One playing of the tasks."""

    def __init__(self, tasks: TaskGraph, home: list[int]) -> None:
        self.tasks, self.home = tasks, home
        devices = tasks.forward.shape[0]
        self.seconds, self.latency, self.per_byte = tasks._lists
        self.waiting = tasks._waiting.copy()
        self.arrival = [0.0] * len(self.waiting)
        self.link_free = [[0.0] * devices for _ in range(devices)]
        self.ready: list[list[tuple[float, int]]] = [[] for _ in range(devices)]
        self.free = [0.0] * devices
        self.events: list[tuple[float, int, int]] = []
        """(when, 0: something arrives for, 1: this ends, instruction)"""
        self.sent = tasks.sent_bytes.tolist()
        self.gradient = tasks.gradient_bytes.tolist()
        self.count = len(tasks)
        self.gradients: dict[tuple[int, int], tuple[int, float]] = {}

    def run(self) -> float:
        """The end of the last instruction."""
        end, events, waiting = 0.0, self.events, self.waiting
        busy = [False] * len(self.free)
        for instruction, count in enumerate(waiting):
            if count == 0:
                heapq.heappush(events, (0.0, 1, instruction))
        urgency = self.tasks.urgency
        while events:
            now = events[0][0]
            touched: set[int] = set()
            while events and events[0][0] <= now:
                _, kind, instruction = heapq.heappop(events)
                device = self.home[instruction % self.count]
                touched.add(device)
                if kind == 0:
                    busy[device] = False
                    end = now
                    self._ended(instruction, now)
                else:
                    heapq.heappush(self.ready[device], (-urgency[instruction], instruction))
            for device in touched:
                if not busy[device] and self.ready[device]:
                    _, instruction = heapq.heappop(self.ready[device])
                    busy[device] = True
                    done = now + self.seconds[device][instruction]
                    heapq.heappush(events, (done, 0, instruction))
        return end

    def _ended(self, instruction: int, now: float) -> None:
        tasks, count = self.tasks, self.count
        if instruction < count:
            self._arrives(instruction + count, now)
            home = self.home[instruction]
            arrivals = {home: now}
            for reader in tasks.readers[instruction]:
                target = self.home[reader]
                if target not in arrivals:
                    arrivals[target] = self._send(home, target, self.sent[instruction], now)
                self._arrives(reader, arrivals[target])
            return
        task = instruction - count
        for producer in tasks.producers[task]:
            if task not in tasks.gradient_readers[producer]:
                continue
            home, target = self.home[task], self.home[producer]
            if home == target:
                self._arrives(producer + count, now)
                continue
            # one gradient per device: it leaves when the device's last reader has made its part
            key = (producer, home)
            left, _ = self.gradients.get(key, (self._readers_on(producer, home), 0.0))
            self.gradients[key] = (left - 1, now)
            if left > 1:
                self._arrives(producer + count, now)
            else:
                self._arrives(producer + count, self._send(home, target, self.gradient[producer], now))

    def _readers_on(self, producer: int, device: int) -> int:
        return sum(self.home[reader] == device for reader in self.tasks.gradient_readers[producer])

    def _send(self, source: int, target: int, size_bytes: float, now: float) -> float:
        """When a message arrives; the pair's messages in both directions share one queue."""
        a, b = (source, target) if source < target else (target, source)
        begin = max(now, self.link_free[a][b])
        self.link_free[a][b] = begin + size_bytes * self.per_byte[source][target]
        return self.link_free[a][b] + self.latency[source][target]

    def _arrives(self, instruction: int, when: float) -> None:
        self.waiting[instruction] -= 1
        self.arrival[instruction] = max(self.arrival[instruction], when)
        if self.waiting[instruction] == 0:
            heapq.heappush(self.events, (self.arrival[instruction], 1, instruction))
