"""Segments with everything that a step costs: what they compute, sums after the last backward, what ranks hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cost_models.cluster import ClusterSpec
from cost_models.compute import optimizer_seconds
from cost_models.layout import Layout
from cost_models.memory import StateBytes
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.lower.segment import Segmentation
from passes.lower.step import StepCosts
from passes.lower.summarize import (
    gradient_bytes,
    segment_graph,
    state_of_ranks,
    tied_groups,
    trained_tensors,
)
from passes.shard.shard import ShardedGraph
from passes.shard.sums import GradientSum, UpdateGather
from passes.shard.traffic import Traffic
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
