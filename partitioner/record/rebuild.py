"""The way from a saved plan back to programs: the same ones that were predicted and proved.

The plan holds the stages' costs and what crosses between them, so programs are rebuilt and proved again without the
model; the model is needed for the code of the segments only.

Everything is numbered by the plan's devices, for the simulator, or with ``ranks`` by the ranks of a launch
(``runtime.program.relabel``), for whoever runs it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import fields, replace

from cost_models.errors import PlanError, UsageError
from partitioner.record.data import PlanData
from partitioner.record.rebuild_checks import refuse_wrong_stages
from partitioner.record.records import Stage
from passes.graph.blocks import GATHERS, SELECTIVE, block_of
from passes.graph.graph import OpGraph, once_per_graph
from passes.lower.crossing import Extent, Side, crossing_value
from passes.lower.placed_graph import PlacedGraph, on_meshes
from passes.lower.segment import Segmentation, by_stage
from passes.lower.step import StepCosts, SumCost, left_beside, programs_for, simulate_step, sums_with_costs
from passes.shard.discover import Discovery
from passes.shard.sent import collectives, gather_collectives
from passes.shard.words import FeaturePlacement, choice_text
from passes.split.split import Split, split_neurons
from runtime.check.check import check
from runtime.check.quotient import check_groups, some_of_each
from runtime.program.members import GroupPrograms
from runtime.program.program import Program, Segment, SegmentCost, SegmentGraph, TiedGroup, Value
from runtime.program.relabel import RankMap, relabelled_programs, relabelled_segments
from runtime.simulate.simulation import Simulation


def ranks_in_order(plan: PlanData) -> RankMap:
    """Let rank r play the r-th device that the plan uses: for local processes, and launches that name no hosts."""
    return RankMap(plan.used_devices)


def plan_segments(plan: PlanData, ranks: RankMap | None = None) -> SegmentGraph:
    """Return the plan's DAG of segments, with the costs it was predicted from."""
    values = tuple(_values(plan))
    graph = SegmentGraph(_segments(plan), values, plan.cluster.world_size)
    return graph if ranks is None else relabelled_segments(graph, ranks)


def _segments(plan: PlanData) -> tuple[Segment, ...]:
    return tuple(
        Segment(
            index,
            tuple(stage.devices),
            SegmentCost(**{field.name: getattr(stage, field.name) for field in fields(SegmentCost)}),
            stage.has_backward,
            ()
            if stage.sharding is None
            else tuple(collectives(stage.sharding.collectives, stage.sharding.mesh(stage.devices))),
        )
        for index, stage in enumerate(plan.stages)
    )


def _values(plan: PlanData) -> Iterator[Value]:
    """Yield what crosses between stages, with the pieces between groups of several devices."""
    if all(stage.sharding is None for stage in plan.stages):
        yield from (Value(v.name, v.producer, v.consumers, v.size_bytes, v.needs_grad) for v in plan.values)
        return
    placements = stage_placements(plan)
    for v in plan.values:
        ends = (v.producer, *v.consumers)
        sides = {s: Side.of(placements.get(s), plan.stages[s].devices, v.name) for s in ends}
        extent = Extent(v.shape, v.element_bytes)
        yield crossing_value(v.name, v.producer, v.consumers, v.needs_grad, extent, sides, plan.cluster)


def plan_tied(plan: PlanData, ranks: RankMap | None = None) -> tuple[TiedGroup, ...]:
    """Return the plan's sums of gradients: tied parameters, one group per set of ranks, and what sharded stages sum."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for tied in plan.tied:
        holders = tied.ranks if ranks is None else tuple(sorted(ranks.ranks(tied.ranks)))
        groups.setdefault(holders, []).append(tied.name)
    sums = (group for group, _ in _sums(plan, ranks))
    return (*(TiedGroup(tuple(names), holders) for holders, names in groups.items()), *sums)


def _sums(plan: PlanData, ranks: RankMap | None) -> Iterator[tuple[TiedGroup, SumCost]]:
    """Yield every sharded stage's sums of gradients, for each group of ranks that makes them."""
    for index, stage in enumerate(plan.stages):
        if stage.sharding is not None:
            yield from sums_with_costs(index, stage.sharding.sums, stage.sharding.mesh(_group(stage, ranks)))


