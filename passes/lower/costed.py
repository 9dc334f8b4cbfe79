"""Segments with everything that a step costs: what they compute, sums after the last backward, what ranks hold.

    segment on a rank     costs of the model's own graph
    segment on a mesh     its ops ─► shard_graph ─► costs of what one rank runs, and of the collectives

Seconds of a segment on a mesh are those of its ops on shards, one after the other with its collectives, but for sums of
input gradients, which run beside weight gradients where the executor does it (``passes.shard.beside``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cost_models.cluster import ClusterSpec
from cost_models.communication import hidden_seconds
from cost_models.compute import optimizer_seconds
from cost_models.conversion import AxisLinks, group_links, local_share
from cost_models.layout import Mesh, Replicate
from cost_models.memory import OPTIMIZERS, StateBytes, state_bytes
from passes.costs.costs import GraphCosts, cost_graph
from passes.costs.recompute import computed_again
from passes.graph.graph import OpGraph
from passes.graph.leaves import leaf_bytes
from passes.graph.verify import verify_graph
from passes.lower.candidate import Candidate
from passes.lower.crossing import Crossings
from passes.lower.job import Job
from passes.lower.placed_graph import on_meshes
from passes.lower.segment import Segmentation, on_mesh
from passes.lower.step import StepCosts, SumCost, SumKey, sum_bytes
from passes.lower.summarize import (
    gradient_bytes,
    segment_graph,
    state_of_ranks,
    tied_groups,
    trained_tensors,
)
from passes.shard.beside import layers_beside, ops_beside_gathers
from passes.shard.regions import regions_on_shards
from passes.shard.shard import ShardedGraph
from passes.shard.state import (
    GradientSum,
    UpdateGather,
    gradient_sum_costs,
    gradient_sums,
    shardings,
    update_gathers,
)
from passes.shard.traffic import Traffic, collectives, repeated, traffic
from passes.shard.words import FeaturePlacement
from runtime.mesh.ranks_along import JOINT, all_ranks_along
from runtime.program.program import Segment, SegmentGraph, TiedGroup
from runtime.schedules import SCHEDULES
from runtime.segment.microbatch import microbatch_sizes


@dataclass(frozen=True, eq=False)
class OnMesh:
    """A segment as the ranks of a mesh share it, and what they send each other in a step."""

    sharded: ShardedGraph
    traffic: tuple[Traffic, ...]
    """Collectives inside of the segment."""
    links: Mapping[str, AxisLinks]
    """The links of each axis that these take."""
    sums: tuple[GradientSum, ...]
    """Sums of gradients after the last backward."""
    summed_bytes: Mapping[str, int]
    """Bytes of each gradient that ranks of the mesh sum, as a rank has it."""
    gathers: tuple[UpdateGather, ...]
    """Parameters that are put together after the update."""
    segment: Segment
    state: Mapping[str, StateBytes]
    """State of each parameter and buffer on any one rank: all hold as much."""
    leaf_bytes: Mapping[str, int]
    """Bytes of each leaf of a step's batch on any one rank, as far as it reads it."""


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
        return {index: own.sharded.placement for index, own in self.meshes.items()}


def costed_segments(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    job: Job,
    candidate: Candidate,
    segmentation: Segmentation,
) -> Costed:
    """Cost the segments of a candidate, on single ranks and on meshes."""
    placed = on_meshes(graph, segmentation, candidate.shardings)
    size = job.batch_size // candidate.microbatches
    deferring = SCHEDULES[candidate.schedule].splits_backward
    meshes = {
        i: _on_mesh(graph, own, cluster, job, i, size, segmentation.regions_of(i), deferring)
        for i, own in placed.sharded.items()
    }
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
        for item in own.sums:
            for ranks in item.groups:
                tied.append(TiedGroup(item.parameters, ranks, item.sync.scattered))
                sent_bytes = sum_bytes(sum(item.size_bytes), len(ranks), item.sync.scattered)
                sums[item.parameters, tuple(sorted(ranks))] = SumCost(
                    item.seconds, sent_bytes, own.segment.index, item.ready
                )
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
        tied_bytes=gradients,
        sums=sums,
        gathers=tuple(c for own in meshes.values() for gather in own.gathers for c in gather.collectives()),
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
) -> SegmentGraph:
    """The DAG of segments, with costs for the largest micro-batch."""
    largest = microbatch_sizes(job.batch_size, candidate.microbatches)[0]
    deferring = SCHEDULES[candidate.schedule].splits_backward
    return segment_graph(graph, costs, segmentation, cluster, largest, deferring=deferring)


