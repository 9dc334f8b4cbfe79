"""The memory that training holds from first to last: parameters, gradients, optimizer state, the batch.

The budget is for what runs, in the data types of ``cost_models.precision``. What autograd saves for backward is counted
per op in ``passes.costs.costs``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TypeAlias

from cost_models.devices import CountedKind
from cost_models.errors import UsageError
from cost_models.precision import ParameterPrecision

ParameterCount: TypeAlias = tuple[int, ParameterPrecision, bool]
"""(elements, data types, trainable) of one parameter. List a tied parameter once per device."""


@dataclass(frozen=True)
class OptimizerMemory:
    """State that an optimizer of ``torch.optim`` keeps per trainable parameter.

    ``copies``: tensors of the owner's size and data type. ``step_bytes``: its scalar counter, a 32-bit float
    that ``torch.optim`` keeps on the host unless it is fused or capturable; counted all the same.
    ``update_copies``: those that it makes for the time of a step alone, of all parameters at once with ``foreach``, its
    default on GPUs: ``_multi_tensor_adam`` makes the roots of all second moments (measured on an H100: 1.00).
    """

    copies: int
    step_bytes: int
    update_copies: int = 0


OPTIMIZERS: Mapping[str, OptimizerMemory] = MappingProxyType(
    {
        "none": OptimizerMemory(copies=0, step_bytes=0),
        "sgd": OptimizerMemory(copies=0, step_bytes=0),
        "momentum": OptimizerMemory(copies=1, step_bytes=0),
        "adam": OptimizerMemory(copies=2, step_bytes=4, update_copies=1),
        "adamw": OptimizerMemory(copies=2, step_bytes=4, update_copies=1),
        "fused-adamw": OptimizerMemory(copies=2, step_bytes=4),
        "amsgrad": OptimizerMemory(copies=3, step_bytes=4, update_copies=1),
    }
)


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a device holds all through a step, and what an optimizer step touches of them."""

    parameters: int = 0
    """Parameters that the model computes with."""
    gradients: int = 0
    optimizer_state: int = 0
    owners: int = 0
    """Parameters that the optimizer updates, where those are copies of another type."""
    trained: int = 0
    """The part of ``parameters`` and ``owners`` that the optimizer updates. Not memory of its own."""
    cast: int = 0
    """Bytes that the casts around a step read and write: gradients for the owners, owners for the leaves. Not memory."""
    batch: int = 0
    """The step's batch, as far as the device's ops read it: the executor puts all micro-batches there at once."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state + self.owners + self.batch

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def state_bytes(parameters: Iterable[ParameterCount], optimizer: str) -> StateBytes:
    """Count the bytes of parameters, gradients, optimizer state and owners' copies.

    An owner's gradient is the very tensor that its leaf's micro-batches were summed in; where the optimizer needs it in
    another type it is cast one parameter at a time and the first is freed, so the wider of the two counts.
    """
    rule = OPTIMIZERS.get(optimizer)
    if rule is None:
        raise UsageError(
            f"count the memory of optimizer {optimizer!r}",
            because=["its state per parameter is not known"],
            suggestions=[f"choose one of: {', '.join(OPTIMIZERS)}"],
        )
    held = gradients = state = owners = trained = cast = 0
    for elements, types, trainable in parameters:
        leaf, owner = elements * types.leaf.itemsize, elements * types.owner.itemsize
        held += leaf
        owners += owner if types.has_copy else 0
        if not trainable:
            continue
        gradient = elements * types.gradient.itemsize
        gradients += max(gradient, owner)
        state += rule.copies * owner + rule.step_bytes
        trained += owner
        cast += leaf + owner if types.has_copy else 0
        cast += gradient + owner if types.gradient != types.owner else 0
    return StateBytes(held, gradients, state, owners, trained, cast)


def update_bytes(state: StateBytes, kind: CountedKind, optimizer: str) -> int:
    """Count the bytes that ``torch.optim`` holds on top of ``state`` while it updates parameters.

    On a CPU it updates one parameter after the other, and what it makes for one is not counted.
    """
    return OPTIMIZERS[optimizer].update_copies * state.trained if kind == "cuda" else 0
