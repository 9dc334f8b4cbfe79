"""The ends of steps and of engines, told to those who listen; an engine knows its callbacks by this only."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from partitioner.batches.step import StepInfo
    from partitioner.evaluation.evaluation import EvalOutput

logger = logging.getLogger("partitioner")


class Listener(Protocol):
    """Everything that an engine tells. To write one, derive from :class:`partitioner.engine.callbacks.Callback`."""

    def on_train_start(self, engine: Any) -> None: ...

    def on_step_end(self, engine: Any, info: StepInfo) -> None: ...

    def on_evaluate_end(self, engine: Any, output: EvalOutput) -> None: ...

    def on_save(self, engine: Any, path: Path) -> None: ...

    def on_load(self, engine: Any, directory: Path) -> None: ...

    def on_close(self, engine: Any) -> None: ...


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


def close_all(listeners: Sequence[Listener], engine: object, *others: Callable[[], None]) -> None:
    """Call ``on_close`` of each, then ``others``. All are tried; then the first error is raised."""
    first: BaseException | None = None
    for close in (*((lambda c=c: c.on_close(engine)) for c in listeners), *others):
        try:
            close()
        except BaseException as error:  # noqa: BLE001 - raised below, once everything is closed
            first = first or error
    if first is not None:
        raise first
