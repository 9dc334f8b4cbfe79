"""What others may do while an engine trains: loggers, progress bars, early checkpoints.

    class Beep(Callback):
        def on_step_end(self, engine, info):
            if info.step % 1000 == 0: ...

    plan.deploy(model, callbacks=[Beep(), CsvLogger("run.csv")])

Callbacks are called on every rank, in their order, after the engine has done what they are told of. What they raise reaches
the caller of the engine's method. Numbers in a ``StepInfo`` are tensors: reading one (``.item()``) waits for a GPU.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partitioner.batches.step import StepInfo
    from partitioner.engine.engine import Engine
    from partitioner.evaluation.evaluation import EvalOutput

logger = logging.getLogger("partitioner")


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


class ByParts:
    """Notices the end of a step whose parts are called alone: the optimizer's step after ``forward_backward``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)  # the optimizer keeps this object, and must not keep the engine
        self._open = self._warned = False
        engine.optimizer.register_step_post_hook(self._stepped)

    def begin(self) -> None:
        """``forward_backward`` is over."""
        if self._open and not self._warned:
            self._warned = True
            logger.warning(
                "forward_backward was called again without optimizer.step() or engine.zero_grad(): gradients are replaced, "
                "not added to; to accumulate over more samples, plan a larger batch_size"
            )
        self._open = True

    def forget(self) -> None:
        """Gradients were dropped: a step without an ``optimizer.step`` never ended."""
        self._open = False

    def _stepped(self, *_: object) -> None:
        engine = self._engine()
        if self._open and engine is not None:
            self._open = False
            engine.step_ended()


def close_all(callbacks: Sequence[Callback], engine: Engine, *others: Callable[[], None]) -> None:
    """``on_close`` of each, then ``others``; all are tried, then what the first of them raised is raised."""
    first: BaseException | None = None
    for close in (*((lambda c=c: c.on_close(engine)) for c in callbacks), *others):
        try:
            close()
        except BaseException as error:  # noqa: BLE001 - raised below, once everything is closed
            first = first or error
    if first is not None:
        raise first
