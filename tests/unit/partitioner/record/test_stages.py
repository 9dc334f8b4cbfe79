"""Plans of several sharded stages, rebuilt: groups, collectives, sums and costs of every one of them."""

from __future__ import annotations

import pytest

from cost_models.cluster import ClusterSpec
from partitioner.record.checks import inconsistencies
from partitioner.record.rebuild import (
    plan_programs,
    plan_segments,
    plan_tied,
    simulate_plan,
    stage_placements,
)
from partitioner.record.records import TiedParameter
from runtime.program.program import Forward, OptimizerStep, ReduceGradients
from runtime.program.relabel import RankMap
from tests.support.made_plans import MIB, made_hybrid_plan

CLUSTER = ClusterSpec.parse("A100-40GB:7")
PLAN = made_hybrid_plan(CLUSTER, ({"outer": 2, "inner": 2}, {"all": 2}, {}))
TIED = TiedParameter(name="wte", ranks=(0, 1, 2, 3, 6), size_bytes=MIB)


def test_every_stage_is_a_segment_on_its_group() -> None:
    segments = plan_segments(PLAN).segments
    assert [segment.ranks for segment in segments] == [(0, 1, 2, 3), (4, 5), (6,)]
    for segment, groups in zip(segments, ({(0, 1), (2, 3)}, {(4, 5)}, set()), strict=True):
        assert {ranks for own in segment.collectives for ranks in own.groups} == groups
        assert len(segment.collectives) == 4 * bool(groups)  # two blocks, forward and backward


def test_sums_of_every_stage_and_of_tied_parameters() -> None:
    first, *others = plan_tied(PLAN)
    assert (first.ranks, first.scattered) == ((0, 2), True)
    assert [group.ranks for group in others] == [(1, 3)]
    tied, *sums = plan_tied(PLAN.model_copy(update={"tied": (TIED,)}))
    assert (tied.parameters, tied.ranks) == (("wte",), TIED.ranks)
    assert sums == [first, *others]


def test_ranks_of_a_launch_take_the_places_of_devices() -> None:
    ranks = RankMap((6, 5, 4, 3, 2, 1, 0))
    assert [segment.ranks for segment in plan_segments(PLAN, ranks).segments] == [(6, 5, 4, 3), (2, 1), (0,)]
    assert [group.ranks for group in plan_tied(PLAN, ranks)] == [(6, 4), (5, 3)]
    placements = stage_placements(PLAN, ranks)
    assert {index: placement.mesh.ranks for index, placement in placements.items()} == {
        0: (6, 5, 4, 3),
        1: (2, 1),
    }
    assert placements[0].choices.keys() == set(PLAN.stages[0].ops)


def test_stages_between_which_nothing_goes_are_simulated_beside_each_other() -> None:
    programs = plan_programs(PLAN)
    for rank, stage in ((0, 0), (3, 0), (4, 1), (5, 1), (6, 2)):
        instructions = programs[rank].instructions
        assert {i.segment for i in instructions if isinstance(i, Forward)} == {stage}
        assert sum(isinstance(i, ReduceGradients) for i in instructions) == (stage == 0)
        assert isinstance(instructions[-1], OptimizerStep)
    whole = simulate_plan(PLAN)
    alone = [simulate_plan(PLAN.model_copy(update={"stages": (PLAN.stages[index],)})) for index in range(3)]
    assert whole.step_seconds == pytest.approx(max(step.step_seconds for step in alone))
    for index, stage in enumerate(PLAN.stages):
        for rank in stage.devices:
            assert whole.busy_seconds[rank] == pytest.approx(alone[index].busy_seconds[rank])
    assert set(whole.pair_bytes) == set().union(*(step.pair_bytes for step in alone))
    assert whole.message_count == 0


def test_values_between_meshes_go_in_pieces() -> None:
    """From four ranks that all have it to two that need it, and from two to one: each target takes it from one source."""
    plan = made_hybrid_plan(CLUSTER, ({"outer": 2, "inner": 2}, {"all": 2}, {}), crossing=True)
    first, second = plan_segments(plan).values
    assert [piece.target for piece in first.pieces] == [4, 5]
    assert {piece.source for piece in first.gradient_pieces} <= {4, 5}
    assert [(piece.target, piece.size_bytes) for piece in second.pieces] == [(6, 16 * 8 * 4)]
    assert simulate_plan(plan).message_count == plan.microbatches * sum(
        len(value.pieces) + len(value.gradient_pieces) for value in (first, second)
    )


def test_values_leave_and_arrive_in_their_layouts() -> None:
    plan = made_hybrid_plan(CLUSTER, ({"outer": 2, "inner": 2}, {"all": 2}, {}), crossing=True)
    name, stages = plan.values[0].name, list(plan.stages)
    for index, text in enumerate(("S0 S1", "S0")):
        sharding = stages[index].sharding
        assert sharding is not None
        own = sharding.model_copy(update={"values": {name: text}})
        stages[index] = stages[index].model_copy(update={"sharding": own})
    (value, _) = plan_segments(plan.model_copy(update={"stages": tuple(stages)})).values
    assert sorted((piece.source, piece.target, piece.size_bytes) for piece in value.pieces) == [
        (0, 4, 128), (1, 4, 128), (2, 5, 128), (3, 5, 128)
    ]  # fmt: skip


def test_a_value_of_a_shared_stage_without_its_extent_is_refused() -> None:
    plan = made_hybrid_plan(CLUSTER, ({"outer": 2, "inner": 2}, {"all": 2}, {}), crossing=True)
    values = tuple(value.model_copy(update={"element_bytes": 0}) for value in plan.values)
    problems = list(inconsistencies(plan.model_copy(update={"values": values})))
    assert [problem.partition(":")[0] for problem in problems] == [
        "values[0].element_bytes",
        "values[1].element_bytes",
    ]
