"""Trials of an optimizer's own class on a small matrix: the state that it keeps, and whether it can train parts of tensors.

With each group's options it makes a step; what it then holds in its state, per byte of the parameter, is what it will hold
for the model. Numbers (step counters) are left out.

    AdamW                 2 · parameter         SGD                  0
    AdamW(amsgrad=True)   3 · parameter         SGD(momentum=0.9)    1 · parameter

Where ranks train parts of parameters it makes a few steps on the matrix, and on the halves of the same matrix:

    AdamW                        the halves become what the matrix became
    Adafactor, LAMB, Muon        they do not: means of rows and columns, norms and products of a whole matrix enter
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cost_models.errors import PlanError, UsageError
from cost_models.memory import OPTIMIZERS
from cost_models.units import format_bytes, listed

logger = logging.getLogger("partitioner")

PROBE_SIZE = 16
"""Rows and columns of the small matrix. It is a matrix because some optimizers take no vectors."""


FOREIGN_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)
"""Errors that an optimizer that somebody else wrote may raise when it is built again, or has no real model."""


def state_ratios(optimizer: torch.optim.Optimizer, device: torch.device) -> list[float] | None:
    """Measure bytes of state per byte of parameter, for each group; None where the optimizer cannot be tried out."""
    try:
        return [_state_ratio(type(optimizer), group, device) for group in optimizer.param_groups]
    except FOREIGN_ERRORS as error:
        logger.warning(
            "the state of %s cannot be measured (%s): its memory is not checked against the plan",
            type(optimizer).__name__,
            error,
        )
        return None


def _state_ratio(cls: Any, group: Mapping[str, Any], device: torch.device) -> float:
    dtype = next((parameter.dtype for parameter in group["params"]), torch.float32)
    matrix = nn.Parameter(torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=dtype, device=device))
    matrix.grad = torch.ones_like(matrix)
    probe = cls([matrix], **options_of(cls, group))
    probe.step()
    held = [leaf for leaf in tree_leaves(dict(probe.state)) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    return sum(leaf.numel() * leaf.itemsize for leaf in held) / (matrix.numel() * matrix.itemsize)


def options_of(cls: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options as the class takes them, tensors among them copied."""
    taken = inspect.signature(cls).parameters
    options = {name: value for name, value in group.items() if name in taken and name != "params"}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in options.items()}


def refuse_heavier(
    optimizer: torch.optim.Optimizer,
    budget: str,
    names: Mapping[int, str],
    holders: Mapping[str, Sequence[int]],
    device: torch.device,
) -> None:
    """Raise PlanError where ``optimizer`` keeps more on some rank than ``optimizer_memory=budget`` has planned.

    ``names``: the name of each parameter, by its id. Looks at every rank's parameters, so all ranks decide alike.
    """
    ratios = state_ratios(optimizer, device)
    if ratios is None:
        return
    needed: dict[int, float] = {}
    planned: dict[int, float] = {}
    for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
        for parameter in group["params"]:
            size_bytes = parameter.numel() * parameter.itemsize
            for rank in holders[names[id(parameter)]]:
                needed[rank] = needed.get(rank, 0.0) + ratio * size_bytes
                planned[rank] = planned.get(rank, 0.0) + OPTIMIZERS[budget].copies * size_bytes
    over = [rank for rank in sorted(needed) if needed[rank] > planned[rank]]
    if not over:
        return
    worst = max(over, key=lambda rank: needed[rank] - planned[rank])
    kind = type(optimizer).__name__
    enough = [name for name, memory in OPTIMIZERS.items() if memory.copies >= max(ratios)]
    raise PlanError(
        f"{kind} keeps more state than the plan has memory for",
        because=[
            f"{kind} with these options keeps {max(ratios):g} bytes for each byte of a parameter, "
            f"optimizer_memory={budget!r} is {OPTIMIZERS[budget].copies}",
            f"rank {worst}: {format_bytes(needed[worst])} ({needed[worst]:,.0f} bytes) of state, "
            f"{format_bytes(planned[worst])} planned",
        ],
        suggestions=[
            *(f"plan again with optimizer_memory={name!r}" for name in enough[:1]),
            "use a lighter optimizer",
        ],
    )


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
