"""The optimizers whose memory can be budgeted, as torch.optim makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

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


TAKE_SPARSE = frozenset({"none", "sgd"})
"""Those that take sparse gradients as they are."""


def made(
    name: str, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], learning_rate: float
) -> torch.optim.Optimizer:
    """Make the optimizer called ``name``. Sparse gradients (of ``nn.Embedding(sparse=True)``) are made dense if need be."""
    optimizer = MAKE[name](parameters, lr=learning_rate)
    if name not in TAKE_SPARSE:
        optimizer.register_step_pre_hook(_with_dense_gradients)
    return optimizer


def _with_dense_gradients(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()


def make_optimizer(
    name: str, parameters: Iterable[nn.Parameter], learning_rate: float
) -> torch.optim.Optimizer | None:
    """Make the optimizer called ``name`` over ``parameters``; None where there are none (torch refuses an empty list)."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return made(name, trained, learning_rate) if trained else None
