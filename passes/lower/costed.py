"""Segments with everything that a step costs: what they compute, sums after the last backward, what ranks hold.

    segments on a rank each     costs of the model's own graph
    segment on a mesh           placement ─► shard_graph ─► one segment on all ranks (compute + collectives)

Seconds of a segment on a mesh are those of its ops on shards, one after the other with its collectives: no overlap is
assumed beside what the simulator knows of host and device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cost_models.cluster import ClusterSpec
from cost_models.compute import optimizer_seconds
from cost_models.conversion import group_links
from cost_models.layout import Layout
from cost_models.memory import OPTIMIZERS, StateBytes, state_bytes
from passes.costs.costs import GraphCosts, cost_graph
from passes.graph.graph import OpGraph
from passes.graph.verify import verify_graph
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.lower.segment import Segmentation, on_mesh
from passes.lower.step import StepCosts, SumCost, sum_bytes
from passes.lower.summarize import (
    gradient_bytes,
    segment_graph,
    state_of_ranks,
    tied_groups,
    trained_tensors,
)
from passes.shard.shard import ShardedGraph, shard_graph
from passes.shard.state import (
    GradientSum,
    UpdateGather,
    gradient_sum_costs,
    gradient_sums,
    shardings,
    update_gathers,
)
from passes.shard.traffic import Traffic, collectives, traffic
from runtime.mesh.ranks_along import JOINT, all_ranks_along
from runtime.program.program import SegmentGraph, TiedGroup
from runtime.schedules import SCHEDULES
from runtime.segment.microbatch import microbatch_sizes


@dataclass(frozen=True, eq=False)
class Costed:
    """A placement as segments, with what they cost; nothing is ordered yet."""

    segmentation: Segmentation
    """The segments of the graph that ranks run: the model's own graph, unless ranks run it on shards."""
    segments: SegmentGraph
    tied: tuple[TiedGroup, ...]
    """Sums of gradients after the last backward."""
    state: tuple[StateBytes, ...]
    """State held by each rank."""
    step: StepCosts
    stage_of: Mapping[str, int]
    """Op of the model -> the segment that runs it; an op that every segment recomputes for itself is not in it."""
    sharded: ShardedGraph | None = None
    """The stage as its ranks share it; None where every segment has a single rank."""
    traffic: tuple[Traffic, ...] = ()
    """Collectives inside of segments."""
    sums: tuple[GradientSum, ...] = ()
    """The sums in ``tied`` that sharded stages make, with their costs."""
    gathers: tuple[UpdateGather, ...] = ()
    """Parameters that are put together after the update."""

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each segment."""
        return self.segmentation.ranks

    @property
    def layouts(self) -> dict[str, Layout]:
        """Op -> the device it runs on; ops that several devices share have their bridges inside of the segment."""
        return {
            name: Layout.on(self.groups[stage][0])
            for name, stage in self.stage_of.items()
            if len(self.groups[stage]) == 1
        }


def costed_segments(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    job: Job,
    candidate: Candidate,
    segmentation: Segmentation,
) -> Costed:
    """Cost segments that have a single rank each."""
    tied = tied_groups(graph, segmentation)
    state = state_of_ranks(graph, segmentation, cluster.world_size, job.optimizer, job.precision)
    tensors = trained_tensors(graph, segmentation, cluster.world_size)
    step = StepCosts(
        state_bytes=tuple(held.total for held in state),
        optimizer_seconds=tuple(
            optimizer_seconds(held, device, job.optimizer, count)
            for held, device, count in zip(state, cluster.devices, tensors, strict=True)
        ),
        tied_bytes={
            name: gradient_bytes(graph, name, job.precision) for group in tied for name in group.parameters
        },
    )
    segments = segments_of(graph, costs, cluster, job, candidate, segmentation)
    return Costed(segmentation, segments, tied, state, step, segmentation.segment_of)


def segments_of(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    job: Job,
    candidate: Candidate,
    segmentation: Segmentation,
) -> SegmentGraph:
    """The DAG of segments, with costs for the largest micro-batch."""
    largest = microbatch_sizes(job.batch_size, candidate.microbatches)[0]
    deferring = SCHEDULES[candidate.schedule].splits_backward
    return segment_graph(graph, costs, segmentation, cluster, largest, deferring=deferring)


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
