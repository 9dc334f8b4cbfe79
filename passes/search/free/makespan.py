"""Makespan of a few micro-batches on a placement: a list schedule of tasks, forward and backward.

    task      ops that run as one, without interruption; tasks form a DAG
    forward   a task starts when its device is free and what it reads has arrived
    backward  after its own forward and the backwards of all its readers that carry a gradient
    weight    the half of backward that makes parameters' gradients: after the backward, when nothing else is to do
    message   value and gradient once per device; messages between a pair of devices wait for each other

Among what is ready on a device, backwards come before forwards, then older micro-batches, then the longest way to the end:
the rules of the list scheduler that splits backwards (``runtime.schedules.list_scheduler``), without its limits of
micro-batches in flight.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from passes.search.touches import BoolArray

RANKS = (1, 0, 2)
"""Priority of forwards, backwards and weight halves where several are ready; the lowest runs first."""


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """T tasks in a topological order, for one micro-batch; K devices."""

    readers: tuple[tuple[int, ...], ...]
    forward: FloatArray
    """[K, T] seconds"""
    backward: FloatArray
    """[K, T] seconds of the half that others wait for, 0 where there is none"""
    weight: FloatArray
    """[K, T] seconds of the half that nobody waits for"""
    sent_bytes: FloatArray
    """[T] bytes of the values that leave the task"""
    gradient_bytes: FloatArray
    """[T] bytes sent back by each device that reads the task's values"""
    passes_gradient: BoolArray
    """[T] True where a gradient goes through the task"""
    latency: FloatArray
    """[K, K] seconds of a message of no bytes"""
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
        """Return the readers that send a gradient back to each task."""
        passing = self.passes_gradient.tolist()
        return tuple(
            tuple(v for v in readers if passing[v]) if passing[u] else ()
            for u, readers in enumerate(self.readers)
        )

    @cached_property
    def gradient_producers(self) -> tuple[tuple[int, ...], ...]:
        """Return the producers that each task sends a gradient back to."""
        passing = self.passes_gradient.tolist()
        return tuple(
            tuple(p for p in producers if passing[p]) if passing[v] else ()
            for v, producers in enumerate(self.producers)
        )

    @cached_property
    def urgency(self) -> list[float]:
        """Return [3T] seconds of the longest way to the end from each forward, backward, weight half; without messages."""
        count = len(self)
        forward, backward = self.forward.mean(axis=0).tolist(), self.backward.mean(axis=0).tolist()
        way = [0.0] * (3 * count)
        longest_back = [0.0] * count
        for task in range(count):  # backward runs from readers to producers
            longest_back[task] = backward[task] + max(
                (longest_back[p] for p in self.gradient_producers[task]), default=0.0
            )
        for task in reversed(range(count)):
            after = max((way[r] for r in self.readers[task]), default=0.0)
            way[task] = forward[task] + max(after, longest_back[task])
            way[count + task] = longest_back[task]
        return way

    @cached_property
    def _lists(self) -> tuple[list[list[float]], ...]:
        each = np.concatenate([self.forward, self.backward, self.weight], axis=1)
        return each.tolist(), self.latency.tolist(), self.seconds_per_byte.tolist()

    @cached_property
    def _waiting(self) -> list[int]:
        """Return [3T] the number of events that each instruction waits for.

        forward       its producers
        backward      its own forward, and its readers' backwards
        weight half   its own backward
        """
        forward = [len(p) for p in self.producers]
        return forward + [1 + len(r) for r in self.gradient_readers] + [1] * len(forward)


def makespan(tasks: TaskGraph, home: IntArray | list[int], microbatches: int = 1) -> float:
    """Return the seconds of a few micro-batches, forward and backward, with task t on device ``home[t]``.

    O(m · (T + edges) · log).
    """
    return Clock(tasks, [int(h) for h in home], microbatches).run()


