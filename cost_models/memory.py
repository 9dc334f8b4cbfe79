"""What lives on a device as long as training does: parameters, gradients, optimizer state.

What is budgeted is what runs: 32-bit master copies count only when they are asked for. What autograd saves for backward
is counted per op in ``passes.costs``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import torch

from cost_models.errors import UsageError

ParameterCount: TypeAlias = tuple[int, torch.dtype, bool]
"""(elements, data type, trainable) of one parameter. List a tied parameter once per device."""

MASTER_DTYPE = torch.float32


@dataclass(frozen=True)
class OptimizerMemory:
    """State that an optimizer of ``torch.optim`` keeps per trainable parameter.

    ``copies``: tensors of the parameter's own size and data type. ``step_bytes``: its scalar counter, a 32-bit float
    that ``torch.optim`` keeps on the host unless it is fused or capturable; counted all the same.
    """

    copies: int
    step_bytes: int


OPTIMIZERS: Mapping[str, OptimizerMemory] = MappingProxyType(
    {
        "none": OptimizerMemory(copies=0, step_bytes=0),
        "sgd": OptimizerMemory(copies=0, step_bytes=0),
        "momentum": OptimizerMemory(copies=1, step_bytes=0),
        "adam": OptimizerMemory(copies=2, step_bytes=4),
        "adamw": OptimizerMemory(copies=2, step_bytes=4),
    }
)


@dataclass(frozen=True)
class StateBytes:
    """Bytes that stay on a device from step to step."""

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    """Master copies included, if asked for."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer_state + other.optimizer_state,
        )


def state_bytes(parameters: Iterable[ParameterCount], optimizer: str, master: bool = False) -> StateBytes:
    """Bytes of parameters, gradients and optimizer state.

    Gradients have the parameter's data type. With ``master``, each trainable parameter of a narrower type than
    32 bits has a 32-bit copy, and the optimizer's state is 32-bit as well (it is kept for the copy).
    """
    rule = OPTIMIZERS.get(optimizer)
    if rule is None:
        raise UsageError(
            f"count the memory of optimizer {optimizer!r}",
            because=["its state per parameter is not known"],
            suggestions=[f"choose one of: {', '.join(OPTIMIZERS)}"],
        )
    held = gradients = state = 0
    for elements, dtype, trainable in parameters:
        held += elements * dtype.itemsize
        if not trainable:
            continue
        gradients += elements * dtype.itemsize
        mastered = master and optimizer != "none" and dtype.itemsize < MASTER_DTYPE.itemsize
        state_itemsize = MASTER_DTYPE.itemsize if mastered else dtype.itemsize
        state += rule.copies * elements * state_itemsize + rule.step_bytes
        state += elements * MASTER_DTYPE.itemsize if mastered else 0
    return StateBytes(held, gradients, state)