def _on_mesh(
    graph: OpGraph,
    sharded: ShardedGraph,
    cluster: ClusterSpec,
    job: Job,
    index: int,
    size: int,
    regions: Sequence[Sequence[str]],
    deferring: bool,
) -> OnMesh:
    """Cost the segment ``index`` as its ranks share it, in micro-batches of ``size`` samples.

    ``regions``: the ops of the model that it computes again in backward, by block.
    """
    verify_graph(sharded.graph, after="shard")
    segment, sent, links, backward = _segment(sharded, cluster, size, regions, deferring)
    summed_bytes = {
        name: gradient_bytes(sharded.graph, name, job.precision)
        for group in gradient_sums(sharded)
        for name in group.parameters
    }
    sums = gradient_sum_costs(sharded, summed_bytes, cluster, backward)
    gathers = update_gathers(graph, sharded, job.precision, cluster)
    segment = replace(segment, index=index)
    state, leaves = _state(sharded, job), _leaf_bytes(graph, sharded, job)
    return OnMesh(sharded, sent, links, sums, summed_bytes, gathers, segment, state, leaves)


def _segment(
    sharded: ShardedGraph,
    cluster: ClusterSpec,
    microbatch_size: int,
    regions: Sequence[Sequence[str]],
    deferring: bool,
) -> tuple[Segment, tuple[Traffic, ...], dict[str, AxisLinks], list[float]]:
    """Make the segment of a mesh, its ops on shards and its collectives; list these, their links, and each op's seconds in
    backward.

    A block that is computed again repeats its collectives: they are backward's too.
    """
    graph = sharded.graph
    units = microbatch_size // graph.batch.multiple
    kind = cluster.devices[sharded.mesh.ranks[0]].kind
    costs = cost_graph(graph, device_kind=kind, only_size=units)
    own = regions_on_shards(graph, regions)
    alone = replace(on_mesh(graph, sharded.mesh), regions=(own,) if own else ())
    (segment,) = segment_graph(graph, costs, alone, cluster, units, deferring=deferring).segments
    found = once = traffic(sharded, microbatch_size)
    if segment.has_backward:
        found += repeated(found, _computed_again(costs, own, deferring))
    links = {
        axis: group_links(all_ranks_along(sharded.mesh, axis.split(JOINT)), cluster)
        for axis in {item.axis for item in found}
    }
    seconds = {back: sum(t.seconds(links[t.axis]) for t in found if t.backward == back) for back in (0, 1)}
    hidden = (
        0.0 if deferring else _hidden_seconds(graph, costs, cluster, sharded.mesh, units, once, links, own)
    )
    ahead = 0.0 if deferring else _ahead_seconds(graph, costs, cluster, sharded.mesh, units, once, links, own)
    cost = replace(
        segment.cost,
        forward_seconds=max(0.0, segment.cost.forward_seconds - ahead) + seconds[0],
        backward_input_seconds=segment.cost.backward_input_seconds + seconds[1],
        backward_weight_seconds=max(0.0, segment.cost.backward_weight_seconds - hidden),
        # The largest collective's result, while what it is made of is still there, beside what is computed again.
        transient_bytes=segment.cost.transient_bytes + max((item.whole_bytes for item in found), default=0),
    )
    segment = replace(segment, cost=cost, collectives=collectives(found, sharded.mesh, links))
    return segment, found, links, _backward_seconds(costs, cluster, sharded.mesh, units, found, links, own)


def _backward_seconds(
    costs: GraphCosts,
    cluster: ClusterSpec,
    mesh: Mesh,
    units: int,
    found: Sequence[Traffic],
    links: Mapping[str, AxisLinks],
    regions: Sequence[Sequence[str]],
) -> list[float]:
    """Return the seconds of each op in backward, with its collectives; of a block that is computed again, the last op's
    include that."""
    each = costs.seconds(units, cluster.devices[mesh.ranks[0]])
    seconds = dict(zip(costs.ops, (each.backward_input + each.backward_weight).tolist(), strict=True))
    last_of = {name: names[-1] for names in regions for name in names}
    for name, forward in zip(costs.ops, each.forward.tolist(), strict=True):
        if name in last_of:
            seconds[last_of[name]] += forward
    for item in found:
        if item.backward:
            seconds[item.node] += item.seconds(links[item.axis])
    return list(seconds.values())