class Clock:
    """One playing of the tasks. Instruction i of micro-batch b is number b · 3T + i: forwards, backwards, weight halves."""

    def __init__(self, tasks: TaskGraph, home: list[int], microbatches: int) -> None:
        self.tasks, self.home = tasks, home
        devices = tasks.forward.shape[0]
        self.seconds, self.latency, self.per_byte = tasks._lists
        self.waiting = tasks._waiting * microbatches
        self.arrival = [0.0] * len(self.waiting)
        self.has_weight = [seconds > 0 for seconds in tasks.weight.max(axis=0).tolist()]
        self.link_free = [[0.0] * devices for _ in range(devices)]
        self.ready: list[list[tuple[int, float, int]]] = [[] for _ in range(devices)]
        self.events: list[tuple[float, int, int]] = []
        """Heap of (seconds, 0 for "ends" or 1 for "is ready", instruction)."""
        self.sent = tasks.sent_bytes.tolist()
        self.gradient = tasks.gradient_bytes.tolist()
        self.count = len(tasks)
        self.left: dict[tuple[int, int, int], int] = {}
        """Number of readers that still owe their part of a gradient, by (micro-batch, producer, device)."""

    def run(self) -> float:
        """Play everything; return the seconds at which the last instruction ends."""
        end, events, count = 0.0, self.events, self.count
        devices = len(self.ready)
        busy = [False] * devices
        for instruction, waits in enumerate(self.waiting):
            if waits == 0:
                heapq.heappush(events, (0.0, 1, instruction))
        urgency = self.tasks.urgency
        while events:
            now = events[0][0]
            touched: set[int] = set()
            while events and events[0][0] <= now:
                _, kind, instruction = heapq.heappop(events)
                step = instruction % (3 * count)
                device = self.home[step % count]
                touched.add(device)
                if kind == 0:
                    busy[device] = False
                    end = now
                    self._ended(instruction, now)
                else:
                    # backwards, forwards, weight halves; older micro-batches first, then the longest way
                    rank = RANKS[int(step // count)]
                    order = instruction // (3 * count) + rank * len(self.waiting)
                    heapq.heappush(self.ready[device], (order, -urgency[step], instruction))
            for device in touched:
                if not busy[device] and self.ready[device]:
                    _, _, instruction = heapq.heappop(self.ready[device])
                    busy[device] = True
                    done = now + self.seconds[device][instruction % (3 * count)]
                    heapq.heappush(events, (done, 0, instruction))
        return end

    def _ended(self, instruction: int, now: float) -> None:
        """Send on what the instruction made, and count down those that wait for it."""
        tasks, count = self.tasks, self.count
        microbatch, step = divmod(instruction, 3 * count)
        first = microbatch * 3 * count
        if step >= 2 * count:
            return
        if step < count:
            self._arrives(instruction + count, now)
            home = self.home[step]
            arrivals = {home: now}
            for reader in tasks.readers[step]:
                target = self.home[reader]
                if target not in arrivals:
                    arrivals[target] = self._send(home, target, self.sent[step], now)
                self._arrives(first + reader, arrivals[target])
            return
        task = step - count
        home = self.home[task]
        if self.has_weight[task]:
            self._arrives(instruction + count, now)
        for producer in tasks.gradient_producers[task]:
            target = self.home[producer]
            arrives = now
            if home != target:
                # one gradient per device: it leaves when the device's last reader has made its part
                key = microbatch, producer, home
                left = self.left.get(key) or self._readers_on(producer, home)
                self.left[key] = left - 1
                if left == 1:
                    arrives = self._send(home, target, self.gradient[producer], now)
            self._arrives(first + producer + count, arrives)

    def _readers_on(self, producer: int, device: int) -> int:
        """Count the readers on ``device`` that send a gradient back to ``producer``."""
        return sum(self.home[reader] == device for reader in self.tasks.gradient_readers[producer])

    def _send(self, source: int, target: int, size_bytes: float, now: float) -> float:
        """Return the seconds at which a message arrives; the pair's messages in both directions share one queue."""
        a, b = (source, target) if source < target else (target, source)
        begin = max(now, self.link_free[a][b])
        took = self.latency[source][target] + size_bytes * self.per_byte[source][target]
        self.link_free[a][b] = begin + took
        return begin + took

    def _arrives(self, instruction: int, when: float) -> None:
        """Note one of the things that ``instruction`` waits for; after the last it is ready."""
        self.waiting[instruction] -= 1
        self.arrival[instruction] = max(self.arrival[instruction], when)
        if self.waiting[instruction] == 0:
            heapq.heappush(self.events, (self.arrival[instruction], 1, instruction))
