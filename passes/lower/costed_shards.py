"""The costs of a stage that several devices share: those of the local graph, its collectives, sums, state.

    placement ─► shard_graph ─► one segment on all ranks (compute + collectives)

Seconds of the segment are those of its ops on shards, one after the other with its collectives: no overlap is assumed
beside what the simulator knows of host and device.
"""

from __future__ import annotations

import math
from dataclasses import replace

from cost_models.cluster import ClusterSpec
from cost_models.compute import optimizer_seconds
from cost_models.conversion import group_links
from cost_models.memory import OPTIMIZERS, StateBytes, state_bytes
from passes.costs.costs import cost_graph
from passes.graph.graph import OpGraph
from passes.graph.verify import verify_graph
from passes.lower.candidate import Candidate
from passes.lower.costed import Costed
from passes.lower.job import Job
from passes.lower.segment import on_mesh
from passes.lower.step import StepCosts, SumCost, sum_bytes
from passes.lower.summarize import gradient_bytes, segment_graph
from passes.shard.program import gradient_sums, shardings
from passes.shard.shard import ShardedGraph, shard_graph
from passes.shard.sums import gradient_sum_costs, update_gathers
from passes.shard.traffic import Traffic, collectives, traffic
from runtime.mesh.ranks_along import JOINT, all_ranks_along
from runtime.program.program import SegmentGraph


def costed_shards(graph: OpGraph, cluster: ClusterSpec, job: Job, candidate: Candidate) -> Costed:
    """Cost ``graph`` as the ranks of the candidate's mesh share it."""
    assert candidate.sharding is not None
    sharded = shard_graph(graph, candidate.sharding)
    verify_graph(sharded.graph, after="shard")
    size, world = job.batch_size // candidate.microbatches, cluster.world_size
    sent = traffic(sharded, size)
    tied = gradient_sums(sharded)
    state = _state(sharded, job)
    summed_bytes = {n: gradient_bytes(sharded.graph, n, job.precision) for s in tied for n in s.parameters}
    sums = gradient_sum_costs(sharded, summed_bytes, cluster)
    gathers = update_gathers(graph, sharded, job.precision, cluster)
    gather_seconds = math.fsum(gather.seconds for gather in gathers)
    step = StepCosts(
        state_bytes=(state.total,) * world,
        optimizer_seconds=tuple(
            optimizer_seconds(state, device, job.optimizer, len(graph.trained)) + gather_seconds
            for device in cluster.devices
        ),
        tied_bytes=summed_bytes,
        sums={
            (item.parameters, tuple(sorted(ranks))): SumCost(
                item.seconds, sum_bytes(sum(item.size_bytes), len(ranks), item.sync.scattered)
            )
            for item in sums
            for ranks in item.groups
        },
        gathers=tuple(collective for gather in gathers for collective in gather.collectives()),
    )
    return Costed(
        segmentation=on_mesh(sharded.graph, sharded.mesh),
        segments=_segments(sharded, sent, cluster, size),
        tied=tied,
        state=(state,) * world,
        step=step,
        stage_of=candidate.stage_of,
        sharded=sharded,
        traffic=sent,
        sums=sums,
        gathers=gathers,
    )


def _segments(
    sharded: ShardedGraph, found: tuple[Traffic, ...], cluster: ClusterSpec, microbatch_size: int
) -> SegmentGraph:
    """Make the one segment: its ops on shards, and its collectives one after the other."""
    graph = sharded.graph
    units = microbatch_size // graph.batch.multiple
    costs = cost_graph(graph, device_kind=cluster.devices[0].kind, only_size=units)
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


def _state(sharded: ShardedGraph, job: Job) -> StateBytes:
    """Count the state of any one rank: all hold as much."""
    graph, mesh, spread, total = sharded.graph, sharded.mesh, shardings(sharded), StateBytes()
    rule = OPTIMIZERS[job.optimizer]
    for name, spec in (*graph.parameters.items(), *graph.buffers.items()):
        types = graph.types_of(name, job.precision)
        if not spread[name].cuts:
            total += state_bytes([(spec.elements, types, name in graph.trained)], job.optimizer)
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
