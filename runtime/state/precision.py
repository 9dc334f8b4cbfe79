"""The two tensors of a parameter: the leaf that graphs read, and the owner that the optimizer updates.

One tensor is both where the types of ``ParameterPrecision`` agree. Otherwise, over a step:

    leaf.grad       micro-batches are summed here, in the gradient's type (``leaf.grad_dtype``)
      └ collect     owner.grad *is* that tensor from now on; nothing is copied
        └ cast      before the optimizer steps, and only if it wants another type; one parameter at a time
          └ step    the optimizer updates the owner
            └ publish   the new values, rounded to the leaf's type

Leaf and owner of one type share their memory, so nothing need be published; they are two tensors because autograd sums
in one type and the optimizer reads another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cost_models.precision import ParameterPrecision
from runtime.state.rank_state import RankState


def leaf_and_owner(
    value: Tensor, types: ParameterPrecision, requires_grad: bool
) -> tuple[Tensor, nn.Parameter]:
    """Make the leaf and the owner of a parameter from ``value``, in the model's type or the owner's.

    ``value`` is handed over: one of them may be it.
    """
    owner = nn.Parameter(value.to(types.owner), requires_grad)
    sums_elsewhere = requires_grad and types.gradient != types.owner
    if not types.has_copy and not sums_elsewhere:
        return owner, owner
    spare = value.dtype == types.leaf and types.owner.itemsize > types.leaf.itemsize
    leaf = value if spare else owner.detach().to(types.leaf)
    if requires_grad:
        leaf.requires_grad_()
        leaf.grad_dtype = types.gradient
        owner.grad_dtype = None  # it is handed whatever the leaf has summed
    return leaf, owner


def gradient_dtype(leaf: Tensor) -> torch.dtype:
    """Return the type in which autograd sums the gradient of ``leaf``."""
    return leaf.dtype if leaf.grad_dtype is None else leaf.grad_dtype


class ApartOwners:
    """The ``owners`` of a rank that are not the leaves that its graphs read."""

    owners: Sequence[nn.Parameter] = ()

    def collect(self) -> None:
        """Hand every owner the gradient that its leaf has summed, after backward."""
        raise NotImplementedError

    def cast_gradients(self) -> None:
        """Cast gradients to the owners' types, one parameter at a time, before an optimizer steps."""
        for owner in self.owners:
            if owner.grad is not None and owner.grad.dtype != owner.dtype:
                owner.grad = owner.grad.to(owner.dtype)

    def publish(self) -> None:
        """Give leaves their owners' values, after owners changed (a step, a loaded checkpoint)."""
        raise NotImplementedError

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Cast and publish around every ``optimizer.step()``, whoever calls it."""
        if self.owners:
            optimizer.register_step_pre_hook(lambda *_: self.cast_gradients())
            optimizer.register_step_post_hook(lambda *_: self.publish())


class LeavesAndOwners(ApartOwners):
    """The parameters whose leaf is as large as its owner."""

    def __init__(self, state: RankState) -> None:
        self._pairs = tuple(
            (leaf, owner)
            for name, owner in state.parameters.items()
            if (leaf := state.leaves.get(name, owner)) is not owner and leaf.shape == owner.shape
        )
        self.owners = [owner for _, owner in self._pairs]
        self._copies = tuple(
            (leaf.detach(), owner) for leaf, owner in self._pairs if leaf.dtype != owner.dtype
        )

    def collect(self) -> None:
        for leaf, owner in self._pairs:
            owner.grad, leaf.grad = leaf.grad, None

    def publish(self) -> None:
        with torch.no_grad():
            for leaf, owner in self._copies:
                leaf.copy_(owner)