def plan_programs(plan: PlanData, ranks: RankMap | None = None) -> tuple[Program, ...]:
    """Make one program per rank, proved free of deadlock before anybody runs it."""
    programs = group_programs(plan).all()
    if ranks is not None:
        programs = relabelled_programs(programs, ranks)
    segments, tied = plan_segments(plan, ranks), plan_tied(plan, ranks)
    check(programs, segments, plan.microbatches, tied=tied, one_queue=plan.one_queue)
    return programs


def group_programs(plan: PlanData) -> GroupPrograms:
    """Make one program per group of ranks; not proved yet."""
    return programs_for(
        plan_segments(plan),
        plan.cluster,
        plan.schedule,
        plan.microbatches,
        plan_tied(plan),
        left_bytes=left_beside(_state_bytes(plan), plan.room_bytes),
        one_queue=plan.one_queue,
    )


def proved_programs(plan: PlanData) -> GroupPrograms:
    """Make one program per group of ranks, proved free of deadlock."""
    groups = group_programs(plan)
    check_groups(
        groups.programs, groups.graph, plan.microbatches, member=groups.member, members=some_of_each(groups.graph),
        tied=plan_tied(plan), one_queue=plan.one_queue,
    )  # fmt: skip
    return groups


def at_costs_of(plan: PlanData, groups: GroupPrograms) -> GroupPrograms:
    """Return the same programs with the costs of ``plan``'s stages, which has the same stages on the same devices."""
    return replace(groups, graph=replace(groups.graph, segments=_segments(plan)))


def simulate_plan(plan: PlanData, groups: GroupPrograms | None = None) -> Simulation:
    """Simulate one training step of the plan. ``groups``: its programs where they are known already."""
    groups = proved_programs(plan) if groups is None else groups
    ranks = [str(rank) for rank in range(plan.cluster.world_size)]
    step = StepCosts(
        state_bytes=_state_bytes(plan),
        optimizer_seconds=tuple(plan.optimizer_seconds[rank] for rank in ranks),
        update_bytes=tuple(plan.update_bytes.get(rank, 0) for rank in ranks),
        tied_bytes={tied.name: tied.size_bytes for tied in plan.tied},
        sums={(group.parameters, tuple(sorted(group.ranks))): cost for group, cost in _sums(plan, None)},
        gathers=tuple(
            gather
            for stage in plan.stages
            if stage.sharding is not None
            for gather in gather_collectives(stage.sharding.gathers, stage.sharding.mesh(stage.devices))
        ),
        allocator_bytes=tuple(plan.prediction.beside_tensors.get("allocator", {}).values()),
    )
    sizes = plan.microbatch_sizes
    return simulate_step(groups, plan.cluster, step, sizes)


def _state_bytes(plan: PlanData) -> tuple[int, ...]:
    """Return the bytes of state by rank of the cluster."""
    return tuple(plan.state_bytes[str(rank)] for rank in range(plan.cluster.world_size))


def plan_code(
    plan: PlanData, graph: OpGraph, ranks: RankMap | None = None, *, run: OpGraph | None = None
) -> PlacedGraph:
    """Return the plan's segments of ``graph``. Raises PlanError when the plan is for another model.

    ``run``: the same ops with other data types or numbers among their arguments, to run instead.
    """
    refuse_other_model(plan, graph)
    planned, graph = split_graph(plan, graph), split_graph(plan, run or graph)
    placements = stage_placements(plan, ranks)
    for index, placement in placements.items():
        refuse_wrong_choices(plan.model.name, planned, plan.stages[index].ops, placement)
    refuse_wrong_stages(plan, planned)
    return on_meshes(graph, _segmentation(plan, graph, ranks), placements)


def stage_placements(plan: PlanData, ranks: RankMap | None = None) -> dict[int, FeaturePlacement]:
    """Return, by its number, how each stage runs that several devices share."""
    return {
        index: stage.sharding.placement(_group(stage, ranks), plan.microbatches)
        for index, stage in enumerate(plan.stages)
        if stage.sharding is not None
    }


def _group(stage: Stage, ranks: RankMap | None) -> tuple[int, ...]:
    """Return the devices of a stage, or the ranks that play them."""
    return stage.devices if ranks is None else ranks.ranks(stage.devices)


