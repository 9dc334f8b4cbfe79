"""Callbacks: what others do while an engine trains, such as logs, progress bars and early checkpoints.

    class Beep(Callback):
        def on_step_end(self, engine, info):
            if info.step % 1000 == 0: ...

    plan.deploy(model, callbacks=[Beep(), CsvLogger("run.csv")])

They are called on every rank, in their order, after the engine has done what they are told of. An error that one raises
reaches the caller of the engine's method. Numbers in a ``StepInfo`` are tensors: reading one (``.item()``) waits for a GPU.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from partitioner.batches.step import StepInfo
    from partitioner.evaluation.evaluation import EvalOutput

logger = logging.getLogger("partitioner")


class Callback:
    """The base class: it does nothing, subclasses override what they need. ``engine``: the ``Engine`` that tells of it."""

    def on_train_start(self, engine: Any) -> None:
        """Hear of the first training step before it runs; a run that is resumed did ``engine.step`` steps before."""

    def on_step_end(self, engine: Any, info: StepInfo) -> None:
        """Hear of a training step after it ran: ``train_step``, or ``optimizer.step`` after ``forward_backward``."""

    def on_evaluate_end(self, engine: Any, output: EvalOutput) -> None:
        """Hear of an ``eval_step`` after it ran."""

    def on_save(self, engine: Any, path: Path) -> None:
        """Hear of a ``save``; an asynchronous one may still be writing ``path``."""

    def on_load(self, engine: Any, directory: Path) -> None:
        """Hear of a ``load`` after it ran."""

    def on_close(self, engine: Any) -> None:
        """Hear that the engine closes, also after an error, and even where another callback's ``on_close`` raises."""


class ByParts:
    """Notices the end of a step whose parts are called alone: the optimizer's step after ``forward_backward``."""

    def __init__(self, optimizer: torch.optim.Optimizer, step_ended: Callable[[], None]) -> None:
        """Watch ``optimizer``. ``step_ended``: the engine's own method, called after the optimizer's step."""
        self._step_ended = weakref.WeakMethod(step_ended)  # the optimizer keeps this object, not the engine
        self._open = self._warned = False
        optimizer.register_step_post_hook(self._stepped)

    def begin(self) -> None:
        """Expect the optimizer's step: ``forward_backward`` is over."""
        if self._open and not self._warned:
            self._warned = True
            logger.warning(
                "forward_backward was called again without optimizer.step() or engine.zero_grad(): gradients are replaced, "
                "not added to; to accumulate over more samples, plan a larger batch_size"
            )
        self._open = True

    def forget(self) -> None:
        """Expect no step any more: its gradients were dropped, so it never ends."""
        self._open = False

    def _stepped(self, *_: object) -> None:
        step_ended = self._step_ended()
        if self._open and step_ended is not None:
            self._open = False
            step_ended()


def close_all(callbacks: Sequence[Callback], engine: object, *others: Callable[[], None]) -> None:
    """Call ``on_close`` of each, then ``others``. All are tried; then the first error is raised."""
    first: BaseException | None = None
    for close in (*((lambda c=c: c.on_close(engine)) for c in callbacks), *others):
        try:
            close()
        except BaseException as error:  # noqa: BLE001 - raised below, once everything is closed
            first = first or error
    if first is not None:
        raise first
