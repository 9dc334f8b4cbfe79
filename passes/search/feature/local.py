"""Seconds and bytes of the collectives inside ops: those of local functions (``passes.shard.rules.traffic``).

A vocabulary-sharded cross-entropy all-reduces a few numbers per sample, a batch norm over split samples gathers its
statistics. The axes of one role are joined: their ranks make one group, whose links are those of the joined axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

import sympy
from torch import fx

from cost_models.cluster import ClusterSpec
from cost_models.conversion import AxisLinks, axis_links
from cost_models.layout import Mesh
from passes.shard.rules.traffic import LocalCollective, local_collectives
from passes.shard.words import Choice


@cache
def joined_links(mesh: Mesh, axes: tuple[int, ...], cluster: ClusterSpec) -> AxisLinks:
    """The links of collectives over ``axes`` taken together, the first outermost."""
    kept = [axis for axis in range(len(mesh.shape)) if axis not in axes]
    order = (*kept, *axes)
    strides = [math.prod(mesh.shape[axis + 1 :]) for axis in range(len(mesh.shape))]
    places = [0]
    for axis in order:
        places = [place + i * strides[axis] for place in places for i in range(mesh.shape[axis])]
    shape = (*(mesh.shape[axis] for axis in kept), math.prod(mesh.shape[axis] for axis in axes))
    names = (*(mesh.axes[axis] for axis in kept), "+".join(mesh.axes[axis] for axis in axes))
    joined = Mesh(tuple(mesh.ranks[place] for place in places), shape, names)
    return axis_links(joined, len(kept), cluster)


def local_cost(
    node: fx.Node,
    choices: Sequence[Choice],
    mesh: Mesh,
    symbols: Mapping[sympy.Symbol, int],
    cluster: ClusterSpec,
    *,
    differentiable: bool,
) -> tuple[float, float]:
    """(seconds, bytes that each rank sends) per micro-batch of one op's own collectives."""
    seconds = sent = 0.0
    for found in local_collectives(node, choices, mesh.shape, symbols):
        if found.phase == "backward" and not differentiable:
            continue
        seconds += joined_links(mesh, found.axes, cluster).seconds(found.kind, _whole_bytes(found, mesh))
        sent += _sent_bytes(found, mesh)
    return seconds, sent


def _ranks(found: LocalCollective, mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in found.axes)


def _whole_bytes(found: LocalCollective, mesh: Mesh) -> float:
    """The n of the formulas in ``cost_models.communication``."""
    return found.size_bytes * (1 if found.kind == "all_reduce" else _ranks(found, mesh))


def _sent_bytes(found: LocalCollective, mesh: Mesh) -> float:
    """Bytes that a rank sends of n bytes whole, by the volume of the bandwidth-optimal algorithm: (p−1)/p·n, twice for an
    all-reduce, a pth for an all-to-all."""
    ranks = _ranks(found, mesh)
    factor = {"all_reduce": 2.0, "all_gather": 1.0, "all_to_all": 1.0 / ranks}[found.kind]
    return factor * (ranks - 1) / ranks * _whole_bytes(found, mesh)
