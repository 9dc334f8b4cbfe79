"""Ops become segments, in numbers: what each segment costs and which values cross, for schedules and simulator.

This is the only place where per-op costs become per-segment costs, so the search, the plan and the prediction agree.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from cost_models.cluster import ClusterSpec
from cost_models.devices import Device
from cost_models.memory import ParameterCount, StateBytes, state_bytes
from cost_models.precision import Precision
from passes.costs.backward_peak import BackwardPeak, backward_peak
from passes.costs.costs import GraphCosts, SegmentSeconds
from passes.costs.recompute import computed_again
from passes.graph.graph import OpGraph
from passes.graph.leaves import leaf_bytes, needed_leaves
from passes.graph.state import state_reads
from passes.lower.job import Job
from passes.lower.lower import crossing_values
from passes.lower.segment import Segmentation
from runtime.program.program import Segment, SegmentCost, SegmentGraph, TiedGroup, Value


def segment_graph(
    graph: OpGraph,
    costs: GraphCosts,
    segmentation: Segmentation,
    cluster: ClusterSpec,
    microbatch_size: int,
    *,
    deferring: bool = False,
    peaks: bool = True,
) -> SegmentGraph:
    """The DAG of segments with seconds and bytes for micro-batches of ``microbatch_size`` samples.

    ``deferring``: the schedule runs weight halves apart; what they need of a recomputed block is then kept for them.
    ``peaks``: False leaves out what a backward holds for a time, where only seconds are asked for.
    """
    ops_of = ops_by_segment(graph, segmentation)
    index_of = {node.name: index for index, node in enumerate(graph.ops)} if segmentation.regions else {}
    table = costs.at(microbatch_size)
    output_bytes = dict(zip(costs.ops, table.output_bytes, strict=True))
    crossing = crossing_values(graph, segmentation)
    has_backward = _segments_with_backward(graph, segmentation, crossing)
    received: list[int] = [0] * len(segmentation)
    sent_by: list[list[str]] = [[] for _ in segmentation.ranks]
    for name, consumers in crossing.items():
        sent_by[segmentation.segment_of[name]].append(name)
        for consumer in consumers:
            received[consumer] += int(output_bytes[name])
    segments = []
    for index, ranks in enumerate(segmentation.ranks):
        indices = ops_of[index]
        devices = cluster.unlike(ranks)
        seconds = _slowest([costs.segment_seconds(indices, microbatch_size, device) for device in devices])
        sent = sent_by[index]
        regions = [[index_of[name] for name in names] for names in segmentation.regions_of(index)]
        held = costs.held_bytes(indices, microbatch_size, outputs=sent, regions=regions)
        # The simulator charges values between segments on their own, from the moment they are sent or received.
        between = received[index] + sum(int(output_bytes[name]) for name in sent)
        backward = index in has_backward
        again = [op for region in regions for op in computed_again(costs, region, deferring)]
        again_seconds = max(
            costs.segment_seconds(again, microbatch_size, device).forward if again else 0.0
            for device in devices
        )
        at_once = 0.0
        if deferring and backward:
            at_once = _seconds_at_once(costs, indices.tolist(), microbatch_size, devices)
            at_once = min(at_once, seconds.backward_weight)
        peak = (
            backward_peak(graph, costs, indices.tolist(), microbatch_size, regions, deferring=deferring)
            if backward and peaks
            else BackwardPeak(0, 0, 0)
        )
        cost = SegmentCost(
            forward_seconds=seconds.forward,
            backward_input_seconds=seconds.backward_input + at_once + again_seconds if backward else 0.0,
            backward_weight_seconds=seconds.backward_weight - at_once if backward else 0.0,
            saved_bytes=max(0, held.saved - between),
            weight_saved_bytes=max(0, held.weight_saved - received[index]),
            transient_bytes=peak.later_bytes,
            first_transient_bytes=peak.first_bytes,
            gradient_bytes=peak.gradient_bytes,
        )
        segments.append(Segment(index, ranks, cost, backward))
    values = tuple(
        Value(
            name, segmentation.segment_of[name], consumers, int(output_bytes[name]), name in graph.needs_grad
        )
        for name, consumers in crossing.items()
    )
    return SegmentGraph(tuple(segments), values, cluster.world_size)


def _seconds_at_once(
    costs: GraphCosts, ops: Sequence[int], microbatch_size: int, devices: Sequence[Device]
) -> float:
    """Return the seconds of gradients of parameters that are made with those of inputs, since no weight half makes them."""
    others = [op for op in ops if not costs.weight_half[op]]
    return max(costs.segment_seconds(others, microbatch_size, device).backward_weight for device in devices)


def _slowest(each: Sequence[SegmentSeconds]) -> SegmentSeconds:
    """Take the longest of each phase: ranks that share a segment go through it together."""
    return SegmentSeconds(
        forward=max(s.forward for s in each),
        backward_input=max(s.backward_input for s in each),
        backward_weight=max(s.backward_weight for s in each),
    )


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
    for given in graph.inputs:
        if given.kind == "value" and given.needs_grad:  # the graph is a part of another, whose ops made it
            users = (user.name for user in graph.nodes[given.node].users)
            found.update(segmentation.segment_of[name] for name in users if name in segmentation.segment_of)
    return frozenset(found)


def state_names_of_segments(graph: OpGraph, segmentation: Segmentation) -> tuple[frozenset[str], ...]:
    """Canonical names of the parameters and buffers that each segment reads or writes."""
    names: list[set[str]] = [set() for _ in segmentation.ranks]
    for op, own in state_reads(graph, segmentation.recomputed).items():
        if op in segmentation.segment_of:
            names[segmentation.segment_of[op]] |= own
    for output in graph.outputs:
        if output.kind == "buffer" and output.node in segmentation.segment_of:
            names[segmentation.segment_of[output.node]].add(output.name)
    return tuple(frozenset(found) for found in names)


def shared_state(graph: OpGraph, segmentation: Segmentation) -> frozenset[str]:
    """Name the parameters and buffers that several segments read."""
    count = Counter(name for names in state_names_of_segments(graph, segmentation) for name in names)
    return frozenset(name for name, segments in count.items() if segments > 1)


def state_names_of_ranks(graph: OpGraph, segmentation: Segmentation, world_size: int) -> list[frozenset[str]]:
    """Name the parameters and buffers that each rank holds. What no segment reads is with the lowest that runs one."""
    of_segments = state_names_of_segments(graph, segmentation)
    run_by: list[tuple[int, ...]] = [()] * world_size
    for segment, ranks in enumerate(segmentation.ranks):
        for rank in ranks:
            run_by[rank] += (segment,)
    together = {
        own: frozenset[str]().union(*(of_segments[segment] for segment in own)) for own in set(run_by)
    }
    names = [together[own] for own in run_by]
    lowest = min(rank for ranks in segmentation.ranks for rank in ranks)
    names[lowest] |= (graph.parameters.keys() | graph.buffers.keys()).difference(*of_segments)
    return names


def trained_tensors(graph: OpGraph, segmentation: Segmentation, world_size: int) -> tuple[int, ...]:
    """Count the parameters that the optimizer steps on each rank."""
    held = state_names_of_ranks(graph, segmentation, world_size)
    count = {names: len(names & graph.trained) for names in set(held)}
    return tuple(count[names] for names in held)


def tied_groups(graph: OpGraph, segmentation: Segmentation) -> tuple[TiedGroup, ...]:
    """List which gradients of several segments must be summed over ranks, one entry per distinct set of ranks.

    What ranks of one group sum among themselves for one segment is not in it (``passes.shard.state.gradient_sums``).
    """
    summed = shared_state(graph, segmentation) & graph.trained
    holders: dict[str, set[int]] = defaultdict(set)
    for segment, names in enumerate(state_names_of_segments(graph, segmentation)):
        for name in names & summed:
            holders[name].update(segmentation.ranks[segment])
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in graph.parameters:
        if len(holders[name]) > 1:
            groups[tuple(sorted(holders[name]))].append(name)
    return tuple(TiedGroup(tuple(names), ranks) for ranks, names in groups.items())


def state_of_ranks(
    graph: OpGraph, segmentation: Segmentation, world_size: int, job: Job
) -> tuple[StateBytes, ...]:
    """Bytes that each rank holds all through a step; buffers count as parameters that do not train."""
    names = state_names_of_ranks(graph, segmentation, world_size)
    counted = partial(counted_parameter, graph, job.precision)
    sizes, leaves = leaf_bytes(graph, job.batch_size), _leaves_of_ranks(graph, segmentation, world_size)
    return tuple(
        state_bytes(map(counted, sorted(held)), job.optimizer)
        + StateBytes(batch=sum(sizes.get(leaf, 0) for leaf in read))
        for held, read in zip(names, leaves, strict=True)
    )


def _leaves_of_ranks(graph: OpGraph, segmentation: Segmentation, world_size: int) -> list[set[str]]:
    """Name the batch leaves that each rank reads."""
    found: list[set[str]] = [set() for _ in range(world_size)]
    for op, leaves in needed_leaves(graph, segmentation.recomputed).items():
        for rank in segmentation.ranks[segmentation.segment_of[op]] if op in segmentation.segment_of else ():
            found[rank] |= leaves
    return found


def gradient_bytes(graph: OpGraph, name: str, precision: Precision) -> int:
    """Bytes of a parameter's gradient as micro-batches and ranks sum it."""
    return graph.parameters[name].elements * graph.types_of(name, precision).gradient.itemsize


def counted_parameter(graph: OpGraph, precision: Precision, name: str) -> ParameterCount:
    """Return a parameter or buffer as its memory is counted."""
    spec = graph.parameters.get(name) or graph.buffers[name]
    return spec.elements, graph.types_of(name, precision), name in graph.trained
