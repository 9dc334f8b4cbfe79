"""Segments on device groups: what every rank of a group gets, and which graphs and programs are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from cost_models.errors import DeadlockError, InternalError
from runtime.check.check import check
from runtime.program.groups import on_leaders
from runtime.program.order import build_group_programs
from runtime.program.program import (
    Backward,
    Compute,
    ComputeOrder,
    Forward,
    Message,
    Program,
    Recv,
    Segment,
    SegmentCost,
    SegmentGraph,
    Send,
    TiedGroup,
    Value,
    pair_queue,
)
from runtime.program.timing import quick_makespan
from runtime.schedules import SCHEDULES
from tests.support.rank_programs import build_programs
from tests.support.simulate_ranks import simulate_ranks
from tests.support.uniform_links import UniformLinks
from tests.unit.runtime.schedules.helpers import COST, no_time

SLOW = SegmentCost(5.0, 5.0, 5.0, saved_bytes=70)
STAGES = (
    Segment(0, (0, 1), COST),
    Segment(1, (5, 2), SLOW),
    Segment(2, (3,), COST),
    Segment(3, (4,), COST),
    Segment(4, (0, 1), COST),
)
"""Two sharded stages that exchange nothing, a pipeline of two ranks, and a second segment of the first group."""

INDEPENDENT = SegmentGraph(STAGES, (Value("x", 2, (3,), 8, True), Value("h", 0, (4,), 8, True)), 6)
TIED = (
    TiedGroup(("a",), (0, 1), scattered=True),
    TiedGroup(("b",), (2, 5)),
    TiedGroup(("c",), (3, 4)),
    TiedGroup(("d",), (0, 1, 2, 5)),
)


def alone(*segments: int) -> tuple[Compute, ...]:
    """One micro-batch of ``segments``, there and back."""
    return (*(Forward(s, 0) for s in segments), *(Backward(s, 0) for s in reversed(segments)))


ORDERS: ComputeOrder = (alone(0, 4), (), (), alone(2), alone(3), alone(1))


def independent() -> tuple[Program, ...]:
    return build_programs(INDEPENDENT, ORDERS, 1, transfer_seconds=no_time, tied=TIED)


def test_each_group_gets_its_own_computes_and_collectives_and_single_ranks_their_messages() -> None:
    programs = independent()
    assert [str(program) for program in programs] == [
        "rank 0: 0F0 4F0 4B0 0B0 +/a@0,1 +d@0,1,2,5 step",
        "rank 1: 0F0 4F0 4B0 0B0 +/a@0,1 +d@0,1,2,5 step",
        "rank 2: 1F0 1B0 +b@2,5 +d@0,1,2,5 step",
        "rank 3: 2F0 >x:0@4 <d(x):0@4 2B0 +c@3,4 step",
        "rank 4: <x:0@3 3F0 3B0 >d(x):0@3 +c@3,4 step",
        "rank 5: 1F0 1B0 +b@2,5 +d@0,1,2,5 step",
    ]
    assert check(programs, INDEPENDENT, 1, tied=TIED).messages == 2


def test_the_first_of_a_group_has_the_program_from_which_its_ranks_get_theirs() -> None:
    groups = build_group_programs(INDEPENDENT, ORDERS, 1, transfer_seconds=no_time, tied=TIED)
    assert [str(program) for program in groups.programs] == [
        "rank 0: 0F0 4F0 4B0 0B0 +/a@0,1 +d@0,1,2,5 step",
        "rank 1: ",
        "rank 2: ",
        "rank 3: 2F0 >x:0@4 <d(x):0@4 2B0 +c@3,4 step",
        "rank 4: <x:0@3 3F0 3B0 >d(x):0@3 +c@3,4 step",
        "rank 5: 1F0 1B0 +b@2,5 +d@0,1,2,5 step",
    ]
    assert groups.all() == independent()


def test_a_rank_takes_part_in_its_own_sums_only() -> None:
    tied = (TiedGroup(("a",), (0, 3)), TiedGroup(("b",), (1, 4)))
    groups = build_group_programs(INDEPENDENT, ORDERS, 1, transfer_seconds=no_time, tied=tied)
    assert str(groups.programs[0]).endswith("0B0 +a@0,3 +b@1,4 step")
    assert str(groups.member(0)).endswith("0B0 +a@0,3 step")
    assert str(groups.member(1)).endswith("0B0 +b@1,4 step")


def test_groups_run_side_by_side_when_simulated() -> None:
    simulation = simulate_ranks(
        independent(), INDEPENDENT, links=UniformLinks(1e9), state_bytes=[1, 2, 30, 4, 5, 600]
    )
    assert simulation.step_seconds == 15.0, "the slow stage's own forward and backward"
    assert simulation.busy_seconds[:3] == (6.0, 6.0, 15.0)
    assert simulation.busy_seconds[2] == simulation.busy_seconds[5]
    assert simulation.peak_bytes[2] == 30 + 70
    assert simulation.peak_bytes[5] == 600 + 70


def test_ranks_may_bring_the_order_of_the_first_of_their_group() -> None:
    orders = (alone(0, 4), alone(0, 4), alone(1), alone(2), alone(3), alone(1))
    assert build_programs(INDEPENDENT, orders, 1, transfer_seconds=no_time, tied=TIED) == independent()
    assert quick_makespan(INDEPENDENT, orders, 1, no_time) == 15.0


@pytest.mark.parametrize(
    "build", [build_programs, lambda *args, transfer_seconds: quick_makespan(*args, no_time)]
)
def test_a_rank_with_an_order_of_its_own_is_refused(build: Callable[..., object]) -> None:
    orders = (alone(0, 4), (Forward(4, 0), Forward(0, 0)), *ORDERS[2:])
    with pytest.raises(InternalError, match="rank 1 has another order than rank 0, the first of its group"):
        build(INDEPENDENT, orders, 1, transfer_seconds=no_time)


def test_a_schedule_of_independent_groups_is_proved() -> None:
    schedule = SCHEDULES["list"]
    orders = schedule.order(INDEPENDENT, 3)
    programs = build_programs(INDEPENDENT, orders, 3, transfer_seconds=no_time, tied=TIED)
    assert check(programs, INDEPENDENT, 3, tied=TIED).messages == 6


# Graphs that programs cannot serve

BETWEEN = [((0, 1), (2, 3)), ((0, 1), (2,)), ((2,), (0, 1))]


def crossing(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[SegmentGraph, ComputeOrder]:
    """A value between groups that does not say in which pieces it goes."""
    graph = SegmentGraph(
        (Segment(0, source, COST), Segment(1, target, COST)), (Value("h.3", 0, (1,), 8, True),), 4
    )
    orders: list[tuple[Compute, ...]] = [()] * 4
    orders[source[0]], orders[target[0]] = alone(0), alone(1)
    return graph, tuple(orders)


@pytest.mark.parametrize(("source", "target"), BETWEEN)
def test_a_value_to_or_from_several_ranks_in_no_pieces_is_refused(
    source: tuple[int, ...], target: tuple[int, ...]
) -> None:
    graph, orders = crossing(source, target)
    refused = re.escape(
        f"value h.3 goes from segment 0 on ranks {source} to ranks {target}, but its pieces reach []"
    )
    with pytest.raises(InternalError, match=refused):
        build_programs(graph, orders, 1, transfer_seconds=no_time)
    with pytest.raises(InternalError, match=refused):
        quick_makespan(graph, orders, 1, no_time)


@pytest.mark.parametrize(("source", "target"), BETWEEN)
def test_neither_checker_nor_simulator_take_messages_handed_to_whole_groups(
    source: tuple[int, ...], target: tuple[int, ...]
) -> None:
    """The programs of the groups' first ranks, copied to every rank: they would hang, or sum the wrong shards."""
    graph, orders = crossing(source, target)
    firsts = replace(
        graph, segments=tuple(replace(segment, ranks=segment.ranks[:1]) for segment in graph.segments)
    )
    programs = build_programs(firsts, orders, 1, transfer_seconds=no_time)
    first_of = {rank: group[0] for group in (source, target) for rank in group}
    copied = [Program(rank, programs[first_of.get(rank, rank)].instructions) for rank in range(len(programs))]
    refused = re.escape(f"on ranks {source} to ranks {target}, but its pieces reach []")
    with pytest.raises(InternalError, match=refused):
        check(copied, graph, 1)
    with pytest.raises(InternalError, match=refused):
        simulate_ranks(copied, graph, links=UniformLinks(1e9))


