"""What a placement's step will take, without its programs: ranks candidates for the simulation.

    predicted = makespan of q micro-batches + (m - q)/m · period + the optimizer's step

with the busiest device's seconds of all micro-batches as period.

q is up to three, fewer for large graphs: filling and draining are then mostly over, and the rest is one per period.

Messages beside computation cost a device little where links are fast, and all their time where they wait for each other:
the period is the busiest device's with messages counted as ``MESSAGE_SHARE`` of their seconds, or its messages alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from passes.search.free.makespan import TaskGraph, makespan
from passes.search.free.problem import FloatArray, FreeProblem, IntArray, evaluate, overflow_bytes

MESSAGE_SHARE = 0.5
"""Of messages' seconds that a device is kept from computing (empirically: between none and all)."""
MOST_PLAYED, PLAYED_TASKS = 3, 1200
"""Micro-batches that are played: three of 400 tasks, one of 1,200."""


@dataclass(eq=False)
class Predictor:
    """Predictions for one number of micro-batches, cached by placement."""

    problem: FreeProblem
    tasks: TaskGraph
    unit_of_task: IntArray
    microbatches: int
    _known: dict[tuple[int, ...], float] = field(default_factory=dict)

    @cached_property
    def _task_seconds(self) -> FloatArray:
        """[K, T]"""
        return np.asarray(self.tasks.forward + self.tasks.backward + self.tasks.weight)

    def signature(self, home: Sequence[int]) -> tuple[float, ...]:
        """Equal for placements that differ in what costs nothing, or in the names of like devices, only."""
        loads = evaluate(self.problem, home)
        numbers = (self(home), *sorted(loads.seconds.tolist()), float(loads.memory_bytes.max()))
        return tuple(float(f"{number:.9g}") for number in numbers)

    def __call__(self, home: Sequence[int]) -> float:
        """Predicted seconds of a step; much more than any if it does not fit or breaks pins."""
        key = tuple(home)
        if key not in self._known:
            self._known[key] = self._predict(key)
        return self._known[key]

    def knows(self, home: tuple[int, ...]) -> bool:
        """Whether the placement was predicted before."""
        return home in self._known

    def _predict(self, home: tuple[int, ...]) -> float:
        loads = evaluate(self.problem, home)
        played = min(self.microbatches, max(1, min(MOST_PLAYED, PLAYED_TASKS // len(self.tasks))))
        where = np.asarray(home)[self.unit_of_task]
        seconds = makespan(self.tasks, where, played)
        each = self._task_seconds[where, np.arange(len(where))] * self.microbatches
        busy = np.bincount(where, weights=each, minlength=len(loads.seconds)).astype(np.float64)
        once = loads.seconds - loads.message_seconds - busy  # the optimizer's step, sums of ties
        seconds += (1 - played / self.microbatches) * period_seconds(busy, loads.message_seconds)
        seconds += float(once.max())
        over = overflow_bytes(self.problem, loads.memory_bytes)
        if over > 0:
            seconds *= 10.0 + over / float(self.problem.capacity_bytes.max())
        return seconds


def period_seconds(busy: FloatArray, messages: FloatArray) -> float:
    """Of a step: the busiest device's computing and part of its messages, or its messages alone. [K] seconds each."""
    return float(np.maximum(busy + MESSAGE_SHARE * messages, messages).max())
