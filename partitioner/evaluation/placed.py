"""Evaluation graphs where training is: every stage on its group of ranks, with the shards that these hold.

    planned: micro-batches of 4 samples, a multiple of 2 each        7 samples -> 4 2 shared, 1 by every rank alone

Ranks that share samples take a multiple of them. What is left of a batch runs in a second placement, in which no tensor is
split by samples; without wanted outputs nobody gathers any. Each of these is made when it is first needed. Where every
stage has one rank there is a single one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from cost_models.layout import Replicate, Shard
from partitioner.batches.part_batch import DataPlace, data_place
from partitioner.models.workload import Workload
from partitioner.record.data import PlanData
from partitioner.record.rebuild import stage_placements
from passes.evaluate.graph import with_computed_outputs, without_outputs
from passes.evaluate.outputs import evaluation_outputs
from passes.evaluate.parts import reuse_splits
from passes.evaluate.placement import reuse_placement
from passes.evaluate.programs import inference_programs, inference_segments
from passes.evaluate.sharding import reuse_sharding
from passes.graph.graph import OpGraph
from passes.graph.part import part_of
from passes.graph.token_counts import user_leaves
from passes.graph.verify import verify_graph
from passes.lower.placed_graph import PlacedGraph, on_meshes
from passes.lower.segment import Segmentation
from passes.lower.summarize import ops_by_segment
from passes.shard.words import FeaturePlacement, Placements
from passes.split.split import Split
from runtime.check.check import check
from runtime.execute.execute import Executor
from runtime.execute.gather_outputs import OutputPlace
from runtime.execute.loaded import Loaded
from runtime.program.program import Program
from runtime.program.relabel import RankMap, relabelled_programs, relabelled_segments
from runtime.segment.microbatch import microbatch_sizes
from runtime.state.rank_state import RankState


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

    @cached_property
    def placements(self) -> dict[int, FeaturePlacement]:
        """Stage -> how training runs it on its mesh, in ranks of the launch; without stages of one rank."""
        return stage_placements(self.plan, self.ranks)

    @cached_property
    def place(self) -> DataPlace:
        """The part of a batch that this rank may have loaded."""
        return data_place(self.plan, self.training, self.executor)

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
        planned = inference_segments(graph, segmentation, plan.cluster.world_size, sizes[0], op_seconds)
        segments = relabelled_segments(planned, ranks)

        def programs_of(microbatches: int) -> Sequence[Program]:
            programs = relabelled_programs(inference_programs(planned, plan.cluster, microbatches), ranks)
            check(programs, segments, microbatches, training=False)
            return programs

        programs = programs_of(plan.microbatches)
        launched = self._sharded(graph, _launched(deployed, segmentation), shared)
        names = (*graph.parameters, *graph.buffers)
        constants = {name: constant.to(executor.device) for name, constant in graph.constants.items()}
        return executor.load(
            programs[state.rank],
            launched.lowered(device=str(executor.device), only=self._mine(launched.segmentation)),
            segments,
            {**{name: state.leaves[name] for name in names if name in state.leaves}, **constants},
            launched.batch_of(state.rank),
            programs=programs,
            replan=programs_of,
        )

    def _mine(self, launched: Segmentation) -> frozenset[int]:
        """Return the segments that this rank runs."""
        rank = self.deployed.state.rank
        return frozenset(index for index, ranks in enumerate(launched.ranks) if rank in ranks)

    def _sharded(self, graph: OpGraph, launched: Segmentation, shared: bool) -> PlacedGraph:
        """Shard this rank's segments on meshes as training has them."""
        deployed, members = self.deployed, ops_by_segment(graph, launched)
        unit = deployed.multiple if shared else 1
        stored = {name: sharding.leaf for name, sharding in deployed.state.shardings.items()}
        arrivals = self._arrivals(graph) if shared else {}
        placements = {}
        for index in sorted(self._mine(launched)):
            mesh = launched.mesh_of(index)
            if mesh is None:
                continue
            own = [placement for placement in deployed.placements.values() if placement.mesh == mesh]
            choices = {op: ways for placement in own for op, ways in placement.choices.items()}
            part = part_of(graph, [graph.ops[n].name for n in members[index]], launched.recomputed)
            placements[index] = reuse_sharding(
                deployed.training, replace(own[0], choices=choices), part, stored, arrivals, unit, graph
            )
        placed = on_meshes(graph, launched, placements, unit)
        for sharded in placed.sharded.values():
            verify_graph(sharded.graph, after="reuse_sharding")
        return placed

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
    meshes = [None if s.sharding is None else s.sharding.mesh(s.devices) for s in plan.stages]
    placed = reuse_placement(deployed.run, stage_of, graph, groups, holders, meshes)
    verify_graph(placed.graph, after="reuse_placement")
    return placed


def _launched(deployed: Deployed, segmentation: Segmentation) -> Segmentation:
    """Return the same segments on the ranks of the launch."""
    ranks = deployed.ranks
    return replace(
        segmentation,
        ranks=tuple(map(ranks.ranks, segmentation.ranks)),
        meshes=tuple(
            None if mesh is None else replace(mesh, ranks=ranks.ranks(mesh.ranks))
            for mesh in segmentation.meshes
        ),
    )
