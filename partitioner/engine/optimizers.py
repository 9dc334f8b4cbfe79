"""The optimizers whose memory can be budgeted, as torch.optim makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

MakeOptimizer = Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]


def _make(cls: Callable[..., torch.optim.Optimizer], **options: float) -> MakeOptimizer:
    def make(parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        return partial(cls, **options)(list(parameters), lr=learning_rate)

    return make


MAKE: dict[str, MakeOptimizer] = {
    "none": _make(torch.optim.SGD),
    "sgd": _make(torch.optim.SGD),
    "momentum": _make(torch.optim.SGD, momentum=0.9),
    "adam": _make(torch.optim.Adam),
    "adamw": _make(torch.optim.AdamW),
    "amsgrad": _make(torch.optim.AdamW, amsgrad=True),
}


def make_optimizer(
    name: str, parameters: Iterable[nn.Parameter], learning_rate: float
) -> torch.optim.Optimizer | None:
    """Make the optimizer called ``name`` over ``parameters``; None where there are none (torch refuses an empty list)."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return MAKE[name](trained, learning_rate) if trained else None
