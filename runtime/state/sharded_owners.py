"""Parameters that a rank stores whole and trains a part of (ZeRO-1 and 2), around an optimizer's step.

backward     leaf.grad, whole
sums         reduce-scatter (``runtime.execute.reduce``): this rank's part of the sum; leaf.grad is gone
collect      owner.grad is that part
step         the optimizer updates the owner
publish      all-gather: the leaf is whole again; a rank that does not come is named
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from cost_models.precision import ParameterPrecision
from runtime.mesh.axis import Axis
from runtime.mesh.ranks_along import ranks_along
from runtime.mesh.sharding import Sharding
from runtime.ranks.collective import Collectives
from runtime.state.precision import ApartOwners, leaf_and_owner
from runtime.state.rank_state import RankState

AxisNamed = Callable[[Sharding, int], Axis]
"""Function from (sharding, axis of its mesh) to this rank's place on that axis."""


def sharded_leaf_and_owner(
    value: Tensor, types: ParameterPrecision, requires_grad: bool, sharding: Sharding, rank: int
) -> tuple[Tensor, nn.Parameter]:
    """Do what ``leaf_and_owner`` does for ``value``, the block that this rank stores; the owner has memory of its own."""
    if not sharding.cuts:
        return leaf_and_owner(value, types, requires_grad)
    owner = nn.Parameter(sharding.part(value, rank).to(types.owner, copy=True).contiguous(), requires_grad)
    leaf = value.to(types.leaf)
    if requires_grad:
        leaf.requires_grad_()
        leaf.grad_dtype = types.gradient
        owner.grad_dtype = None
    return leaf, owner


class ShardedOwners(ApartOwners):
    """The parameters whose owner is a part of their leaf. ``sums``: what reductions have left, by name."""

    def __init__(
        self,
        state: RankState,
        sums: MutableMapping[str, Tensor],
        axis_named: AxisNamed,
        collectives: Collectives,
    ) -> None:
        self._state, self._sums, self._axis_named = state, sums, axis_named
        self._collectives = collectives
        self._owners: dict[str, nn.Parameter] = {
            name: state.parameters[name]
            for name, sharding in state.shardings.items()
            if name in state.parameters and sharding.cuts
        }
        self.owners = list(self._owners.values())
        self._by_cuts = _alike(state, self._owners)

    def collect(self) -> None:
        for name, owner in self._owners.items():
            sharding, leaf = self._state.shardings[name], self._state.leaves[name]
            summed = self._sums.pop(name, None)
            if summed is not None:
                left = [cut for cut in sharding.cuts if cut[0] not in sharding.summed]
                owner.grad = sharding.part(summed, self._state.rank, left).contiguous()
            elif leaf.grad is None:
                owner.grad = None
            else:
                dense = leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad
                owner.grad = sharding.part(dense, self._state.rank).clone(
                    memory_format=torch.contiguous_format
                )
            leaf.grad = None

    def publish(self) -> None:
        """Gather owners' values in their leaves, after owners changed. Collective; one all-gather per bucket and cut.

        Some are under way at once. One that does not end in time is explained as it is in a step.
        """
        under_way: deque[Iterator[None]] = deque()
        with torch.no_grad():
            for names in self._by_cuts:
                gather = self._gather(names)
                next(gather)
                under_way.append(gather)
                if len(under_way) == _UNDER_WAY:
                    _finish(under_way.popleft())
            while under_way:
                _finish(under_way.popleft())

    def _gather(self, names: tuple[str, ...]) -> Iterator[None]:
        """Fill leaves of parameters that are cut alike, innermost cut first. Yields while a gather is under way."""
        leaves = [self._state.leaves[name].detach() for name in names]
        pieces = [self._owners[name].to(leaf.dtype) for name, leaf in zip(names, leaves, strict=True)]
        sharding = self._state.shardings[names[0]]
        for axis, dim in reversed(sharding.cuts):
            along = self._axis_named(sharding, axis)
            targets = leaves
            if (axis, dim) != sharding.cuts[0]:
                targets = [p.new_empty(_scaled(p.shape, dim, along.size)) for p in pieces]
            in_place = len(names) == 1 and dim == 0 and along.order is None and targets[0].is_contiguous()
            flat = pieces[0].reshape(-1) if len(names) == 1 else torch.cat([p.reshape(-1) for p in pieces])
            rows = targets[0].view(along.size, -1) if in_place else flat.new_empty((along.size, len(flat)))
            wait = self._collectives.among(
                ranks_along(sharding.mesh, (sharding.mesh.axes[axis],), self._state.rank),
                f"the new values of {_called(names)}",
                partial(along.start_gather, rows, flat),
            )
            yield
            wait()
            if not in_place:
                places = range(along.size) if along.order is None else along.order
                for place, row in enumerate(rows[r] for r in places):
                    parts = torch.split(row, [piece.numel() for piece in pieces])
                    for target, piece, part in zip(targets, pieces, parts, strict=True):
                        target.chunk(along.size, dim)[place].copy_(part.view(piece.shape))
            pieces = targets


_UNDER_WAY = 4
"""Number of gathers at once: each holds a bucket as large as its leaves."""

_BUCKET_BYTES = 25 * 2**20
"""Bytes of leaves' values that are gathered together."""

_ALONE_BYTES = 2**20
"""Bytes from which a leaf is gathered by itself, and into its own memory where it is cut along its rows."""


def _finish(gather: Iterator[None]) -> None:
    for _ in gather:
        pass


def _scaled(shape: Sequence[int], dim: int, by: int) -> list[int]:
    return [size * by if at == dim else size for at, size in enumerate(shape)]


def _called(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _alike(state: RankState, owners: Mapping[str, nn.Parameter]) -> tuple[tuple[str, ...], ...]:
    """Group the names whose leaves are gathered together."""
    groups: dict[object, list[list[str]]] = defaultdict(lambda: [[]])
    sizes: dict[object, int] = defaultdict(int)
    for name, owner in owners.items():
        leaf, sharding = state.leaves[name], state.shardings[name]
        size = leaf.numel() * leaf.itemsize
        alone = size >= _ALONE_BYTES
        key = (sharding.mesh, sharding.cuts, owner.dtype, leaf.dtype, name if alone else "")
        if groups[key][-1] and sizes[key] + size > _BUCKET_BYTES:
            groups[key].append([])
            sizes[key] = 0
        groups[key][-1].append(name)
        sizes[key] += size
    return tuple(tuple(bucket) for buckets in groups.values() for bucket in buckets)
