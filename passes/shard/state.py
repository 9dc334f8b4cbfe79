"""State of a sharded graph: what each rank stores, and the messages once per step that keep it.

Gradients are summed after the last backward, bucket by bucket; then updated parameters are gathered.

n bytes of one rank's gradients, p ranks        each rank sends
    all-reduce                                  2 (p - 1) / p · n
    reduce-scatter (ZeRO-1, 2)                  (p - 1) / p · n, and later sums on other axes are of n / p
    all-gather after the update                 (p - 1) / p · n, of the parameter
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from cost_models.cluster import ClusterSpec
from cost_models.conversion import group_links
from cost_models.layout import Replicate
from cost_models.precision import Precision
from passes.graph.graph import OpGraph
from passes.shard.sent import GradientSum, UpdateGather
from passes.shard.shard import ShardedGraph
from passes.shard.syncs import GradientSync
from passes.shard.words import Placements
from runtime.mesh.ranks_along import all_ranks_along
from runtime.mesh.sharding import Sharding
from runtime.program.program import TiedGroup

BUCKET_BYTES = 25 * 2**20
"""About how much is summed at once: as torch's DistributedDataParallel, so that sums overlap each other's copies."""

FIRST_BUCKET_BYTES = 2**20
"""The first is small, so that the network begins early; as there, too. Where a gradient is summed alone, that does it."""

ALONE_BYTES = 2 * 2**20
"""A gradient as large as this is summed by itself. On Gloo, 1 MiB takes as long to copy together as to sum apart."""


def shardings(sharded: ShardedGraph) -> dict[str, Sharding]:
    """Return what each rank stores and trains of every parameter and buffer."""
    placement, mesh = sharded.placement, sharded.mesh
    whole: Placements = (Replicate(),) * len(mesh.shape)
    summed: dict[str, set[int]] = defaultdict(set)
    for sync in sharded.syncs:
        if sync.scattered:
            for name in sync.parameters:
                summed[name].update(map(mesh.axes.index, sync.axes))
    found = {}
    for name in (*sharded.graph.parameters, *sharded.graph.buffers):
        stored = placement.stored.get(name, whole)
        owner = placement.sharded_state.get(name, stored) if name in sharded.graph.trained else stored
        found[name] = Sharding(mesh, stored, owner, frozenset(summed[name]))
    return found


def gradient_sums(sharded: ShardedGraph) -> tuple[TiedGroup, ...]:
    """List what is summed after the last backward, in the order of the sums."""
    return tuple(
        TiedGroup(bucket, ranks, sync.scattered)
        for sync, bucket in bucketed_syncs(sharded)
        for ranks in all_ranks_along(sharded.mesh, sync.axes)
    )


def bucketed_syncs(sharded: ShardedGraph) -> Iterator[tuple[GradientSync, tuple[str, ...]]]:
    """Yield each kind of sum with the parameters of one bucket, in the order of the sums."""
    for sync in sharded.syncs:
        for bucket in _buckets(sharded.graph, sync.parameters):
            yield sync, bucket


def _buckets(graph: OpGraph, parameters: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield buckets in the order in which backward is done with them. Large gradients alone: summed where they lie."""
    ordered = _in_backward_order(graph, parameters)
    bytes_of = {name: graph.parameters[name].size_bytes for name in ordered}
    bucket: list[str] = []
    size_bytes = 0
    limit = BUCKET_BYTES if any(size >= ALONE_BYTES for size in bytes_of.values()) else FIRST_BUCKET_BYTES
    for name, own_bytes in bytes_of.items():
        if own_bytes >= ALONE_BYTES:
            yield (name,)
            continue
        if bucket and size_bytes + own_bytes > limit:
            yield tuple(bucket)
            bucket, size_bytes, limit = [], 0, BUCKET_BYTES
        bucket.append(name)
        size_bytes += own_bytes
    if bucket:
        yield tuple(bucket)


def _in_backward_order(graph: OpGraph, parameters: tuple[str, ...]) -> list[str]:
    """Order parameters as backward is done with them: those that are first read last come first."""
    first_read = _first_reads(graph)
    return sorted(parameters, key=lambda name: first_read.get(name, -1), reverse=True)


def _first_reads(graph: OpGraph) -> dict[str, int]:
    """Find the place of the first op that reads each parameter: its gradient is there when backward is done with that."""
    first_read: dict[str, int] = {}
    inputs = {given.node: given.name for given in graph.inputs if given.kind == "parameter"}
    for position, op in enumerate(graph.ops):
        for node in op.all_input_nodes:
            if node.name in inputs:
                first_read.setdefault(inputs[node.name], position)
    return first_read


def gradient_sum_costs(
    sharded: ShardedGraph,
    gradient_bytes: Mapping[str, int],
    cluster: ClusterSpec,
    backward_seconds: Sequence[float] = (),
) -> tuple[GradientSum, ...]:
    """List every sum in the order in which they are made. ``gradient_bytes``: each parameter's, on a rank.

    ``backward_seconds``: of each op of the graph, in order; what comes later in it is done earlier.
    """
    found = []
    first_read = _first_reads(sharded.graph)
    later = [*itertools.accumulate(reversed(backward_seconds), initial=0.0)][::-1]
    parts = dict.fromkeys(gradient_bytes, 1)
    for sync, names in bucketed_syncs(sharded):
        groups = all_ranks_along(sharded.mesh, sync.axes)
        sizes = tuple(gradient_bytes[name] // parts[name] for name in names)
        links = group_links(groups, cluster)
        seconds = links.seconds("reduce_scatter" if sync.scattered else "all_reduce", sum(sizes))
        place = min((first_read.get(name, 0) for name in names), default=0)
        ready = later[place] / later[0] if later[0] > 0.0 else 1.0
        found.append(GradientSum(names, sync.axes, sync.scattered, sizes, seconds, ready))
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
        links = group_links(all_ranks_along(mesh, (axis_name,)), cluster)
        seconds = math.fsum(links.seconds("all_gather", size) for size in own.values())
        found.append(UpdateGather(axis_name, tuple(own), sum(own.values()), seconds))
    return tuple(found)