def _hidden_seconds(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    mesh: Mesh,
    units: int,
    found: Sequence[Traffic],
    links: Mapping[str, AxisLinks],
    regions: Sequence[Sequence[str]],
) -> float:
    """Return the seconds of weight gradients that are computed while sums of input gradients are under way."""
    beside = layers_beside(graph, regions)
    if not beside:
        return 0.0
    index_of = {name: index for index, name in enumerate(costs.ops)}
    devices = cluster.unlike(mesh.ranks)
    total = 0.0
    for item in found:
        if item.backward and item.node in beside:
            layers = [index_of[name] for name in beside[item.node]]
            computing = max(costs.weight_gradient_seconds(layers, units, device) for device in devices)
            sending = item.seconds(links[item.axis])
            total += float(hidden_seconds(sending, computing, cluster.host_costs.contention))
    return total


def _ahead_seconds(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    mesh: Mesh,
    units: int,
    found: Sequence[Traffic],
    links: Mapping[str, AxisLinks],
    regions: Sequence[Sequence[str]],
) -> float:
    """Return the seconds of forward that are computed while gathers of parameters are under way."""
    sending = {t.node: t.seconds(links[t.axis]) for t in found if t.kind == "all_gather" and not t.backward}
    index_of = {name: index for index, name in enumerate(costs.ops)}
    devices = cluster.unlike(mesh.ranks)
    total = 0.0
    for gathers, beside in ops_beside_gathers(graph, regions) if sending else ():
        ops = [index_of[name] for name in beside if name in index_of]
        computing = max(costs.segment_seconds(ops, units, device).forward for device in devices)
        sent = sum(sending.get(name, 0.0) for name in gathers)
        total += float(hidden_seconds(sent, computing, cluster.host_costs.contention))
    return total


def _computed_again(costs: GraphCosts, regions: Sequence[Sequence[str]], deferring: bool) -> set[str]:
    """Name the ops of ``regions`` that run a second time."""
    index_of = {name: index for index, name in enumerate(costs.ops)}
    each = ([index_of[name] for name in names] for names in regions)
    return {costs.ops[op] for region in each for op in computed_again(costs, region, deferring)}


def _leaf_bytes(graph: OpGraph, sharded: ShardedGraph, job: Job) -> dict[str, int]:
    """Count the bytes of each leaf of a step's batch that any one rank reads: its part of what is split."""
    spread, sizes = sharded.graph.batch.placements, leaf_bytes(graph, job.batch_size)
    whole = (Replicate(),) * len(sharded.mesh.shape)
    return {
        given.name: int(sizes[given.name] * local_share(spread.get(given.name) or whole, sharded.mesh.shape))
        for given in sharded.graph.inputs
        if given.kind == "batch" and given.name in sizes
    }


def _state(sharded: ShardedGraph, job: Job) -> dict[str, StateBytes]:
    """Count the state of each parameter and buffer on any one rank: all hold as much."""
    graph, mesh, spread = sharded.graph, sharded.mesh, shardings(sharded)
    rule, found = OPTIMIZERS[job.optimizer], {}
    for name, spec in (*graph.parameters.items(), *graph.buffers.items()):
        types = graph.types_of(name, job.precision)
        if not spread[name].cuts:
            found[name] = state_bytes([(spec.elements, types, name in graph.trained)], job.optimizer)
            continue
        owned = spec.elements // math.prod(mesh.shape[axis] for axis, _ in spread[name].cuts)
        leaf, owner = spec.elements * types.leaf.itemsize, owned * types.owner.itemsize
        found[name] = StateBytes(
            parameters=leaf,
            gradients=spec.elements * types.gradient.itemsize + owner,
            optimizer_state=rule.copies * owner + rule.step_bytes,
            owners=owner,
            trained=owner,
            cast=leaf + owner,
        )
    return found
