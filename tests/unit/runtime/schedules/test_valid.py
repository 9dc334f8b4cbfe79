"""Every schedule's order can run, completely and in micro-batch order, whatever the graph."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.errors import InternalError, UsageError
from runtime.program.program import Backward, ComputeOrder, Forward, Segment, SegmentGraph, Value
from runtime.schedules import SCHEDULES, inference_order
from tests.support.matrix import drawn
from tests.support.work import calls
from tests.unit.runtime.schedules.tools import UNIT, chain, faults, graph_of

PIPELINES = [name for name in SCHEDULES if name != "list"]


@st.composite
def skips(draw: st.DrawFn, stages: int) -> set[tuple[int, int]]:
    """Random value edges from lower to higher stages; not even the chain is sure to be there."""
    edges = [(a, b) for b in range(stages) for a in range(b)]
    return draw(st.sets(st.sampled_from(edges), max_size=3 * stages)) if edges else set()


@st.composite
def pipeline(draw: st.DrawFn, name: str) -> tuple[SegmentGraph, int]:
    """A random stage DAG placed as the schedule wants it, on shuffled device groups, some stages frozen."""
    schedule = SCHEDULES[name]
    p = draw(st.integers(1, 6))
    v = schedule.chunks or draw(st.integers(2, 4))
    width = draw(st.integers(1, 2))
    world = p * width + draw(st.integers(0, 1))
    members = draw(st.permutations(range(world)))
    groups = [tuple(members[i * width : (i + 1) * width]) for i in range(p)]
    ranks = [groups[i] for i in schedule.stage_ranks(p * v, range(p))]
    frozen = draw(st.sets(st.integers(0, p * v - 1)))
    graph = graph_of(ranks, draw(skips(p * v)), frozen=frozen, world_size=world)
    return graph, draw(st.integers(1, 13))


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_on_random_stage_dags(name: str) -> None:
    @drawn(60)
    @given(pipeline(name))
    def check(drawn: tuple[SegmentGraph, int]) -> None:
        graph, microbatches = drawn
        order = SCHEDULES[name].order(graph, microbatches)
        assert faults(graph, order, microbatches, SCHEDULES[name].splits_backward) == []

    check()


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_of_every_small_size(name: str) -> None:
    schedule = SCHEDULES[name]
    for p in range(1, 6):
        for v in [schedule.chunks] if schedule.chunks else [2, 3]:
            graph = chain(name, p, v)
            for m in range(1, 12):
                assert schedule.check(p * v, p, m) is None
                assert faults(graph, schedule.order(graph, m), m, schedule.splits_backward) == []


def test_the_validator_sees_planted_faults() -> None:
    graph = chain("1f1b", 2)
    good = SCHEDULES["1f1b"].order(graph, 2)
    assert faults(graph, good, 2, split=False) == []
    missing: ComputeOrder = (good[0][:-1], good[1])
    late: ComputeOrder = ((Backward(0, 0), Forward(0, 0), Forward(0, 1), Backward(0, 1)), good[1])
    swapped: ComputeOrder = ((Forward(0, 1), Forward(0, 0), Backward(0, 0), Backward(0, 1)), good[1])
    circle: ComputeOrder = (  # rank 0 waits for 1B0 before 0F1, rank 1 for 0F1 before 1B0
        (Forward(0, 0), Backward(0, 0), Forward(0, 1), Backward(0, 1)),
        (Forward(1, 0), Forward(1, 1), Backward(1, 0), Backward(1, 1)),
    )
    assert faults(graph, missing, 2, split=False) == ["rank 0 differs: ['0B1']"]
    assert faults(graph, late, 2, split=False) == ["the order waits in a circle"]
    assert "rank 0 runs forwards of segment 0 out of order" in faults(graph, swapped, 2, split=False)
    assert faults(graph, circle, 2, split=False) == ["the order waits in a circle"]


def test_a_frozen_prefix_has_no_backward() -> None:
    graph = graph_of([(0,), (1,), (2,)], [(0, 1), (1, 2)], frozen=[0, 1])
    order = SCHEDULES["1f1b"].order(graph, 3)
    assert [str(i) for i in order[0]] == ["0F0", "0F1", "0F2"]
    assert [str(i) for i in order[2]] == ["2F0", "2B0", "2F1", "2B1", "2F2", "2B2"]


def test_ranks_without_segments_have_nothing_to_do() -> None:
    graph = graph_of([(3,), (1,)], [(0, 1)], world_size=5)
    order = SCHEDULES["1f1b"].order(graph, 2)
    assert [len(instructions) for instructions in order] == [0, 4, 0, 4, 0]


def test_members_of_a_device_group_run_the_same() -> None:
    graph = graph_of([(0, 2), (1, 3)], [(0, 1)])
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "list"):
        order = SCHEDULES[name].order(graph, 4)
        assert order[0] == order[2]
        assert order[1] == order[3]
        assert order[0] != order[1]


@drawn(60)
@given(st.data())
def test_inference_runs_every_forward_once_in_order(data: st.DataObject) -> None:
    graph, microbatches = data.draw(pipeline("interleaved"))
    order = inference_order(graph, microbatches)
    forwards_only = SegmentGraph(
        tuple(Segment(s.index, s.ranks, s.cost, has_backward=False) for s in graph.segments),
        graph.values,
        graph.world_size,
    )
    assert faults(forwards_only, order, microbatches, split=False) == []


def test_placements() -> None:
    assert SCHEDULES["1f1b"].stage_ranks(3, [7, 5, 6]) == (7, 5, 6)
    assert SCHEDULES["interleaved"].stage_ranks(6, [7, 5, 6]) == (7, 5, 6, 7, 5, 6)
    assert SCHEDULES["zb-v"].stage_ranks(6, [7, 5, 6]) == (7, 5, 6, 6, 5, 7)
    assert SCHEDULES["zb-v"].stages_at(1, 6, 3) == (1, 4)


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "microbatches", "reason"),
    [
        ("gpipe", 3, 2, 4, "gpipe on 2 ranks needs 2 stages, not 3"),
        ("zb-v", 2, 2, 4, "zb-v on 2 ranks needs 2 × 2 = 4 stages, not 2"),
        ("interleaved", 2, 2, 4, "interleaved on 2 ranks needs a multiple of 2, 4 or more stages, not 2"),
        ("interleaved", 5, 2, 4, "interleaved on 2 ranks needs a multiple of 2, 4 or more stages, not 5"),
        ("1f1b", 2, 2, 0, "1f1b needs at least one rank and one micro-batch, not 2 and 0"),
        ("list", 0, 2, 1, "list needs stages, ranks and micro-batches, not 0, 2 and 1"),
    ],
)
def test_check_says_why_not(name: str, stages: int, ranks: int, microbatches: int, reason: str) -> None:
    assert SCHEDULES[name].check(stages, ranks, microbatches) == reason


def test_a_placement_that_is_not_the_schedules_is_refused() -> None:
    loop = chain("interleaved", 2, 2)
    with pytest.raises(UsageError, match=r"stage 2 is on ranks \(0,\), zb-v wants it on \(1,\)"):
        SCHEDULES["zb-v"].order(loop, 4)
    with pytest.raises(UsageError, match=r"ranks \[1\] belong to more than one device group"):
        SCHEDULES["1f1b"].order(graph_of([(0, 1), (1, 2)], [(0, 1)]), 4)


def test_list_refuses_a_graph_that_waits_in_a_circle() -> None:
    segments = (Segment(0, (0,), UNIT), Segment(1, (1,), UNIT))
    values = (Value("a", 0, (1,), 1, True), Value("b", 1, (0,), 1, True))
    with pytest.raises(InternalError, match="values must form a cycle"):
        SCHEDULES["list"].order(SegmentGraph(segments, values, 2), 2)


@pytest.mark.parametrize("name", SCHEDULES)
def test_twice_the_microbatches_are_ordered_with_twice_the_work(name: str) -> None:
    """64 stages; an accidental square in the number of micro-batches would break the bound."""
    chunks = SCHEDULES[name].chunks or SCHEDULES[name].minimum_chunks
    graph = chain(name, 64 // chunks, chunks)
    few, many = (calls(lambda m=m: SCHEDULES[name].order(graph, m)) for m in (64, 128))  # type: ignore[misc]
    assert many <= 2.2 * few
