"""Evaluation graphs where training is: every stage on its group of ranks, with the shards that these hold.

    planned: micro-batches of 4 samples, a multiple of 2 each        7 samples -> 4 2 shared, 1 by every rank alone

Ranks that share samples take a multiple of them. What is left of a batch runs in a second placement, in which no tensor is
split by samples; without wanted outputs nobody gathers any. Each of these is made when it is first needed. Where every
stage has one rank there is a single one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from cost_models.cluster import ClusterSpec
from cost_models.errors import InternalError
from cost_models.layout import Mesh, Replicate, Shard
from partitioner.batches.part_batch import DataPlace
from partitioner.evaluation.parts import reuse_splits
from partitioner.evaluation.placement import reuse_placement, with_computed_outputs, without_outputs
from partitioner.evaluation.sharding import reuse_interfaces, reuse_sharding
from partitioner.models.workload import Workload
from partitioner.record.data import PlanData
from partitioner.record.rebuild import stage_placements
from passes.graph.graph import OpGraph, tensor_specs
from passes.graph.part import part_of
from passes.graph.token_counts import user_leaves
from passes.graph.verify import verify_graph
from passes.lower.crossing import Crossings
from passes.lower.lower import crossing_values
from passes.lower.placed_graph import PlacedGraph, alone
from passes.lower.segment import Segmentation
from passes.lower.step import transfer_seconds
from passes.lower.summarize import ops_by_segment
from passes.shard.shard import shard_graph
from passes.shard.words import FeaturePlacement, Placements
from passes.split.split import Split
from runtime.check.check import check
from runtime.execute.context import RankProgram
from runtime.execute.execute import Executor
from runtime.execute.gather_outputs import Joining, OutputPlace
from runtime.execute.loaded import Loaded
from runtime.program.order import build_group_programs
from runtime.program.program import Program, Segment, SegmentCost, SegmentGraph
from runtime.program.relabel import RankMap, relabelled_programs, relabelled_segments
from runtime.schedules import inference_order
from runtime.segment.code import TensorSpec
from runtime.segment.microbatch import microbatch_sizes
from runtime.state.rank_state import RankState


def evaluation_outputs(
    graph: OpGraph, segmentation: Segmentation, holders: Mapping[str, Sequence[int]]
) -> tuple[OutputPlace, ...]:
    """List every output of the model, without the loss and metrics, in its order: who computes each, how parts join.

    ``holders``: ranks that hold each parameter and buffer, numbered as in ``segmentation``.
    """
    names: dict[str, list[str]] = {}
    for output in graph.outputs:
        if output.kind == "output":
            names.setdefault(output.node, []).append(output.name)
    of_samples = _of_samples(graph)
    places = []
    for node, called in names.items():
        specs = tensor_specs(graph.nodes[node])
        if len(specs) != 1:
            raise InternalError(f"evaluation: output {called[0]} is not one tensor")
        placeholder = graph.input_of.get(node)
        if placeholder is None:
            joining, dim = _joining(graph, specs[0], node in of_samples)
            rank = segmentation.ranks[segmentation.segment_of[node]][0]
            places.append(OutputPlace(tuple(called), specs[0], joining, dim, rank))
            continue
        joining, dim = _joining(graph, specs[0], of_samples=False)
        if placeholder.kind == "batch":
            holder = _reader(graph, segmentation, node)
        else:
            holder = min(holders.get(placeholder.name, ()), default=None)
        places.append(OutputPlace(tuple(called), specs[0], joining, dim, holder, placeholder.name))
    return tuple(places)


def _joining(graph: OpGraph, spec: TensorSpec, of_samples: bool) -> tuple[Joining, int]:
    symbol = graph.batch.batch_symbol
    dims = [d for d, size in enumerate(spec.shape) if not isinstance(size, int) and size.has(symbol)]
    if len(dims) > 1:
        return "refuse", dims[0]
    if dims:
        return "concatenate", dims[0]
    return ("stack" if of_samples else "same"), 0


def _reader(graph: OpGraph, segmentation: Segmentation, leaf: str) -> int | None:
    """Return the first rank whose segments read a leaf of the batch: it has the leaf, others may not."""
    readers = (segmentation.segment_of.get(user.name) for user in graph.nodes[leaf].users)
    return min((segmentation.ranks[index][0] for index in readers if index is not None), default=None)


def _of_samples(graph: OpGraph) -> frozenset[str]:
    """Name the nodes that read a batch leaf with a batch dimension, themselves or through others."""
    found = {
        i.node for i in graph.inputs if i.kind == "batch" and graph.batch.batch_dims.get(i.name) is not None
    }
    for node in graph.ops:
        if any(source.name in found for source in node.all_input_nodes):
            found.add(node.name)
    return frozenset(found)


@dataclass(frozen=True)
class Deployed:
    """The deployed model on this rank: everything that evaluation graphs are made from."""

    plan: PlanData
    workload: Workload
    """The model, the batch that training was traced with, and the loss."""
    dynamic_dims: Mapping[str, list[int]] | None
    training: OpGraph
    run: OpGraph
    """The graph that ranks run of ``training``: if ops were split, with their blocks."""
    ranks: RankMap
    executor: Executor
    state: RankState
    place: DataPlace
    """The part of a batch that this rank may have loaded."""

    @cached_property
    def placements(self) -> dict[int, FeaturePlacement]:
        """Stage -> how training runs it, one alone as on a mesh of its own; empty where every stage has one rank."""
        found = stage_placements(self.plan)
        return {i: found.get(i, alone(s.devices[0])) for i, s in enumerate(self.plan.stages)} if found else {}

    @property
    def multiple(self) -> int:
        """The number that samples of a micro-batch are a multiple of, for ranks that share it."""
        return self.executor.batch_spec.multiple


@dataclass(frozen=True)
class PlacedEvaluation:
    """One evaluation graph on the plan's stages, and what was loaded of it so far."""

    deployed: Deployed
    graph: OpGraph
    """The graph as one rank would run it."""
    segmentation: Segmentation
    """Its segments, on the devices of the plan."""
    _loaded: dict[tuple[bool, bool], Loaded] = field(default_factory=dict)

    @classmethod
    def of(cls, deployed: Deployed, graph: OpGraph) -> PlacedEvaluation:
        """Place ``graph``, which is traced in evaluation mode, without writes."""
        splits = [Split(record.op, record.dim, record.sizes) for record in deployed.plan.splits]
        graph = reuse_splits(graph, deployed.training, deployed.run, splits)
        placed = _placed(deployed, with_computed_outputs(graph) if deployed.placements else graph)
        return cls(deployed, placed.graph, placed.segmentation)

    @property
    def loaded(self) -> tuple[Loaded, ...]:
        """The programs that are in the executor by now."""
        return tuple(self._loaded.values())

    @cached_property
    def leaf_names(self) -> frozenset[str]:
        """The leaves of a batch that this rank cannot do without."""
        spec = self.graph.batch
        read = {
            given.name
            for index in self._mine(_launched(self.deployed, self.segmentation))
            for number in ops_by_segment(self.graph, self.segmentation)[index]
            for source in self.graph.ops[number].all_input_nodes
            if (given := self.graph.input_of.get(source.name)) is not None and given.kind == "batch"
        }
        sizes = {leaf for leaf, dim in spec.symbols.values() if spec.batch_dims.get(leaf) != dim}
        return frozenset(read | sizes)

    @cached_property
    def places(self) -> tuple[OutputPlace, ...]:
        """The model's outputs: the first rank of the group that computes one has it, or every rank if all compute it."""
        segmentation = _launched(self.deployed, self.segmentation)
        world = self.deployed.ranks.world_size
        by_all = {
            ranks[0]
            for index, ranks in enumerate(segmentation.ranks)
            if segmentation.mesh_of(index) is not None and len(ranks) == world
        }
        placed = evaluation_outputs(self.graph, segmentation, self.deployed.state.holders)
        return tuple(replace(place, rank=None) if place.rank in by_all else place for place in placed)

    def load(self, *, outputs: bool, shared: bool) -> Loaded:
        """Load what runs it: programs, code and groups. Collective at the first call of each kind.

        ``outputs``: for people too. ``shared``: for micro-batches of multiples of ``Deployed.multiple`` samples, else for
        any number of them. Without a mesh there is one kind.
        """
        on_mesh = bool(self.deployed.placements)
        kind = (outputs or not on_mesh, shared and on_mesh)
        if kind not in self._loaded:
            self._loaded[kind] = self._made(*kind)
        return self._loaded[kind]

    def _made(self, outputs: bool, shared: bool) -> Loaded:
        deployed, plan, ranks = self.deployed, self.deployed.plan, self.deployed.ranks
        executor, state = deployed.executor, deployed.state
        graph, segmentation = self.graph, self.segmentation
        if not outputs:
            placed = _placed(deployed, without_outputs(graph))
            graph, segmentation = placed.graph, placed.segmentation
        sizes = microbatch_sizes(plan.batch_size, plan.microbatches, deployed.multiple)
        op_seconds = sum(stage.forward_seconds for stage in plan.stages) / max(1, plan.model.ops)
        on_stages = self._on_stages(graph, segmentation, deployed.multiple if shared else 1)
        planned = inference_segments(graph, segmentation, on_stages, plan.cluster, sizes[0], op_seconds)
        segments = relabelled_segments(planned, ranks)

        def programs_of(microbatches: int) -> Sequence[Program]:
            own = inference_programs(planned, plan.cluster, microbatches, one_queue=plan.one_queue)
            programs = relabelled_programs(own, ranks)
            check(programs, segments, microbatches, training=False, one_queue=plan.one_queue)
            return programs

        programs = programs_of(plan.microbatches)
        launched = self._sharded(graph, _launched(deployed, segmentation), on_stages, shared)
        names = (*graph.parameters, *graph.buffers)
        constants = {name: constant.to(executor.device) for name, constant in graph.constants.items()}
        return executor.load(
            RankProgram(
                programs,
                state.rank,
                launched.lowered(device=str(executor.device), only=self._mine(launched.segmentation)),
                segments,
                {**{name: state.leaves[name] for name in names if name in state.leaves}, **constants},
                launched.batch_of(state.rank),
                replan=programs_of,
            )
        )

    def _mine(self, launched: Segmentation) -> frozenset[int]:
        """Return the segments that this rank runs."""
        rank = self.deployed.state.rank
        return frozenset(index for index, ranks in enumerate(launched.ranks) if rank in ranks)

    def _on_stages(
        self, graph: OpGraph, segmentation: Segmentation, unit: int
    ) -> dict[int, FeaturePlacement]:
        """Return, by segment, how training runs its group, with the values of ``graph``; nothing without any mesh."""
        known, found = self.deployed.placements.values(), {}
        crossing = crossing_values(graph, segmentation)
        for index in range(len(segmentation) if known else 0):
            own = [placement for placement in known if placement.mesh == segmentation.mesh_of(index)]
            together = replace(
                own[0],
                choices={op: ways for placement in own for op, ways in placement.choices.items()},
                values={name: layout for placement in own for name, layout in placement.values.items()},
            )
            values = reuse_interfaces(self.deployed.training, graph, crossing, together, unit)
            found[index] = replace(together, values=values)
        return found

    def _sharded(
        self,
        graph: OpGraph,
        launched: Segmentation,
        on_stages: Mapping[int, FeaturePlacement],
        shared: bool,
    ) -> PlacedGraph:
        """Shard this rank's segments on meshes as training has them."""
        deployed, members = self.deployed, ops_by_segment(graph, launched)
        unit = deployed.multiple if shared else 1
        stored = {name: sharding.leaf for name, sharding in deployed.state.shardings.items()}
        arrivals = self._arrivals(graph) if shared else {}
        to_ranks = {i: replace(p, mesh=_on_ranks(p.mesh, deployed.ranks)) for i, p in on_stages.items()}
        sharded = {}
        for index in sorted(self._mine(launched) & to_ranks.keys()):
            part = part_of(graph, [graph.ops[n].name for n in members[index]], launched.recomputed)
            own = to_ranks[index]
            placement = reuse_sharding(
                deployed.training, own, part, stored, arrivals, unit, graph, own.values
            )
            sharded[index] = shard_graph(part, placement, unit)
            verify_graph(sharded[index].graph, after="reuse_sharding")
        return PlacedGraph(graph, launched, sharded, to_ranks)

    def _arrivals(self, graph: OpGraph) -> Mapping[str, Placements]:
        """Return how leaves arrive: in parts as in training, also those that training does not read, if all of them do."""
        deployed, spec = self.deployed, self.deployed.executor.batch_spec
        user = user_leaves(graph.batch, graph.token_counts).batch_dims
        found = {
            name: placements
            for name, placements in spec.placements.items()
            if user.get(name, -1) == deployed.training.batch.batch_dims[name]
        }
        if spec.mesh is not None and deployed.place.world > 1:
            axes = range(len(spec.mesh.shape))
            for name, dim in user.items():
                if dim is not None:
                    found[name] = tuple(
                        Shard(dim) if axis in deployed.place.axes else Replicate() for axis in axes
                    )
        return found


