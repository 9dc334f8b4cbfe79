"""Segments with everything that a step costs: what they compute, sums after the last backward, what ranks hold.

segment on a rank     costs of the model's own graph
segment on a mesh     ``passes.lower.on_mesh``
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cost_models.cluster import ClusterSpec
from cost_models.compute import optimizer_seconds
from cost_models.memory import StateBytes, update_bytes
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate
from passes.lower.crossing import Crossings
from passes.lower.job import Job
from passes.lower.mesh_stages import MeshStages
from passes.lower.on_mesh import OnMesh
from passes.lower.segment import Segmentation
from passes.lower.step import StepCosts, SumCost, SumKey, sums_with_costs
from passes.lower.summarize import (
    gradient_bytes,
    segment_graph,
    state_of_ranks,
    tied_groups,
    trained_tensors,
)
from passes.shard.sent import gather_collectives
from passes.shard.words import FeaturePlacement
from runtime.program.program import SegmentGraph, TiedGroup
from runtime.schedules import SCHEDULES


@dataclass(frozen=True, eq=False)
class Costed:
    """A placement as segments, with what they cost; nothing is ordered yet."""

    segmentation: Segmentation
    """The segments of the model's graph."""
    segments: SegmentGraph
    tied: tuple[TiedGroup, ...]
    """Sums of gradients after the last backward."""
    state: tuple[StateBytes, ...]
    """State held by each rank."""
    step: StepCosts
    stage_of: Mapping[str, int]
    """Op of the model -> the segment that runs it; an op that every segment recomputes for itself is not in it."""
    meshes: Mapping[int, OnMesh] = field(default_factory=dict)
    """Segment -> what the ranks of its mesh do; empty where every segment has a single rank."""

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each segment."""
        return self.segmentation.ranks

    @property
    def placements(self) -> dict[int, FeaturePlacement]:
        """Segment -> how the ranks of its mesh share it."""
        return {index: own.placement for index, own in self.meshes.items()}


def costed_segments(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    job: Job,
    candidate: Candidate,
    segmentation: Segmentation,
    stages: MeshStages | None = None,
) -> Costed:
    """Cost the segments of a candidate, on single ranks and on meshes.

    ``stages``: those of other candidates for the same graph, cluster and job, of which equal ones are taken.
    """
    size = job.batch_size // candidate.microbatches
    meshes = (stages or MeshStages(graph, cluster, job)).of(candidate, segmentation)
    state = [StateBytes()] * cluster.world_size
    if meshes:
        crossings = Crossings(graph, segmentation, candidate.shardings)
        values = tuple(crossings.value(name, size, cluster) for name in crossings.consumers)
        segments = SegmentGraph(tuple(own.segment for own in meshes.values()), values, cluster.world_size)
    else:
        state = list(state_of_ranks(graph, segmentation, cluster.world_size, job))
        segments = segments_of(graph, costs, cluster, job, candidate, segmentation)
    tied = list(tied_groups(graph, segmentation))
    gradients = {n: gradient_bytes(graph, n, job.precision) for group in tied for n in group.parameters}
    tensors = trained_tensors(graph, segmentation, cluster.world_size)
    gather_seconds = [0.0] * cluster.world_size
    sums: dict[SumKey, SumCost] = {}
    held: list[tuple[int, ...]] = [()] * cluster.world_size
    """The segments of each rank."""
    for own in meshes.values():
        for rank in own.segment.ranks:
            held[rank] += (own.segment.index,)
            gather_seconds[rank] += math.fsum(gather.seconds for gather in own.gathers)
        for group, cost in sums_with_costs(own.segment.index, own.sums, own.placement.mesh):
            tied.append(group)
            sums[group.parameters, tuple(sorted(group.ranks))] = cost
        gradients |= own.summed_bytes
    if meshes:
        by_segments = {indices: _state_of(indices, meshes) for indices in set(held)}
        state = [by_segments[indices] for indices in held]
    step = StepCosts(
        state_bytes=tuple(own.total for own in state),
        optimizer_seconds=tuple(
            optimizer_seconds(own_state, device, job.optimizer, count) + gathering
            for own_state, device, count, gathering in zip(
                state, cluster.devices, tensors, gather_seconds, strict=True
            )
        ),
        update_bytes=tuple(
            update_bytes(own, device.counted_as, job.optimizer)
            for own, device in zip(state, cluster.devices, strict=True)
        ),
        tied_bytes=gradients,
        sums=sums,
        gathers=tuple(
            c for own in meshes.values() for c in gather_collectives(own.gathers, own.placement.mesh)
        ),
    )
    return Costed(segmentation, segments, tuple(tied), tuple(state), step, segmentation.segment_of, meshes)


def _state_of(indices: Sequence[int], meshes: Mapping[int, OnMesh]) -> StateBytes:
    """Return what a rank holds that runs these segments: what several of them read, once."""
    together: dict[str, StateBytes] = {}
    leaves: dict[str, int] = {}
    for index in indices:
        together |= meshes[index].state
        leaves |= meshes[index].leaf_bytes
    return sum(together.values(), StateBytes(batch=sum(leaves.values())))


def segments_of(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    job: Job,
    candidate: Candidate,
    segmentation: Segmentation,
    *,
    peaks: bool = True,
) -> SegmentGraph:
    """The DAG of segments, with costs for the largest micro-batch; ``peaks`` as ``segment_graph`` has it."""
    largest = job.sizes(candidate.microbatches)[0]
    deferring = SCHEDULES[candidate.schedule].splits_backward
    return segment_graph(graph, costs, segmentation, cluster, largest, deferring=deferring, peaks=peaks)
