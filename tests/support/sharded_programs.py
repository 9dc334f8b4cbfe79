"""Programs of one sharded graph alone: one segment on all ranks of its mesh, then the sums of gradients, then the step.

rank 0: 0F0 0B0 0F1 0B1 +wte@0,1 step
rank 1: 0F0 0B0 0F1 0B1 +wte@0,1 step
"""

from __future__ import annotations

from passes.shard.shard import ShardedGraph
from passes.shard.state import gradient_sums
from runtime.program.program import Backward, Compute, Forward, Program, Segment, SegmentCost, SegmentGraph
from tests.support.rank_programs import build_programs


def sharded_programs(
    sharded: ShardedGraph, microbatches: int, world_size: int, *, training: bool = True
) -> tuple[Program, ...]:
    """Return one program per rank of the world."""
    segments = sharded_segments(sharded, SegmentCost(0.0, 0.0, 0.0), world_size)
    trains = training and segments.segments[0].has_backward
    order: list[Compute] = []
    for mb in range(microbatches):
        order += [Forward(0, mb), Backward(0, mb)] if trains else [Forward(0, mb)]
    lead = segments.segments[0].rank
    return build_programs(
        segments,
        tuple(tuple(order) if rank == lead else () for rank in range(world_size)),
        microbatches,
        transfer_seconds=_nothing,
        tied=gradient_sums(sharded),
        training=trains,
    )


def _nothing(source: int, target: int, size_bytes: int) -> float:
    return 0.0


def sharded_segments(sharded: ShardedGraph, cost: SegmentCost, world_size: int) -> SegmentGraph:
    """Return the graph of the one segment."""
    graph = sharded.graph
    segment = Segment(0, sharded.mesh.ranks, cost, graph.loss is not None and graph.loss in graph.needs_grad)
    return SegmentGraph((segment,), (), world_size)
