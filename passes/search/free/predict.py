"""Predicted step of a placement, without making its programs: ranks candidates for the simulation.

    predicted = makespan of q micro-batches + (m - q)/m · period + the optimizer's step

with the busiest device's seconds of all micro-batches as period.

q is up to three, fewer for large graphs: filling and draining are then mostly over, and the rest is one per period.

Messages beside computation cost a device little where links are fast, and all their time where they wait for each other:
the period is the busiest device's with messages counted as ``message_share`` of their seconds, or its messages alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from passes.search.free.makespan import TaskGraph, makespan
from passes.search.free.problem import FreeProblem, evaluate, overflow_bytes
from passes.search.free.tuning import DEFAULT, FreeTuning


@dataclass(eq=False)
class Predictor:
    """Predictions for one number of micro-batches, cached by placement."""

    problem: FreeProblem
    tasks: TaskGraph
    unit_of_task: IntArray
    microbatches: int
    tuning: FreeTuning = DEFAULT
    _known: dict[tuple[int, ...], float] = field(default_factory=dict)

    @property
    def played_microbatches(self) -> int:
        """Number of micro-batches whose makespan is played; fewer of large graphs."""
        most = min(self.tuning.most_played, self.tuning.played_tasks // len(self.tasks))
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
        seconds += (1 - played / self.microbatches) * period_seconds(
            busy, loads.message_seconds, self.tuning.message_share
        )
        seconds += float(once.max())
        over = overflow_bytes(self.problem, loads.memory_bytes)
        if over > 0:
            seconds *= 10.0 + over / float(self.problem.capacity_bytes.max())
        return seconds


def period_seconds(busy: FloatArray, messages: FloatArray, message_share: float) -> float:
    """Return seconds of all micro-batches in a full pipeline; ``busy`` and ``messages``: [K] seconds each.

    The longest over devices of computing with part of the messages, or of the messages alone.
    """
    return float(np.maximum(busy + message_share * messages, messages).max())
