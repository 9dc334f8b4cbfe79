"""A workload: everything of a model that planning, verifying and deploying ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from passes.evaluate.copied_module import copied_with


@dataclass(frozen=True)
class Workload:
    """A model, a batch as its data loader would yield it, and the loss unless the model returns it itself."""

    model: nn.Module
    example_inputs: Any
    loss_fn: Callable[[Any, Any], Any] | None = None
    name: str = ""

    def copied(self) -> Workload:
        """Return the workload with a copy of the model, and with a loss that reads the copy where it read the model."""
        model, loss_fn = copied_with(self.model, self.loss_fn)
        return replace(self, model=model, loss_fn=loss_fn)


def workload_of(
    model: Any, example_inputs: Any = None, loss_fn: Callable[[Any, Any], Any] | None = None
) -> Workload:
    """Put together a model, or a workload, with the example and the loss that were given beside it."""
    given = model if isinstance(model, Workload) else Workload(model, None)
    return replace(
        given,
        example_inputs=given.example_inputs if example_inputs is None else example_inputs,
        loss_fn=given.loss_fn if loss_fn is None else loss_fn,
    )
