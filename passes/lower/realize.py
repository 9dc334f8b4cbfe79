"""Segments with one device each, carried through: schedule ─► programs ─► simulated step."""

from __future__ import annotations

from cost_models.cluster import ClusterSpec
from cost_models.compute import optimizer_seconds
from cost_models.precision import Precision
from passes.graph.graph import OpGraph
from passes.lower.segment import Segmentation
from passes.lower.step import StepCosts, programs_for, simulate_step
from passes.lower.summarize import gradient_bytes, state_of_ranks, tied_groups, trained_tensors
from passes.search.placed import Realized
from runtime.program.program import SegmentGraph
from runtime.segment.microbatch import microbatch_sizes


def realize_segments(
    graph: OpGraph,
    segmentation: Segmentation,
    segments: SegmentGraph,
    cluster: ClusterSpec,
    schedule: str,
    *,
    batch_size: int,
    microbatches: int,
    optimizer: str,
    precision: Precision,
) -> Realized:
    """``segments``: the costs of ``segmentation`` for the largest micro-batch."""
    tied = tied_groups(graph, segmentation)
    state = state_of_ranks(graph, segmentation, cluster.world_size, optimizer, precision)
    tensors = trained_tensors(graph, segmentation, cluster.world_size)
    step = StepCosts(
        state_bytes=tuple(held.total for held in state),
        optimizer_seconds=tuple(
            optimizer_seconds(held, device, optimizer, count)
            for held, device, count in zip(state, cluster.devices, tensors, strict=True)
        ),
        tied_bytes={
            name: gradient_bytes(graph, name, precision) for group in tied for name in group.parameters
        },
    )
    programs = programs_for(segments, cluster, schedule, microbatches, tied, state_bytes=step.state_bytes)
    sizes = microbatch_sizes(batch_size, microbatches)
    simulation = simulate_step(programs, segments, cluster, step, sizes)
    return Realized(segmentation, segments, tied, programs, state, step, simulation)
