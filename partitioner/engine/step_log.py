"""Training steps as numbers for a log: the rows that every logger writes, in whatever form.

Steps are collected and nothing is read from a device until the ``every``-th of them; then one row is made: loss, gradient
norm, learning rate and metrics of that step, rates over all steps since the row before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cost_models.errors import UsageError
from partitioner.engine.callbacks import Callback

if TYPE_CHECKING:
    from partitioner.batches.step import StepInfo
    from partitioner.engine.engine import Engine
    from partitioner.evaluation.evaluation import EvalOutput

Row = Mapping[str, float | None]
"""Numbers by name; None where there is none."""


class StepLogger(Callback):
    """A callback that makes rows on rank 0; subclasses write them. ``every``: steps per row."""

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise UsageError(f"cannot log every {every} steps", suggestions=["every=1 or more"])
        self._every = every
        self._forget()
        self._ended: float | None = None

    def on_train_start(self, engine: Engine) -> None:
        self._ended = None

    def on_step_end(self, engine: Engine, info: StepInfo) -> None:
        if engine.state.rank != 0:
            return
        now = time.perf_counter()
        if self._ended is not None:
            self._between_seconds += max(0.0, now - self._ended - info.seconds)
        self._ended = now
        self._steps += 1
        self._seconds += info.seconds
        self._samples += info.samples
        self._tokens += info.tokens or 0
        if info.step % self._every == 0:
            row = self._row(engine, info)
            self._forget()
            self.write(info.step, row)

    def on_evaluate_end(self, engine: Engine, output: EvalOutput) -> None:
        if engine.state.rank == 0:
            metrics = {f"metric/{name}": metric.item() for name, metric in output.metrics.items()}
            self.write_evaluation(engine.step, {"loss": output.loss.item(), **metrics})

    def write(self, step: int, row: Row) -> None:
        """Write a row, on rank 0, at the end of step number ``step``."""
        raise NotImplementedError

    def write_evaluation(self, step: int, row: Row) -> None:
        """Write ``loss`` and metrics of an evaluation, on rank 0, once ``step`` steps were done."""
        raise NotImplementedError

    def _row(self, engine: Engine, info: StepInfo) -> Row:
        groups = engine.optimizer.param_groups
        rates = {f"lr_{number}": float(group["lr"]) for number, group in enumerate(groups[1:], 1)}
        prediction, batch_size = engine.plan.prediction, engine.plan.batch_size
        return {
            "loss": info.loss.item(),
            "grad_norm": None if info.grad_norm is None else info.grad_norm.item(),
            "lr": float(groups[0]["lr"]),
            **rates,
            "step_seconds": self._seconds / self._steps,
            "between_seconds": self._between_seconds / self._steps,
            "samples_per_second": self._samples / self._seconds,
            "tokens_per_second": None if info.tokens is None else self._tokens / self._seconds,
            "mfu": prediction.utilization(batch_size, self._samples / self._seconds),
            "skipped": float(info.skipped),
            **{f"metric/{name}": metric.item() for name, metric in info.metrics.items()},
        }

    def _forget(self) -> None:
        self._steps = self._samples = self._tokens = 0
        self._seconds = self._between_seconds = 0.0
