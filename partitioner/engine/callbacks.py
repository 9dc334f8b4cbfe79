"""Callbacks: what others do while an engine trains, such as logs, progress bars and early checkpoints.

    class Beep(Callback):
        def on_step_end(self, engine, info):
            if info.step % 1000 == 0: ...

    plan.deploy(model, callbacks=[Beep(), CsvLogger("run.csv")])

They are called on every rank, in their order, after the engine has done what they are told of. An error that one raises
reaches the caller of the engine's method. Numbers in a ``StepInfo`` are tensors: reading one (``.item()``) waits for a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partitioner.batches.step import StepInfo
    from partitioner.engine.engine import Engine
    from partitioner.evaluation.evaluation import EvalOutput


class Callback:
    """The base class: it does nothing, subclasses override what they need."""

    def on_train_start(self, engine: Engine) -> None:
        """Hear of the first training step before it runs; a run that is resumed did ``engine.step`` steps before."""

    def on_step_end(self, engine: Engine, info: StepInfo) -> None:
        """Hear of a training step after it ran: ``train_step``, or ``optimizer.step`` after ``forward_backward``."""

    def on_evaluate_end(self, engine: Engine, output: EvalOutput) -> None:
        """Hear of an ``eval_step`` after it ran."""

    def on_save(self, engine: Engine, path: Path) -> None:
        """Hear of a ``save``; an asynchronous one may still be writing ``path``."""

    def on_load(self, engine: Engine, directory: Path) -> None:
        """Hear of a ``load`` after it ran."""

    def on_close(self, engine: Engine) -> None:
        """Hear that the engine closes, also after an error, and even where another callback's ``on_close`` raises."""
