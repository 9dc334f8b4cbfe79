"""Forward-only programs of a placed evaluation graph: micro-batches follow each other as fast as the ranks allow.

evaluation graph, segmentation ─► segments (no backward) ─► inference order ─► one order of messages
"""

from __future__ import annotations

from collections import Counter

from cost_models.cluster import ClusterSpec
from passes.graph.graph import OpGraph
from passes.lower.lower import crossing_values, value_spec
from passes.lower.segment import Segmentation
from passes.lower.step import transfer_seconds
from runtime.program.order import build_programs
from runtime.program.program import Program, Segment, SegmentCost, SegmentGraph, Value
from runtime.schedules import inference_order


def inference_segments(
    graph: OpGraph, segmentation: Segmentation, world_size: int, microbatch_size: int, op_seconds: float
) -> SegmentGraph:
    """Make the DAG of segments for micro-batches of ``microbatch_size`` samples.

    An op counts as ``op_seconds``: that decides in which order a rank with several segments runs them, nothing else.
    """
    ops = Counter(segmentation.segment_of.values())
    segments = tuple(
        Segment(index, ranks, SegmentCost(ops[index] * op_seconds, 0.0, 0.0), has_backward=False)
        for index, ranks in enumerate(segmentation.ranks)
    )
    sizes = {**graph.example_sizes, graph.batch.batch_symbol: microbatch_size}
    values = []
    for name, consumers in crossing_values(graph, segmentation).items():
        size_bytes = value_spec(graph, name).size_bytes(sizes)
        values.append(Value(name, segmentation.segment_of[name], consumers, size_bytes, needs_grad=False))
    return SegmentGraph(segments, tuple(values), world_size)


def inference_programs(
    segments: SegmentGraph, cluster: ClusterSpec, microbatches: int
) -> tuple[Program, ...]:
    """Make one program per device of ``cluster``."""
    if not segments.segments:
        return tuple(Program(rank, ()) for rank in range(segments.world_size))
    seconds = transfer_seconds(cluster)
    orders = inference_order(segments, microbatches, seconds)
    return build_programs(
        segments, orders, microbatches, transfer_seconds=seconds, training=False, optimizer=False
    )
