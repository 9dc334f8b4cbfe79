"""What a placement's step will take, without its programs: ranks candidates for the simulation.

    predicted = makespan of one micro-batch + (m - 1)/m · period     with the busiest device's seconds per step as period

Messages beside computation cost a device little where links are fast, and all their time where they wait for each other:
the period is the busiest device's with messages counted as ``MESSAGE_SHARE`` of their seconds, or its messages alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from passes.free_makespan import TaskGraph, makespan
from passes.free_problem import FreeProblem, IntArray, Loads, evaluate, overflow_bytes

MESSAGE_SHARE = 0.3
"""Of messages' seconds that a device is kept from computing (empirically: between none and all)."""


@dataclass(eq=False)
class Predictor:
    """Predictions for one number of micro-batches, cached by placement."""

    problem: FreeProblem
    tasks: TaskGraph
    unit_of_task: IntArray
    microbatches: int
    _known: dict[tuple[int, ...], float] = field(default_factory=dict)

    def __call__(self, home: Sequence[int]) -> float:
        """Predicted seconds of a step; much more than any if it does not fit or breaks pins."""
        key = tuple(home)
        if key not in self._known:
            self._known[key] = self._predict(key)
        return self._known[key]

    def _predict(self, home: tuple[int, ...]) -> float:
        loads = evaluate(self.problem, home)
        alone = makespan(self.tasks, np.asarray(home)[self.unit_of_task])
        seconds = alone + (1 - 1 / self.microbatches) * period_seconds(loads)
        over = overflow_bytes(self.problem, loads.memory_bytes)
        if over > 0:
            seconds *= 10.0 + over / float(self.problem.capacity_bytes.max())
        return seconds


def period_seconds(loads: Loads) -> float:
    """Of a step: the busiest device's computing and part of its messages, or its messages alone."""
    computing = loads.seconds - loads.message_seconds
    return float(np.maximum(computing + MESSAGE_SHARE * loads.message_seconds, loads.message_seconds).max())
