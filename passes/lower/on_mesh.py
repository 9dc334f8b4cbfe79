"""A stage as the ranks of a mesh share it: what they compute, send each other and hold.

    ops of the stage ─► shard_graph ─► costs of what one rank runs, and of the collectives

Seconds are those of its ops on shards, one after the other with its collectives, but for sums of input gradients, which run
beside weight gradients where the executor does it (``passes.shard.beside``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from cost_models.cluster import ClusterSpec
from cost_models.communication import hidden_seconds
from cost_models.conversion import local_share
from cost_models.devices import Device
from cost_models.layout import Mesh, Replicate
from cost_models.memory import OPTIMIZERS, StateBytes, state_bytes
from passes.costs.allocations import Allocations, allocations
from passes.costs.costs import GraphCosts, cost_graph
from passes.costs.recompute import computed_again
from passes.graph.graph import OpGraph, StateSpec, once_per_graph
from passes.graph.leaves import leaf_bytes
from passes.lower.job import Job
from passes.lower.segment import on_mesh
from passes.lower.summarize import gradient_bytes, segment_graph
from passes.shard.beside import Ahead, gathers_ahead, layers_beside
from passes.shard.regions import regions_on_shards
from passes.shard.sent import GradientSum, StageCollective, UpdateGather, collectives
from passes.shard.shard import ShardedGraph
from passes.shard.state import (
    gradient_sum_costs,
    gradient_sums,
    shardings,
    update_gathers,
)
from passes.shard.traffic import priced, repeated, together, traffic
from passes.shard.words import FeaturePlacement
from runtime.ops.bridges import is_bridge
from runtime.program.program import Segment


@dataclass(frozen=True, eq=False)
class OnMesh:
    """A segment as the ranks of a mesh share it, and what they send each other in a step."""

    placement: FeaturePlacement
    """The layouts of its values, buffers that its ops write included."""
    samples_multiple: int
    """Every micro-batch has a multiple of so many samples."""
    parameters: Mapping[str, StateSpec]
    """Its parameters as a rank has them."""
    collectives: tuple[StageCollective, ...]
    """Collectives inside of the segment."""
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
    sources: Mapping[str, str]
    """The op of the model that each of ``collectives`` belongs to: the name of its node begins with that."""

    def named(
        self, placement: FeaturePlacement, index: int, nodes: Mapping[str, str], state: Mapping[str, str]
    ) -> OnMesh:
        """Return the same of the segment ``index``, which is equal but for names and ranks.

        ``placement``: its own; ``nodes``, ``state``: its own names of the model's ops, parameters and buffers of this one.
        """
        mesh = placement.mesh
        written = {state[n]: p for n, p in self.placement.stored.items() if n in state}
        node_of = {node: nodes[source] + node.removeprefix(source) for node, source in self.sources.items()}

        def names(own: Sequence[str]) -> tuple[str, ...]:
            return tuple(state[name] for name in own)

        sent = tuple(replace(item, value=node_of[item.value]) for item in self.collectives)
        segment = replace(self.segment, index=index, ranks=mesh.ranks, collectives=collectives(sent, mesh))
        return OnMesh(
            placement=replace(placement, stored={**placement.stored, **written}),
            samples_multiple=self.samples_multiple,
            parameters={state[n]: replace(spec, name=state[n]) for n, spec in self.parameters.items()},
            collectives=sent,
            sums=tuple(replace(item, parameters=names(item.parameters)) for item in self.sums),
            summed_bytes={state[name]: size for name, size in self.summed_bytes.items()},
            gathers=tuple(replace(item, parameters=names(item.parameters)) for item in self.gathers),
            segment=segment,
            state={state[name]: held for name, held in self.state.items()},
            leaf_bytes=self.leaf_bytes,
            sources={node_of[node]: nodes[source] for node, source in self.sources.items()},
        )


def cost_on_mesh(
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
    segment, sent, backward = _segment(sharded, cluster, size, regions, deferring)
    summed_bytes = {
        name: gradient_bytes(sharded.graph, name, job.precision)
        for group in gradient_sums(sharded)
        for name in group.parameters
    }
    return OnMesh(
        placement=sharded.placement,
        samples_multiple=sharded.graph.batch.multiple,
        parameters=sharded.graph.parameters,
        collectives=sent,
        sums=gradient_sum_costs(sharded, summed_bytes, cluster, backward),
        summed_bytes=summed_bytes,
        gathers=update_gathers(graph, sharded, job.precision, cluster),
        segment=replace(segment, index=index),
        state=_state(sharded, job),
        leaf_bytes=_leaf_bytes(graph, sharded, job),
        sources={item.value: _source(sharded.graph, item.value) for item in sent},
    )


def _source(graph: OpGraph, name: str) -> str:
    """Return what a bridge, or several in a row, converts; the op itself for a local form."""
    node = graph.nodes[name]
    while is_bridge(node):
        node = node.all_input_nodes[0]
    return node.name


def allocations_on_mesh(
    sharded: ShardedGraph, cluster: ClusterSpec, size: int, regions: Sequence[Sequence[str]]
) -> Allocations:
    """List what a rank of a mesh allocates for ``size`` samples; ``regions`` as ``cost_on_mesh`` has them."""
    graph = sharded.graph
    units = size // graph.batch.multiple
    costs = _costs(graph, cluster.devices[sharded.mesh.ranks[0]].counted_as, units)
    index_of = {name: index for index, name in enumerate(costs.ops)}
    again = [[index_of[name] for name in names] for names in regions_on_shards(graph, regions)]
    outputs = {output.node for output in graph.outputs}
    return allocations(graph, costs, range(len(costs.ops)), units, outputs, again)


def _segment(
    sharded: ShardedGraph,
    cluster: ClusterSpec,
    microbatch_size: int,
    regions: Sequence[Sequence[str]],
    deferring: bool,
) -> tuple[Segment, tuple[StageCollective, ...], list[float]]:
    """Make the segment of a mesh, its ops on shards and its collectives; list these, and each op's seconds in backward.

    A block that is computed again repeats its collectives: they are backward's too.
    """
    graph = sharded.graph
    units = microbatch_size // graph.batch.multiple
    kind = cluster.devices[sharded.mesh.ranks[0]].counted_as
    costs = _costs(graph, kind, units)
    own = regions_on_shards(graph, regions)
    alone = replace(on_mesh(graph, sharded.mesh), regions=(own,) if own else ())
    (segment,) = segment_graph(graph, costs, alone, cluster, units, deferring=deferring).segments
    parameters = Ahead() if deferring else gathers_ahead(graph, own)
    once = priced(together(traffic(sharded, microbatch_size), parameters.steps), sharded.mesh, cluster)
    again = _computed_again(costs, own, deferring) if segment.has_backward else ()
    sent = once + repeated(once, again)
    seconds = {back: sum(item.seconds for item in sent if item.backward == back) for back in (0, 1)}
    hidden = 0.0 if deferring else _hidden_seconds(graph, costs, cluster, sharded.mesh, units, once, own)
    ahead = _hidden_ahead(parameters, costs, cluster, sharded.mesh, units, once, own)
    gathered_bytes = max((item.size_bytes for item in sent), default=0)
    input_seconds = max(0.0, segment.cost.backward_input_seconds - ahead.backward_seconds)
    left_seconds = ahead.backward_seconds - (segment.cost.backward_input_seconds - input_seconds)
    cost = replace(
        segment.cost,
        forward_seconds=max(0.0, segment.cost.forward_seconds - ahead.forward_seconds) + seconds[0],
        backward_input_seconds=max(0.0, segment.cost.backward_input_seconds - ahead.backward_seconds)
        + seconds[1],
        backward_weight_seconds=max(0.0, segment.cost.backward_weight_seconds - hidden - left_seconds),
        # The largest collective's result, while what it is made of is still there, beside what is computed again.
        transient_bytes=segment.cost.transient_bytes + gathered_bytes + ahead.backward_bytes,
        first_transient_bytes=segment.cost.first_transient_bytes + gathered_bytes + ahead.backward_bytes,
    )
    segment = replace(segment, cost=cost, collectives=collectives(sent, sharded.mesh))
    return segment, sent, _backward_seconds(costs, cluster, sharded.mesh, units, sent, own)


@once_per_graph
def _costs(graph: OpGraph, device_kind: str, units: int) -> GraphCosts:
    return cost_graph(graph, device_kind=device_kind, only_size=units)


def _backward_seconds(
    costs: GraphCosts,
    cluster: ClusterSpec,
    mesh: Mesh,
    units: int,
    sent: Sequence[StageCollective],
    regions: Sequence[Sequence[str]],
) -> list[float]:
    """Return the seconds of each op in backward, with its collectives; of a block that is computed again, the last op's
    include what is."""
    each = costs.seconds(units, cluster.devices[mesh.ranks[0]])
    seconds = dict(zip(costs.ops, (each.backward_input + each.backward_weight).tolist(), strict=True))
    last_of = {name: names[-1] for names in regions for name in names}
    again = _computed_again(costs, regions, deferring=False)
    for name, forward in zip(costs.ops, each.forward.tolist(), strict=True):
        if name in again:
            seconds[last_of[name]] += forward
    for item in sent:
        if item.backward:
            seconds[item.value] += item.seconds
    return list(seconds.values())


def _hidden_seconds(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    mesh: Mesh,
    units: int,
    sent: Sequence[StageCollective],
    regions: Sequence[Sequence[str]],
) -> float:
    """Return the seconds of weight gradients that are computed while sums of input gradients are under way."""
    beside = layers_beside(graph, regions)
    if not beside:
        return 0.0
    index_of = {name: index for index, name in enumerate(costs.ops)}
    devices = cluster.unlike(mesh.ranks)
    total = 0.0
    for item in sent:
        if item.backward and item.value in beside:
            layers = [index_of[name] for name in beside[item.value]]
            computing = max(costs.weight_gradient_seconds(layers, units, device) for device in devices)
            total += float(hidden_seconds(item.seconds, computing, cluster.contention(mesh.ranks)))
    return total


@dataclass(frozen=True)
class _HiddenAhead:
    """Seconds that are computed while collectives of parameters are under way; the most bytes of those beside backward."""

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    backward_bytes: int = 0


def _hidden_ahead(
    parameters: Ahead,
    costs: GraphCosts,
    cluster: ClusterSpec,
    mesh: Mesh,
    units: int,
    sent: Sequence[StageCollective],
    regions: Sequence[Sequence[str]],
) -> _HiddenAhead:
    there, back = ({item.value: item for item in sent if item.backward == way} for way in (False, True))
    index_of = {name: index for index, name in enumerate(costs.ops)}
    devices = cluster.unlike(mesh.ranks)
    hidden, most = [0.0, 0.0], 0
    again = {index_of[name] for name in _computed_again(costs, regions, deferring=False)}
    for beside in parameters.beside:
        during = [there[name] for name in beside.gathers if name in there]
        during += [back[name] for name in beside.sums if name in back]
        if not during:
            continue
        ops = [index_of[name] for name in beside.ops if name in index_of]
        computing = max(_computing(costs, ops, again, units, device, beside.backward) for device in devices)
        sending = sum(item.seconds for item in during)
        hidden[beside.backward] += float(hidden_seconds(sending, computing, cluster.contention(mesh.ranks)))
        if beside.backward:
            kept = sum(back[name].size_bytes for name in beside.held if name in back)
            most = max(most, kept + sum(item.size_bytes for item in during))
    return _HiddenAhead(hidden[0], hidden[1], most)


def _computing(
    costs: GraphCosts, ops: Sequence[int], again: Collection[int], units: int, device: Device, backward: bool
) -> float:
    """Return the seconds of ``ops`` forward or backward; in backward with those of them that run ``again``."""
    own = costs.segment_seconds(ops, units, device)
    if not backward:
        return own.forward
    second = costs.segment_seconds([op for op in ops if op in again], units, device)
    return own.backward_input + own.backward_weight + second.forward


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
