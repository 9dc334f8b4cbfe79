"""What others may do while an engine trains: loggers, progress bars, early checkpoints.

    class Beep(Callback):
        def on_step_end(self, engine, info):
            if info.step % 1000 == 0: ...

    plan.deploy(model, callbacks=[Beep(), CsvLogger("run.csv")])

Callbacks are called on every rank, in their order, after the engine has done what they are told of. What they raise reaches
the caller of the engine's method. Numbers in a ``StepInfo`` are tensors: reading one (``.item()``) waits for a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partitioner.batches.step import StepInfo
    from partitioner.engine.engine import Engine
    from partitioner.evaluation.evaluation import EvalOutput


class Callback:
    """Does nothing; subclasses override what they need."""

    def on_train_start(self, engine: Engine) -> None:
        """Before this engine's first training step: ``engine.step`` steps were done before, by a run that it resumes."""

    def on_step_end(self, engine: Engine, info: StepInfo) -> None:
        """After a training step: ``train_step``, or ``optimizer.step`` after ``forward_backward``."""

    def on_evaluate_end(self, engine: Engine, output: EvalOutput) -> None:
        """After ``eval_step``."""

    def on_save(self, engine: Engine, path: Path) -> None:
        """After ``save``; an asynchronous one may still be writing ``path``."""

    def on_load(self, engine: Engine, directory: Path) -> None:
        """After ``load``."""

    def on_close(self, engine: Engine) -> None:
        """When the engine closes, also after an error. Called even where another callback's raises."""
