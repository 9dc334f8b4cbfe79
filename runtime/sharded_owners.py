"""Parameters of which a rank trains a part of what it stores (ZeRO-1 and 2), around an optimizer's step.

backward     leaf.grad, whole
sums         reduce-scatter (``runtime.reduce``): this rank's part of the sum; leaf.grad is gone
collect      owner.grad is that part
step         the optimizer updates the owner
publish      all-gather: the leaf is whole again
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping

import torch
from torch import Tensor, nn

from cost_models.precision import ParameterPrecision
from runtime.axis import Axis
from runtime.precision import around_steps, cast_gradients, leaf_and_owner
from runtime.rank_state import RankState
from runtime.sharding import Sharding

AxisNamed = Callable[[Sharding, int], Axis]
"""(sharding, axis of its mesh) -> this rank's place on that axis."""


def sharded_leaf_and_owner(
    value: Tensor, types: ParameterPrecision, requires_grad: bool, sharding: Sharding, rank: int
) -> tuple[Tensor, nn.Parameter]:
    """As ``leaf_and_owner``, for ``value``, the block that this rank stores. The owner has memory of its own."""
    if not sharding.cuts:
        return leaf_and_owner(value, types, requires_grad)
    owner = nn.Parameter(sharding.part(value, rank).to(types.owner, copy=True).contiguous(), requires_grad)
    leaf = value.to(types.leaf)
    if requires_grad:
        leaf.requires_grad_()
        leaf.grad_dtype = types.gradient
        owner.grad_dtype = None
    return leaf, owner


class ShardedOwners:
    """The parameters of a rank whose owner is a part of their leaf. ``sums``: what reductions have left, by name."""

    def __init__(self, state: RankState, sums: MutableMapping[str, Tensor], axis_named: AxisNamed) -> None:
        self._state, self._sums, self._axis_named = state, sums, axis_named
        self._owners: dict[str, nn.Parameter] = {
            name: state.parameters[name]
            for name, sharding in state.shardings.items()
            if name in state.parameters and sharding.cuts
        }
        self._by_cuts = _alike(self._owners, state.shardings)

    def __bool__(self) -> bool:
        return bool(self._owners)

    def collect(self) -> None:
        """After backward and its sums: every owner has its gradient."""
        for name, owner in self._owners.items():
            sharding, leaf = self._state.shardings[name], self._state.leaves[name]
            summed = self._sums.pop(name, None)
            if summed is not None:
                left = [cut for cut in sharding.cuts if cut[0] not in sharding.summed]
                owner.grad = sharding.part(summed, self._state.rank, left).contiguous()
            elif leaf.grad is None:
                owner.grad = None
            else:
                owner.grad = sharding.part(leaf.grad, self._state.rank).clone(
                    memory_format=torch.contiguous_format
                )
            leaf.grad = None

    def cast_gradients(self) -> None:
        """Before an optimizer steps: gradients in the owners' types."""
        cast_gradients(self._owners.values())

    def publish(self) -> None:
        """After owners changed: leaves have their values. Collective; one all-gather per axis, type and bucket."""
        with torch.no_grad():
            for names in self._by_cuts:
                self._gather(names)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Cast and publish around every ``optimizer.step()``, whoever calls it."""
        if self._owners:
            around_steps(optimizer, self.cast_gradients, self.publish)

    def _gather(self, names: tuple[str, ...]) -> None:
        """Leaves of parameters that are cut alike, from the innermost cut outwards."""
        leaves = [self._state.leaves[name].detach() for name in names]
        pieces = [self._owners[name].to(leaf.dtype) for name, leaf in zip(names, leaves, strict=True)]
        sharding = self._state.shardings[names[0]]
        for axis, dim in reversed(sharding.cuts):
            along = self._axis_named(sharding, axis)
            flat = along.gather(torch.cat([piece.reshape(-1) for piece in pieces]).unsqueeze(0), 0)
            columns = torch.split(flat, [piece.numel() for piece in pieces], 1)
            pieces = [
                torch.cat([row.view(piece.shape) for row in column.unbind(0)], dim)
                for column, piece in zip(columns, pieces, strict=True)
            ]
        for leaf, piece in zip(leaves, pieces, strict=True):
            leaf.copy_(piece)


_BUCKET_ELEMENTS = 16 * 2**20


def _alike(
    owners: Mapping[str, nn.Parameter], shardings: Mapping[str, Sharding]
) -> tuple[tuple[str, ...], ...]:
    """Names whose owners are gathered together."""
    groups: dict[object, list[list[str]]] = defaultdict(lambda: [[]])
    sizes: dict[object, int] = defaultdict(int)
    for name, owner in owners.items():
        key = (shardings[name].mesh, shardings[name].cuts, owner.dtype)
        if groups[key][-1] and sizes[key] + owner.numel() > _BUCKET_ELEMENTS:
            groups[key].append([])
            sizes[key] = 0
        groups[key][-1].append(name)
        sizes[key] += owner.numel()
    return tuple(tuple(bucket) for buckets in groups.values() for bucket in buckets)
