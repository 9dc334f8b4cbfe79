"""A workload: everything of a model that planning, verifying and deploying ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Workload:
    """A model, a batch as its data loader would yield it, and the loss unless the model returns it itself."""

    model: nn.Module
    example_inputs: Any
    loss_fn: Callable[[Any, Any], Any] | None = None
    name: str = ""
