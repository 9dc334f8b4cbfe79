"""Predicted step of a placement, without making its programs: ranks candidates for the simulation.

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

from cost_models.arrays import FloatArray, IntArray
from passes.search.anywhere.problem import PlacementProblem, evaluate
from passes.search.free.makespan import TaskGraph, makespan

MESSAGE_SHARE = 0.5
"""Share of messages' seconds that a device is kept from computing, between none and all."""
MOST_PLAYED, PLAYED_TASKS = 3, 1200
"""Micro-batches that a prediction plays, at most; tasks, about: three micro-batches of 400 or one of 1,200."""


@dataclass(eq=False)
class Predictor:
    """Predictions for one number of micro-batches, cached by placement."""

    problem: PlacementProblem
    tasks: TaskGraph
    unit_of_task: IntArray
    microbatches: int
    _known: dict[tuple[int, ...], float] = field(default_factory=dict)

    @property
    def played_microbatches(self) -> int:
        """Number of micro-batches whose makespan is played; fewer of large graphs."""
        most = min(MOST_PLAYED, PLAYED_TASKS // len(self.tasks))
        return min(self.microbatches, max(1, most))

    @cached_property
    def _task_seconds(self) -> FloatArray:
        """Return [K, T] seconds of each task, forward and backward."""
        return np.asarray(self.tasks.forward + self.tasks.backward + self.tasks.weight)

    def signature(self, home: Sequence[int]) -> tuple[float, ...]:
        """Return numbers that are equal for placements of equal cost, up to the names of like devices."""
        loads = evaluate(self.problem, home)
        numbers = (self(home), *sorted(loads.seconds.tolist()), float(loads.memory_bytes.max()))
        return tuple(float(f"{number:.9g}") for number in numbers)

    def __call__(self, home: Sequence[int]) -> float:
        """Return the predicted seconds of a step; ten times as many and more if it does not fit."""
        key = tuple(home)
        if key not in self._known:
            self._known[key] = self._predict(key)
        return self._known[key]

    def knows(self, home: tuple[int, ...]) -> bool:
        """Tell whether the placement was predicted before."""
        return home in self._known

    def _predict(self, home: tuple[int, ...]) -> float:
        loads = evaluate(self.problem, home)
        played = self.played_microbatches
        where = np.asarray(home)[self.unit_of_task]
        seconds = makespan(self.tasks, where, played)
        each = self._task_seconds[where, np.arange(len(where))] * self.microbatches
        busy = np.bincount(where, weights=each, minlength=len(loads.seconds)).astype(np.float64)
        once = loads.seconds - loads.message_seconds - busy  # the optimizer's step, sums of ties
        seconds += (1 - played / self.microbatches) * period_seconds(busy, loads.message_seconds)
        seconds += float(once.max())
        if loads.overflow_bytes:
            seconds *= 10.0 + loads.overflow_bytes / float(self.problem.capacity_bytes.max())
        return seconds


def period_seconds(busy: FloatArray, messages: FloatArray) -> float:
    """Return seconds of all micro-batches in a full pipeline; ``busy`` and ``messages``: [K] seconds each.

    The longest over devices of computing with part of the messages, or of the messages alone.
    """
    return float(np.maximum(busy + MESSAGE_SHARE * messages, messages).max())