def split_graph(plan: PlanData, graph: OpGraph) -> OpGraph:
    """Return ``graph`` with the ops in blocks that the plan runs in blocks; split once per graph and plan."""
    if not plan.splits:
        return graph
    try:
        return _in_blocks(graph, plan.splits)
    except UsageError as error:
        raise PlanError(
            f"the plan for {plan.model.name} splits ops in ways that {graph.model_name} cannot be split",
            error.because,
            ["plan this model anew; plans are not meant to be edited"],
        ) from error


@once_per_graph
def _in_blocks(graph: OpGraph, splits: tuple[Split, ...]) -> OpGraph:
    return split_neurons(graph, splits)


def refuse_wrong_choices(
    model: str, graph: OpGraph, ops: Collection[str], placement: FeaturePlacement
) -> None:
    """Raise PlanError where one of ``ops`` would run in a way that no rule or trial allows: its numbers would be wrong."""
    discovery = Discovery.stored()
    here, wrong = {*ops, *placement.choices}, []
    for node in graph.ops:
        if node.name not in here:
            continue
        given = placement.choices.get(node.name, ())
        if not discovery.allows(node, given):
            wrong.append(f"{node.name} ({node.target}): {'; '.join(map(choice_text, given))}")
    if wrong:
        raise PlanError(
            f"the plan for {model} runs {len(wrong)} ops in ways that would give other numbers",
            because=wrong[:5],
            suggestions=["plan this model anew; plans are not meant to be edited"],
        )


def _segmentation(plan: PlanData, graph: OpGraph, ranks: RankMap | None) -> Segmentation:
    """Return the ops of ``graph`` that each of the plan's segments runs, and its group."""
    stage_of = {op: index for index, stage in enumerate(plan.stages) for op in stage.ops}
    groups = [_group(stage, ranks) for stage in plan.stages]
    known = frozenset((GATHERS, SELECTIVE, *block_of(graph).values()))
    missing = sorted({name for stage in plan.stages for name in stage.recomputed_blocks} - known)
    if missing:
        raise PlanError(
            f"the plan for {plan.model.name} recomputes blocks that {graph.model_name} does not have",
            because=[f"{name} is no block of the model" for name in missing[:3]],
            suggestions=["plan this model anew"],
        )
    blocks = [stage.recomputed_blocks for stage in plan.stages]
    meshes = [
        None if stage.sharding is None else stage.sharding.mesh(group)
        for stage, group in zip(plan.stages, groups, strict=True)
    ]
    return by_stage(graph, stage_of, groups, frozenset(plan.recomputed), blocks, meshes)


def refuse_other_model(plan: PlanData, graph: OpGraph) -> None:
    """Raise PlanError listing how ``graph`` differs from the model the plan was made for."""
    planned = set(plan.placements) | set(plan.recomputed)
    differences = []
    same = graph.fingerprint == plan.model.fingerprint
    # Another model need not have the ops that are split, so its ops cannot be compared then.
    traced = {node.name for node in split_graph(plan, graph).ops} if same or not plan.splits else planned
    missing, extra = sorted(planned - traced), sorted(traced - planned)
    if missing:
        differences.append(
            f"{len(missing)} planned ops are not in the model, such as {', '.join(missing[:3])}"
        )
    if extra:
        differences.append(
            f"{len(extra)} ops of the model are not in the plan, such as {', '.join(extra[:3])}"
        )
    if graph.loss_reduction != plan.loss_reduction:
        differences.append(
            f"the loss is traced with loss_reduction={graph.loss_reduction!r}, planned with {plan.loss_reduction!r}"
        )
    if not same:
        differences.append(
            f"fingerprint {graph.fingerprint[:12]} differs from the plan's {plan.model.fingerprint[:12]} "
            "(ops, shapes, data types and parameter names count)"
        )
        parameters = sum(math.prod(spec.shape) for spec in graph.parameters.values())
        if parameters != plan.model.parameters:
            differences.append(
                f"the model has {parameters:,} parameters, the plan's {plan.model.parameters:,}"
            )
    if differences:
        raise PlanError(
            f"the plan for {plan.model.name} does not fit {graph.model_name}",
            because=differences,
            suggestions=["plan this model anew", "give the model, sequence length and data type of the plan"],
        )
