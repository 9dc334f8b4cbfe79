"""A trial: does an optimizer treat every element of a parameter by itself, as it must where ranks train parts of one?

The optimizer's own class makes a few steps on a small matrix, and on the halves of the same matrix:

    AdamW                        the halves become what the matrix became
    Adafactor, LAMB, Muon        they do not: means of rows and columns, norms and products of a whole matrix enter
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.errors import UsageError
from cost_models.units import listed
from partitioner.engine.optimizer_memory import FOREIGN_ERRORS, PROBE_SIZE, options_of

logger = logging.getLogger("partitioner")

STEPS = 3
_NEAR = 1e-4
"""The relative difference that is rounding: float32 rounds at 1e-7 a step, means of half a matrix differ by tenths."""


def refuse_whole_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], parts: Collection[str], device: torch.device
) -> None:
    """Raise UsageError where ``optimizer`` would do something else to ``parts`` than to whole parameters.

    ``names``: the name of every parameter of the model, by its id; ``parts``: those of which ranks train blocks.
    """
    found: list[str] = []
    for group in optimizer.param_groups:
        cut = [names[id(p)] for p in group["params"] if names[id(p)] in parts]
        if cut and not _by_elements(type(optimizer), group, device):
            found += cut
    if not found:
        return
    kind = type(optimizer).__name__
    raise UsageError(
        f"{kind} cannot train parts of parameters",
        because=[
            f"{kind} treats a tensor as a whole: half a matrix becomes something else by itself",
            f"this plan trains parts of {listed(found, 5, count_rest=True)}",
        ],
        suggestions=[
            "one that treats every element by itself, such as torch.optim.AdamW",
            'plan with these parameters whole: without ZeRO, with pins={name: "R/R"}, or without splitting neurons',
        ],
    )


def _by_elements(cls: Any, group: Mapping[str, Any], device: torch.device) -> bool:
    """Tell whether halves of a matrix become what they become in the whole of it."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(STEPS + 1, PROBE_SIZE, PROBE_SIZE, generator=generator)
    # Unlike halves: those of one size would have nearly the same means.
    numbers *= torch.linspace(0.1, 2.0, PROBE_SIZE)[:, None] * torch.linspace(0.1, 2.0, PROBE_SIZE)
    try:
        whole = _stepped(cls, group, numbers.to(device))
        for dim in (0, 1):
            halves = [_stepped(cls, group, half.to(device)) for half in numbers.chunk(2, dim + 1)]
            if not torch.allclose(torch.cat(halves, dim), whole, rtol=_NEAR, atol=_NEAR * 1e-3):
                return False
    except FOREIGN_ERRORS as error:
        logger.warning(
            "whether %s treats every element by itself cannot be tried out (%s)", cls.__name__, error
        )
    return True


def _stepped(cls: Any, group: Mapping[str, Any], numbers: Tensor) -> Tensor:
    """Train a parameter. ``numbers``: it, then its gradients, of shape (1 + steps, rows, columns)."""
    parameter = nn.Parameter(numbers[0].clone())
    optimizer = cls([parameter], **options_of(cls, group))
    for gradient in numbers[1:]:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()
