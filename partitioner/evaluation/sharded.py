"""Evaluation graphs of a plan whose ranks share its one stage: the same mesh, the same stored shards, another trace.

    planned: micro-batches of 4 samples, a multiple of 2 each        7 samples -> 4 2 shared, 1 by every rank alone

Ranks that share samples take a multiple of them. What is left of a batch runs in a second placement, in which no tensor is
split by samples. Both are made when first needed; without wanted outputs nobody gathers any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cost_models.layout import Replicate, Shard
from partitioner.batches.part_batch import DataPlace, data_place
from partitioner.record.data import PlanData
from partitioner.record.sharding import StageSharding
from passes.evaluate.graph import with_computed_outputs, without_outputs
from passes.evaluate.outputs import evaluation_outputs
from passes.evaluate.sharding import reuse_sharding
from passes.graph.graph import OpGraph
from passes.graph.token_counts import user_leaves
from passes.graph.verify import verify_graph
from passes.lower.lower import lower
from passes.lower.segment import on_mesh
from passes.shard.program import sharded_programs, sharded_segments
from passes.shard.shard import shard_graph
from passes.shard.words import FeaturePlacement, Placements
from runtime.check.check import check
from runtime.execute.execute import Executor
from runtime.execute.gather_outputs import OutputPlace
from runtime.execute.loaded import Loaded
from runtime.program.program import Program, SegmentCost
from runtime.program.relabel import RankMap
from runtime.state.rank_state import RankState


@dataclass(frozen=True)
class SharedStage:
    """The part that all evaluation graphs of a sharded plan share. ``placement``: training's, in ranks of the launch."""

    plan: PlanData
    training: OpGraph
    ranks: RankMap
    executor: Executor
    state: RankState
    placement: FeaturePlacement
    place: DataPlace
    """The part of a batch that this rank may have loaded."""

    @classmethod
    def of(
        cls, plan: PlanData, training: OpGraph, ranks: RankMap, executor: Executor, state: RankState
    ) -> SharedStage | None:
        """Make what the evaluation graphs share; None if no ranks share a stage."""
        found = _sharding_of(plan)
        if found is None:
            return None
        devices, sharding = found
        placement = sharding.placement(ranks.ranks(devices), plan.microbatches)
        return cls(plan, training, ranks, executor, state, placement, data_place(plan, training, executor))

    @property
    def multiple(self) -> int:
        """The number that samples of a micro-batch that ranks share are a multiple of."""
        return self.executor.batch_spec.multiple


def _sharding_of(plan: PlanData) -> tuple[tuple[int, ...], StageSharding] | None:
    return next(
        ((stage.devices, stage.sharding) for stage in plan.stages if stage.sharding is not None), None
    )


@dataclass(frozen=True)
class SharedGraph:
    """One evaluation graph on a mesh. ``graph``: the one that a single rank would run."""

    stage: SharedStage
    graph: OpGraph
    _loaded: dict[tuple[bool, bool], Loaded] = field(default_factory=dict)

    @classmethod
    def of(cls, stage: SharedStage, graph: OpGraph) -> SharedGraph:
        """Place ``graph``, traced in evaluation mode, without writes."""
        return cls(stage, with_computed_outputs(graph))

    @property
    def loaded(self) -> tuple[Loaded, ...]:
        """The programs that were made so far."""
        return tuple(self._loaded.values())

    @property
    def leaf_names(self) -> frozenset[str]:
        """Leaves of the batch that every rank reads."""
        spec = self.graph.batch
        sizes = {leaf for leaf, dim in spec.symbols.values() if spec.batch_dims.get(leaf) != dim}
        return frozenset({i.name for i in self.graph.inputs if i.kind == "batch"} | sizes)

    @property
    def places(self) -> tuple[OutputPlace, ...]:
        """The places of outputs: every rank has every output whole."""
        placed = evaluation_outputs(self.graph, on_mesh(self.graph, self.stage.placement.mesh), {})
        return tuple(replace(place, rank=None) for place in placed)

    def load(self, *, outputs: bool, shared: bool) -> Loaded:
        """Load the programs, code and groups to run it. Collective at the first call of each kind.

        ``shared``: true for micro-batches of multiples of ``stage.multiple`` samples, false for any number of samples.
        """
        if (outputs, shared) not in self._loaded:
            self._loaded[outputs, shared] = self._made(outputs, shared)
        return self._loaded[outputs, shared]

    def _made(self, outputs: bool, shared: bool) -> Loaded:
        stage, executor, state = self.stage, self.stage.executor, self.stage.state
        graph = self.graph if outputs else without_outputs(self.graph)
        unit = stage.multiple if shared else 1
        placement = reuse_sharding(
            stage.training, stage.placement, graph, self._stored(), self._arrivals() if shared else {}, unit
        )
        sharded = shard_graph(graph, placement, unit)
        verify_graph(sharded.graph, after="reuse_sharding")
        segments = sharded_segments(sharded, SegmentCost(0.0, 0.0, 0.0), stage.ranks.world_size)

        def programs_of(microbatches: int) -> Sequence[Program]:
            programs = sharded_programs(sharded, microbatches, segments.world_size, training=False)
            check(programs, segments, microbatches, training=False)
            return programs

        programs = programs_of(stage.plan.microbatches)
        names = (*sharded.graph.parameters, *sharded.graph.buffers)
        constants = {name: constant.to(executor.device) for name, constant in graph.constants.items()}
        return executor.load(
            programs[state.rank],
            lower(sharded.graph, on_mesh(sharded.graph, sharded.mesh), device=str(executor.device)),
            segments,
            {**{name: state.leaves[name] for name in names if name in state.leaves}, **constants},
            sharded.graph.batch,
            programs=programs,
            replan=programs_of,
        )

    def _stored(self) -> dict[str, Placements]:
        """Return the layouts in which training keeps parameters and buffers."""
        return {name: sharding.leaf for name, sharding in self.stage.state.shardings.items()}

    def _arrivals(self) -> Mapping[str, Placements]:
        """Return the layouts in which leaves arrive: in parts as in training, also those that training does not read."""
        spec, now, mesh = self.stage.training.batch, self.graph.batch, self.stage.placement.mesh
        user = user_leaves(now, self.graph.token_counts).batch_dims
        found = {
            name: placements
            for name, placements in self.stage.executor.batch_spec.placements.items()
            if user.get(name, -1) == spec.batch_dims[name]
        }
        if self.stage.place.world > 1:
            for name, dim in user.items():
                if dim is not None:
                    axes = range(len(mesh.shape))
                    found[name] = tuple(
                        Shard(dim) if a in self.stage.place.axes else Replicate() for a in axes
                    )
        return found
