"""The axes of a mesh as one rank sees them: the ranks that it talks to along each.

mesh ranks (0 1 / 2 3), axes ("data", "tensor")      rank 2:  "data" 0 2, place 1     "data+tensor" 0 1 2 3, place 2
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from cost_models.layout import Mesh
from runtime.mesh.axis import Axis, WaitFor, plainly
from runtime.mesh.sharding import Sharding, coordinates
from runtime.program.program import group_queue
from runtime.ranks.groups import Channel

JOINT = "+"
"""Sign between the names of axes that are taken together."""


def ranks_along(mesh: Mesh, names: Sequence[str], rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from ``rank`` on the axes called ``names`` only, the first of these outermost."""
    own = coordinates(mesh, rank)
    axes = [mesh.axes.index(name) for name in names]
    strides = [math.prod(mesh.shape[axis + 1 :]) for axis in range(len(mesh.shape))]
    start = sum(i * s for axis, (i, s) in enumerate(zip(own, strides, strict=True)) if axis not in axes)
    return tuple(
        mesh.ranks[start + sum(i * strides[axis] for i, axis in zip(places, axes, strict=True))]
        for places in itertools.product(*(range(mesh.shape[axis]) for axis in axes))
    )


def all_ranks_along(mesh: Mesh, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return ``ranks_along`` of every rank, each group once."""
    return _groups_along(mesh, tuple(names))


@lru_cache(maxsize=256)
def _groups_along(mesh: Mesh, names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    inner = [mesh.axes.index(name) for name in names]
    outer = [axis for axis in range(len(mesh.shape)) if axis not in inner]
    ranks = np.array(mesh.ranks).reshape(mesh.shape).transpose(*outer, *inner)
    groups = ranks.reshape(-1, math.prod(mesh.shape[axis] for axis in inner))
    return tuple(map(tuple, groups.tolist()))


def axis_of(
    mesh: Mesh, name: str, rank: int, channels: Mapping[str, Channel], wait: WaitFor = plainly
) -> Axis:
    """Return the place of ``rank`` on an axis, or on several taken together."""
    ranks = ranks_along(mesh, name.split(JOINT), rank)
    channel = channels[group_queue(ranks)]
    order = tuple(channel.rank_in_group[r] for r in ranks)
    straight = order == tuple(range(len(ranks)))
    return Axis(name, len(ranks), ranks.index(rank), channel.group, None if straight else order, wait)


def axis_among(sharding: Sharding, ranks: Sequence[int], rank: int) -> int:
    """Return the axis of a sharding's owner cuts along which ``ranks`` lie."""
    return next(
        axis
        for axis, _ in sharding.cuts
        if sorted(ranks_along(sharding.mesh, (sharding.mesh.axes[axis],), rank)) == sorted(ranks)
    )