def _placed(deployed: Deployed, graph: OpGraph) -> PlacedGraph:
    """Place an evaluation graph where training is, its segments on the devices of the plan."""
    plan = deployed.plan
    stage_of = {op: index for index, stage in enumerate(plan.stages) for op in stage.ops}
    devices = deployed.ranks.device_of_rank
    holders = {name: {devices[rank] for rank in ranks} for name, ranks in deployed.state.holders.items()}
    groups = [stage.devices for stage in plan.stages]
    meshes = [deployed.placements[i].mesh if deployed.placements else None for i in range(len(groups))]
    placed = reuse_placement(deployed.run, stage_of, graph, groups, holders, meshes)
    verify_graph(placed.graph, after="reuse_placement")
    return placed


def _launched(deployed: Deployed, segmentation: Segmentation) -> Segmentation:
    """Return the same segments on the ranks of the launch."""
    ranks = deployed.ranks
    return replace(
        segmentation,
        ranks=tuple(map(ranks.ranks, segmentation.ranks)),
        meshes=tuple(None if mesh is None else _on_ranks(mesh, ranks) for mesh in segmentation.meshes),
    )


def _on_ranks(mesh: Mesh, ranks: RankMap) -> Mesh:
    return replace(mesh, ranks=ranks.ranks(mesh.ranks))


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
