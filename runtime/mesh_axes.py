"""The axes of a mesh as one rank sees them: with whom it talks along each, and which part of a tensor is its own.

mesh ranks (0 1 / 2 3), axes ("data", "tensor")      rank 2:  "data" 0 2, place 1     "data+tensor" 0 1 2 3, place 2
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from cost_models.layout import Mesh, Placement, Shard
from runtime.axis import Axis, Wait
from runtime.bridges import axes_of
from runtime.groups import Channel
from runtime.local_calls import JOINT
from runtime.program import group_queue
from runtime.segment_code import SegmentCode


def coordinates(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Where ``rank`` stands on each axis."""
    place, found = mesh.ranks.index(rank), []
    for size in reversed(mesh.shape):
        place, index = divmod(place, size)
        found.append(index)
    return tuple(reversed(found))


def ranks_along(mesh: Mesh, names: Sequence[str], rank: int) -> tuple[int, ...]:
    """The ranks that differ from ``rank`` on the axes called ``names`` only, the first of these outermost."""
    own = coordinates(mesh, rank)
    axes = [mesh.axes.index(name) for name in names]
    strides = [math.prod(mesh.shape[axis + 1 :]) for axis in range(len(mesh.shape))]
    start = sum(i * s for axis, (i, s) in enumerate(zip(own, strides, strict=True)) if axis not in axes)
    return tuple(
        mesh.ranks[start + sum(i * strides[axis] for i, axis in zip(places, axes, strict=True))]
        for places in itertools.product(*(range(mesh.shape[axis]) for axis in axes))
    )


def all_ranks_along(mesh: Mesh, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """``ranks_along`` for every rank, each group once."""
    return tuple(dict.fromkeys(ranks_along(mesh, names, rank) for rank in mesh.ranks))


def groups_needed(codes: Iterable[SegmentCode], rank: int) -> set[tuple[int, ...]]:
    """The sets of ranks, ascending, with which ``rank`` shares the bridges of ``codes``."""
    return {
        tuple(sorted(ranks_along(code.mesh, name.split(JOINT), rank)))
        for code in codes
        if code.mesh is not None
        for name in axes_of(code.module.graph)
    }


def axes_for(code: SegmentCode, rank: int, channels: Mapping[str, Channel], wait: Wait) -> dict[str, Axis]:
    """The axes that the bridges of ``code`` run along, by name."""
    assert code.mesh is not None
    found: dict[str, Axis] = {}
    for name in axes_of(code.module.graph):
        ranks = ranks_along(code.mesh, name.split(JOINT), rank)
        channel = channels[group_queue(ranks)]
        order = tuple(channel.rank_in_group[r] for r in ranks)
        straight = order == tuple(range(len(ranks)))
        found[name] = Axis(
            name, len(ranks), ranks.index(rank), channel.group, None if straight else order, wait
        )
    return found


def part_of(tensor: Tensor, placements: Sequence[Placement], mesh: Mesh, rank: int) -> Tensor:
    """The part of a whole tensor that ``rank`` has: a view."""
    for placement, size, index in zip(placements, mesh.shape, coordinates(mesh, rank), strict=True):
        if isinstance(placement, Shard) and size > 1:
            length = tensor.shape[placement.dim] // size
            tensor = tensor.narrow(placement.dim, index * length, length)
    return tensor
