"""The plain loop that every way is compared with: the user's own module, SGD, three steps. No code of this project.

Where a plan cuts a batch into micro-batches the loop accumulates their gradients, as its user would.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.odd_models.case import Case, Ready

STEPS, LEARNING_RATE, MOMENTUM = 3, 0.05, 0.9


@dataclass(frozen=True)
class Trained:
    """Losses of the steps, and the model's state after them."""

    losses: list[float]
    state: dict[str, Tensor]


def seed_all(seed: int) -> None:
    """Seed every generator that a model may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def made(case: Case) -> Ready:
    """Make the case's model: the same one in every process."""
    torch.set_default_dtype(torch.float64)
    seed_all(0)
    return case.make()


def batch_of(ready: Ready, step: int) -> Any:
    """Draw the batch of a step: the same one in every process."""
    seed_all(1000 + step)
    return ready.batch()


def train(case: Case, microbatches: int, *, mean: bool = True) -> Trained:
    """Train three steps. ``mean``: the batch's loss is the mean of its micro-batches' by samples; else their sum."""
    ready = made(case)
    model = ready.model.train()
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, momentum=MOMENTUM
    )
    losses = []
    for step in range(STEPS):
        batch = batch_of(ready, step)
        optimizer.zero_grad()
        total = 0.0
        for piece, weight in pieces(batch, microbatches, case):
            loss = _loss(ready, model, piece) * (weight if mean else 1.0)
            if loss.requires_grad:
                loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return Trained(losses, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})


def _loss(ready: Ready, model: nn.Module, piece: Any) -> Tensor:
    if isinstance(piece, Mapping):
        taken = inspect.signature(model.forward).parameters
        output = model(**{name: value for name, value in piece.items() if name in taken})
    elif isinstance(piece, tuple) and not hasattr(piece, "_fields"):
        output = model(*piece)
    else:
        output = model(piece)
    loss = output if ready.loss is None else ready.loss(output, piece)
    return loss[0] if isinstance(loss, tuple) else loss


def pieces(batch: Any, count: int, case: Case) -> list[tuple[Any, float]]:
    """Cut a batch into micro-batches, the first ones larger, with their shares of the samples."""
    count = 1 if case.whole else min(count, case.samples)
    sizes = [case.samples // count + (index < case.samples % count) for index in range(count)]
    found, start = [], 0
    for size in sizes:
        found.append((_cut(batch, "x", start, size, case), size / case.samples))
        start += size
    return found


def _cut(value: Any, name: str, start: int, size: int, case: Case) -> Any:
    if isinstance(value, Tensor):
        dims = case.batch_dims or {}
        dim = dims[name] if name in dims else next(iter(dims.values())) if len(dims) == 1 else 0
        return value if dim is None or value.dim() == 0 else value.narrow(dim, start, size)
    if isinstance(value, Mapping):
        return {key: _cut(part, key, start, size, case) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{key: _cut(part, key, start, size, case) for key, part in vars(value).items()}
        )
    if isinstance(value, list | tuple):
        return type(value)(_cut(part, name, start, size, case) for part in value)
    return value
