"""From ops to segments, in numbers: what each segment costs and which values cross, for schedules and simulator.

This is the only place where per-op costs become per-segment costs, so the search, the plan and the prediction agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cost_models.cluster import ClusterSpec
from cost_models.memory import StateBytes, state_bytes
from passes.costs import GraphCosts
from passes.graph import OpGraph
from passes.lower import crossing_values
from passes.segment import Segmentation
from runtime.program import Segment, SegmentCost, SegmentGraph, Value


@dataclass(frozen=True)
class TiedGroup:
    """Trainable parameters that the same several ranks hold; their gradients are summed before the optimizer."""

    parameters: tuple[str, ...]
    ranks: tuple[int, ...]


def segment_graph(
    graph: OpGraph, costs: GraphCosts, segmentation: Segmentation, cluster: ClusterSpec, microbatch_size: int
) -> SegmentGraph:
    """The DAG of segments with seconds and bytes for micro-batches of ``microbatch_size`` samples."""
    ops_of = ops_by_segment(graph, segmentation)
    table = costs.at(microbatch_size)
    output_bytes = dict(zip(costs.ops, table.output_bytes, strict=True))
    crossing = crossing_values(graph, segmentation)
    has_backward = _segments_with_backward(graph, segmentation, crossing)
    received: list[int] = [0] * len(segmentation)
    for name, consumers in crossing.items():
        for consumer in consumers:
            received[consumer] += int(output_bytes[name])
    segments = []
    for index, ranks in enumerate(segmentation.ranks):
        indices = ops_of[index]
        seconds = costs.segment_seconds(indices, microbatch_size, cluster.devices[ranks[0]])
        sent = [name for name in crossing if segmentation.segment_of[name] == index]
        held = costs.held_bytes(indices, microbatch_size, outputs=sent)
        # The simulator charges values between segments on their own, from the moment they are sent or received.
        between = received[index] + sum(int(output_bytes[name]) for name in sent)
        backward = index in has_backward
        cost = SegmentCost(
            forward_seconds=seconds.forward,
            backward_input_seconds=seconds.backward_input if backward else 0.0,
            backward_weight_seconds=seconds.backward_weight if backward else 0.0,
            saved_bytes=max(0, held.saved - between),
            weight_saved_bytes=max(0, held.weight_saved - received[index]),
        )
        segments.append(Segment(index, ranks, cost, backward))
    values = tuple(
        Value(
            name, segmentation.segment_of[name], consumers, int(output_bytes[name]), name in graph.needs_grad
        )
        for name, consumers in crossing.items()
    )
    return SegmentGraph(tuple(segments), values, cluster.world_size)


def ops_by_segment(graph: OpGraph, segmentation: Segmentation) -> list[np.ndarray]:
    """Indices into ``graph.ops`` that each segment runs, its copies of recomputed ops included."""
    index_of = {node.name: index for index, node in enumerate(graph.ops)}
    members: list[set[int]] = [set() for _ in segmentation.ranks]
    for name, segment in segmentation.segment_of.items():
        members[segment].add(index_of[name])
    needed: dict[str, frozenset[int]] = {}
    for node in graph.ops:
        if node.name in segmentation.recomputed:
            cone = {index_of[node.name]}
            for source in node.all_input_nodes:
                cone |= needed.get(source.name, frozenset())
            needed[node.name] = frozenset(cone)
    for node in graph.ops:
        if node.name in segmentation.segment_of:
            for source in node.all_input_nodes:
                members[segmentation.segment_of[node.name]] |= needed.get(source.name, frozenset())
    return [np.array(sorted(indices), dtype=np.int64) for indices in members]


def _segments_with_backward(
    graph: OpGraph, segmentation: Segmentation, crossing: Mapping[str, tuple[int, ...]]
) -> frozenset[int]:
    """Segments that contain a differentiable op, or owe a producer a gradient."""
    found = {segment for name, segment in segmentation.segment_of.items() if name in graph.needs_grad}
    for name, consumers in crossing.items():
        if name in graph.needs_grad:
            found.update(consumers)
    return frozenset(found)


def state_names_of_segments(graph: OpGraph, segmentation: Segmentation) -> tuple[frozenset[str], ...]:
    """Canonical names of the parameters and buffers that each segment reads or writes."""
    names: list[set[str]] = [set() for _ in segmentation.ranks]
    through: dict[str, set[str]] = {}
    for node in graph.ops:
        own: set[str] = set()
        for source in node.all_input_nodes:
            placeholder = graph.input_of.get(source.name)
            if placeholder is not None and placeholder.kind in ("parameter", "buffer"):
                own.add(placeholder.name)
            own |= through.get(source.name, set())
        if node.name in segmentation.recomputed:
            through[node.name] = own
        elif node.name in segmentation.segment_of:
            names[segmentation.segment_of[node.name]] |= own
    for output in graph.outputs:
        if output.kind == "buffer" and output.node in segmentation.segment_of:
            names[segmentation.segment_of[output.node]].add(output.name)
    return tuple(frozenset(found) for found in names)


def trained_tensors(graph: OpGraph, segmentation: Segmentation, world_size: int) -> tuple[int, ...]:
    """How many parameters the optimizer steps on each rank."""
    node_of = {i.name: i.node for i in graph.inputs if i.kind == "parameter"}
    names: list[set[str]] = [set() for _ in range(world_size)]
    for segment, found in enumerate(state_names_of_segments(graph, segmentation)):
        for rank in segmentation.ranks[segment]:
            names[rank] |= {name for name in found if node_of.get(name) in graph.needs_grad}
    return tuple(map(len, names))


def tied_groups(graph: OpGraph, segmentation: Segmentation) -> tuple[TiedGroup, ...]:
    """Which gradients must be summed across ranks. One group per distinct set of ranks."""
    ranks_of: dict[str, set[int]] = defaultdict(set)
    for segment, names in enumerate(state_names_of_segments(graph, segmentation)):
        for name in names:
            ranks_of[name].update(segmentation.ranks[segment])
    node_of = {i.name: i.node for i in graph.inputs if i.kind == "parameter"}
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in graph.parameters:
        ranks = ranks_of.get(name, set())
        if len(ranks) > 1 and node_of[name] in graph.needs_grad:
            groups[tuple(sorted(ranks))].append(name)
    return tuple(TiedGroup(tuple(names), ranks) for ranks, names in groups.items())


def state_of_ranks(
    graph: OpGraph, segmentation: Segmentation, world_size: int, optimizer: str, *, master: bool = False
) -> tuple[StateBytes, ...]:
    """Bytes of parameters, gradients and optimizer state on each rank; buffers count as parameters that do not train."""
    names: list[set[str]] = [set() for _ in range(world_size)]
    for segment, found in enumerate(state_names_of_segments(graph, segmentation)):
        for rank in segmentation.ranks[segment]:
            names[rank] |= found
    node_of = {i.name: i.node for i in graph.inputs if i.kind in ("parameter", "buffer")}
    result = []
    for held in names:
        specs = [graph.parameters.get(name) or graph.buffers[name] for name in sorted(held)]
        triples = [
            (int(np.prod(spec.shape, dtype=np.int64)), spec.dtype, node_of.get(spec.name) in graph.needs_grad)
            for spec in specs
        ]
        result.append(state_bytes(triples, optimizer, master=master))
    return tuple(result)
