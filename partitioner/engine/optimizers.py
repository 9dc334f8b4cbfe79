"""The optimizers whose memory can be budgeted, as torch.optim makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "none": torch.optim.SGD,
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
}


def make_optimizer(
    name: str, parameters: Iterable[nn.Parameter], learning_rate: float
) -> torch.optim.Optimizer | None:
    """Make the optimizer called ``name`` over ``parameters``; None where there are none (torch refuses an empty list)."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return MAKE[name](trained, lr=learning_rate) if trained else None