def test_groups_that_overlap_are_refused() -> None:
    graph = SegmentGraph(
        (Segment(0, (0, 1), COST), Segment(1, (1, 2), COST), Segment(2, (0, 1), COST)), (), 3
    )
    with pytest.raises(InternalError, match=r"ranks \(0, 1\) and \(1, 2\) overlap") as caught:
        build_programs(graph, (), 1, transfer_seconds=no_time)
    assert len(caught.value.because) == 1


# Programs that do not fit their groups


def edited(rank: int, edit: Callable[[list[object]], object]) -> list[Program]:
    programs = list(independent())
    instructions: list[object] = list(programs[rank].instructions)
    edit(instructions)
    programs[rank] = Program(rank, tuple(instructions))  # type: ignore[arg-type]
    return programs


def test_a_message_within_a_group_is_refused() -> None:
    message = Message("h", 0, False, 0, 1)
    programs = edited(0, lambda i: i.insert(1, Send(message, pair_queue(0, 1))))
    other = edited(1, lambda i: i.insert(1, Recv(message, pair_queue(0, 1))))
    programs[1] = other[1]
    with pytest.raises(InternalError, match="moves a tensor that no segment needs"):
        check(programs, INDEPENDENT, 1, tied=TIED)


def test_a_value_is_followed_on_every_rank_of_its_group() -> None:
    def swap(instructions: list[object]) -> None:
        instructions[0], instructions[1] = instructions[1], instructions[0]

    with pytest.raises(DeadlockError) as caught:
        check(edited(1, swap), INDEPENDENT, 1, tied=TIED)
    assert "rank 1: 4F0 (instruction 0) uses h:0 before rank 1: 0F0 (instruction 1) makes it" in str(
        caught.value
    )


def test_the_first_rank_of_a_group_leads_it() -> None:
    led = on_leaders(INDEPENDENT)
    assert led.leader_of == (0, 0, 5, 3, 4, 5)
    assert [segment.ranks for segment in led.graph.segments] == [(0,), (5,), (3,), (4,), (0,)]
