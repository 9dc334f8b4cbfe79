"""Messages of a mesh once per step: sums of gradients after the last backward, updated parameters gathered.

n bytes of one rank's gradients, p ranks        each rank sends
    all-reduce                                  2 (p - 1) / p · n
    reduce-scatter (ZeRO-1, 2)                  (p - 1) / p · n, and later sums on other axes are of n / p
    all-gather after the update                 (p - 1) / p · n, of the parameter
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cost_models.cluster import ClusterSpec
from cost_models.conversion import group_links
from cost_models.precision import Precision
from passes.graph.graph import OpGraph
from passes.shard.program import bucketed_syncs, shardings
from passes.shard.shard import ShardedGraph
from passes.shard.syncs import GradientSync
from runtime.mesh.ranks_along import all_ranks_along
from runtime.program.program import Collective


@dataclass(frozen=True)
class GradientSum:
    """One sum, made by every group of ranks along its axes at once.

    ``size_bytes``: bytes of each parameter's gradient on a rank, as the sum begins.
    """

    sync: GradientSync
    parameters: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    size_bytes: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class UpdateGather:
    """Updated parameters put together along one axis. ``whole_bytes``: bytes that a rank has afterwards."""

    axis: str
    parameters: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    whole_bytes: int
    seconds: float

    @property
    def sent_bytes(self) -> float:
        """Bytes that each rank sends."""
        ranks = len(self.groups[0])
        return (ranks - 1) / ranks * self.whole_bytes

    def collectives(self) -> Iterator[Collective]:
        """Yield the collectives of every group."""
        for ranks in self.groups:
            yield Collective("all_gather", ranks, self.sent_bytes, backward=False)


def gradient_sum_costs(
    sharded: ShardedGraph, gradient_bytes: Mapping[str, int], cluster: ClusterSpec
) -> tuple[GradientSum, ...]:
    """List every sum in the order in which they are made. ``gradient_bytes``: each parameter's, on a rank."""
    found = []
    parts = dict.fromkeys(gradient_bytes, 1)
    for sync, names in bucketed_syncs(sharded):
        groups = all_ranks_along(sharded.mesh, sync.axes)
        sizes = tuple(gradient_bytes[name] // parts[name] for name in names)
        links = group_links(groups, cluster)
        seconds = links.seconds("reduce_scatter" if sync.scattered else "all_reduce", sum(sizes))
        found.append(GradientSum(sync, names, groups, sizes, seconds))
        if sync.scattered:
            parts |= {name: parts[name] * len(groups[0]) for name in names}
    return tuple(found)


def update_gathers(
    graph: OpGraph, sharded: ShardedGraph, precision: Precision, cluster: ClusterSpec
) -> tuple[UpdateGather, ...]:
    """List gathers after an update: leaves of which each rank has a part are put together again, the last cut first."""
    mesh = sharded.mesh
    sizes: dict[str, dict[str, int]] = {}
    for name, sharding in shardings(sharded).items():
        parts = 1
        for axis, _ in sharding.cuts:
            leaf = sharded.graph.parameters[name].elements * graph.types_of(name, precision).leaf.itemsize
            sizes.setdefault(mesh.axes[axis], {})[name] = leaf // parts
            parts *= mesh.shape[axis]
    found = []
    for axis_name, own in sizes.items():
        groups = all_ranks_along(mesh, (axis_name,))
        links = group_links(groups, cluster)
        seconds = math.fsum(links.seconds("all_gather", size) for size in own.values())
        found.append(UpdateGather(axis_name, tuple(own), groups, sum(own.values()), seconds))
    return tuple(found)
