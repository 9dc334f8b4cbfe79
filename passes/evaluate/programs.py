"""Forward-only programs of a placed evaluation graph: micro-batches follow each other as fast as the ranks allow.

evaluation graph, segmentation ─► segments (no backward) ─► inference order ─► one order of messages
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from cost_models.cluster import ClusterSpec
from passes.graph.graph import OpGraph
from passes.lower.crossing import Crossings
from passes.lower.segment import Segmentation
from passes.lower.step import transfer_seconds
from passes.shard.words import FeaturePlacement
from runtime.program.order import build_group_programs
from runtime.program.program import Program, Segment, SegmentCost, SegmentGraph
from runtime.schedules import inference_order


def inference_segments(
    graph: OpGraph,
    segmentation: Segmentation,
    placements: Mapping[int, FeaturePlacement],
    cluster: ClusterSpec,
    microbatch_size: int,
    op_seconds: float,
) -> SegmentGraph:
    """Make the DAG of segments for micro-batches of ``microbatch_size`` samples.

    ``placements``: segment -> its mesh, and the layouts in which values leave and arrive there. An op counts as
    ``op_seconds``: that decides in which order a rank with several segments runs them, nothing else.
    """
    ops = Counter(segmentation.segment_of.values())
    segments = tuple(
        Segment(index, ranks, SegmentCost(ops[index] * op_seconds, 0.0, 0.0), has_backward=False)
        for index, ranks in enumerate(segmentation.ranks)
    )
    crossings = Crossings(graph, segmentation, placements)
    values = (crossings.value(name, microbatch_size, cluster) for name in crossings.consumers)
    forward = tuple(replace(value, needs_grad=False, gradient_pieces=()) for value in values)
    return SegmentGraph(segments, forward, cluster.world_size)


def inference_programs(
    segments: SegmentGraph, cluster: ClusterSpec, microbatches: int, *, one_queue: bool = False
) -> tuple[Program, ...]:
    """Make one program per device of ``cluster``. ``one_queue``: as devices with one queue for everything need them."""
    if not segments.segments:
        return tuple(Program(rank, ()) for rank in range(segments.world_size))
    seconds = transfer_seconds(cluster)
    orders = inference_order(segments, microbatches, seconds)
    return build_group_programs(
        segments,
        orders,
        microbatches,
        transfer_seconds=seconds,
        training=False,
        optimizer=False,
        one_queue=one_queue,
    ).all()
