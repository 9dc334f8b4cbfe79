"""From a feature-wise placement to a simulated step: the local graph's costs, its collectives, sums, state.

    placement ─► shard_graph ─► one segment on all ranks (compute + collectives) ─► programs ─► simulated step

Seconds of the segment are those of its ops on shards, one after the other with its collectives: no overlap is assumed
beside what the simulator knows of host and device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cost_models.cluster import ClusterSpec
from cost_models.compute import optimizer_seconds
from cost_models.conversion import AxisLinks, Kind, axis_links, group_links, path, steps_seconds
from cost_models.memory import OPTIMIZERS, StateBytes, state_bytes
from cost_models.precision import Precision
from passes.costs import cost_graph
from passes.graph import OpGraph
from passes.place_features import FeatureRequest
from passes.placed import Realized
from passes.segment import on_mesh
from passes.shard_costs import Traffic, collectives, traffic
from passes.shard_graph import Sharded
from passes.shard_program import gradient_sums, shardings
from passes.step import StepCosts, programs_for, simulate_step
from passes.summarize import TiedGroup, gradient_bytes, segment_graph
from runtime.local_calls import JOINT
from runtime.mesh_axes import all_ranks_along
from runtime.program import SegmentGraph

SCHEDULE = "1f1b"
"""With one segment: each micro-batch's backward follows its forward."""


def realize_features(
    graph: OpGraph, sharded: Sharded, cluster: ClusterSpec, request: FeatureRequest
) -> Realized:
    """Carry ``graph``, sharded, through segments, programs and simulation."""
    microbatches, world = sharded.placement.microbatches, cluster.world_size
    size = request.batch_size // microbatches
    sent = traffic(sharded, size)
    segments = _segments(sharded, sent, cluster, size)
    sums = tuple(TiedGroup(*group) for group in gradient_sums(sharded))
    state = _state(sharded, request)
    summed_bytes = {
        n: gradient_bytes(sharded.graph, n, request.precision) for s in sums for n in s.parameters
    }
    gather_seconds = _gather_seconds(graph, sharded, cluster, request.precision)
    step = StepCosts(
        state_bytes=(state.total,) * world,
        optimizer_seconds=tuple(
            optimizer_seconds(state, device, request.optimizer, len(graph.trained)) + gather_seconds
            for device in cluster.devices
        ),
        tied_bytes=summed_bytes,
        sum_seconds=sum_seconds(sums, summed_bytes, cluster),
    )
    programs = programs_for(segments, cluster, SCHEDULE, microbatches, sums)
    simulation = simulate_step(programs, segments, cluster, step, (size,) * microbatches)
    code = on_mesh(sharded.graph, sharded.mesh)
    return Realized(code, segments, sums, programs, (state,) * world, step, simulation, sent)


def _segments(
    sharded: Sharded, found: tuple[Traffic, ...], cluster: ClusterSpec, microbatch_size: int
) -> SegmentGraph:
    """The one segment: its ops on shards, and its collectives one after the other."""
    graph = sharded.graph
    costs = cost_graph(graph, device_kind=cluster.devices[0].kind)
    units = microbatch_size // graph.batch.multiple
    plain = segment_graph(graph, costs, on_mesh(graph, sharded.mesh), cluster, units)
    (segment,) = plain.segments
    links = {
        axis: group_links(all_ranks_along(sharded.mesh, axis.split(JOINT)), cluster)
        for axis in {item.axis for item in found}
    }
    seconds = {back: sum(t.seconds(links[t.axis]) for t in found if t.backward == back) for back in (0, 1)}
    cost = replace(
        segment.cost,
        forward_seconds=segment.cost.forward_seconds + seconds[0],
        backward_input_seconds=segment.cost.backward_input_seconds + seconds[1],
        # The largest collective's result, while what it is made of is still there.
        transient_bytes=max((item.whole_bytes for item in found), default=0),
    )
    segment = replace(segment, cost=cost, collectives=collectives(sharded, microbatch_size))
    return replace(plain, segments=(segment,))


def _state(sharded: Sharded, request: FeatureRequest) -> StateBytes:
    """Of any one rank: all hold as much."""
    graph, mesh, spread, total = sharded.graph, sharded.mesh, shardings(sharded), StateBytes()
    rule = OPTIMIZERS[request.optimizer]
    for name, spec in (*graph.parameters.items(), *graph.buffers.items()):
        types = graph.types_of(name, request.precision)
        if not spread[name].cuts:
            total += state_bytes([(spec.elements, types, name in graph.trained)], request.optimizer)
            continue
        owned = spec.elements // math.prod(mesh.shape[axis] for axis, _ in spread[name].cuts)
        leaf, owner = spec.elements * types.leaf.itemsize, owned * types.owner.itemsize
        total += StateBytes(
            parameters=leaf,
            gradients=spec.elements * types.gradient.itemsize + owner,
            optimizer_state=rule.copies * owner + rule.step_bytes,
            owners=owner,
            trained=owner,
            cast=leaf + owner,
        )
    return total


def _gather_seconds(graph: OpGraph, sharded: Sharded, cluster: ClusterSpec, precision: Precision) -> float:
    """After an update, leaves of which each rank has updated a part are put together again."""
    mesh, seconds = sharded.mesh, 0.0
    links: list[AxisLinks] = [axis_links(mesh, axis, cluster) for axis in range(len(mesh.shape))]
    for name, sharding in shardings(sharded).items():
        if sharding.cuts:
            size_bytes = graph.parameters[name].elements * graph.types_of(name, precision).leaf.itemsize
            seconds += steps_seconds(path(sharding.owner, sharding.leaf, mesh.shape), size_bytes, links)
    return seconds


def sum_seconds(
    sums: Sequence[TiedGroup], summed_bytes: Mapping[str, int], cluster: ClusterSpec
) -> dict[tuple[str, ...], float]:
    """Of each sum of gradients after the last backward, while all groups that make it talk. By its parameters."""
    together: dict[tuple[str, ...], list[TiedGroup]] = {}
    for group in sums:
        together.setdefault(group.parameters, []).append(group)
    found = {}
    for names, groups in together.items():
        links = group_links([group.ranks for group in groups], cluster)
        kind: Kind = "reduce_scatter" if groups[0].scattered else "all_reduce"
        found[names] = links.seconds(kind, sum(summed_bytes[name] for name in names))
    return found
