"""Devices with one queue for all that they communicate: what the checker refuses there, and which receives are late."""

from __future__ import annotations

from graphlib import TopologicalSorter

import pytest

from cost_models.errors import DeadlockError
from runtime.check.check import check
from runtime.check.deadlock import QueueRule, _wait_graph
from runtime.program.order import build_group_programs
from runtime.program.program import (
    Backward,
    Forward,
    Instruction,
    Message,
    OptimizerStep,
    PieceBytes,
    Program,
    Recv,
    ReduceGradients,
    Segment,
    SegmentCost,
    SegmentGraph,
    Send,
    TiedGroup,
    Value,
    group_queue,
    pair_queue,
)
from runtime.program.timing import time_orders
from runtime.schedules import SCHEDULES
from tests.support.rank_programs import build_programs
from tests.support.simulate_ranks import simulate_ranks
from tests.support.uniform_links import UniformLinks
from tests.unit.runtime.program.test_between_groups import pipeline
from tests.unit.runtime.schedules.helpers import COST, no_time

GROUPS = [(1, 1), (2, 2), (1, 3), (2, 1, 1), (4, 4)]
SCHEDULED = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)]
LINKS = UniformLinks(10.0)


def seconds(source: int, target: int, size_bytes: int) -> float:
    return LINKS.path(source, target).transfer_seconds(size_bytes)


@pytest.mark.parametrize(("schedule", "rounds"), SCHEDULED)
@pytest.mark.parametrize("sizes", GROUPS)
def test_programs_are_proved_and_their_late_receives_charged(
    sizes: tuple[int, ...], schedule: str, rounds: int
) -> None:
    graph, microbatches = pipeline(sizes, rounds), 2 * len(sizes)
    tied = (TiedGroup(("w",), (0, graph.world_size - 1)),)
    orders = SCHEDULES[schedule].order(graph, microbatches)
    early, late = (
        build_programs(graph, orders, microbatches, transfer_seconds=seconds, tied=tied, one_queue=one_queue)
        for one_queue in (False, True)
    )
    proof = check(late, graph, microbatches, tied=tied, one_queue=True)
    assert proof.rules[-1].endswith("for messages or for everything")
    slower = simulate_ranks(late, graph, links=LINKS).step_seconds
    assert slower >= simulate_ranks(early, graph, links=LINKS).step_seconds
    assert (early == late) is (max(sizes) == 1), (
        "only what ranks compute together has collectives to wait for"
    )


def longest_path(programs: tuple[Program, ...], graph: SegmentGraph, rule: QueueRule) -> float:
    """Return the seconds of the longest chain of waits where transfers take no time themselves, F = 1, B = 2, I = W = 1."""
    waits = _wait_graph(programs, graph, rule, False)
    before: list[list[int]] = [[] for _ in waits.after]
    for node, targets in enumerate(waits.after):
        for target in targets:
            before[target].append(node)
    ends: dict[int, float] = {}
    for node in TopologicalSorter(dict(enumerate(before))).static_order():
        letter = getattr(waits.instruction(waits.places[node][0]), "letter", "")
        ends[node] = max((ends[n] for n in before[node]), default=0.0) + {"": 0.0, "B": 2.0}.get(letter, 1.0)
    return max(ends.values())


@pytest.mark.parametrize(
    ("schedule", "rounds", "free", "early", "late"),
    [
        ("gpipe", 1, 27, 48, 27),
        ("1f1b", 1, 27, 48, 27),
        ("zb-h1", 1, 25, 46, 30),
        ("interleaved", 2, 51, 96, 71),
    ],
)
def test_late_receives_shorten_the_step_of_devices_with_one_queue(
    schedule: str, rounds: int, free: float, early: float, late: float
) -> None:
    """The figures of the docs: without queues; with one for everything and early receives; with late ones."""
    graph = pipeline((2, 2), rounds)
    orders = SCHEDULES[schedule].order(graph, 8)
    programs = {
        one_queue: build_programs(graph, orders, 8, transfer_seconds=lambda *_: 1e-7, one_queue=one_queue)
        for one_queue in (False, True)
    }
    assert longest_path(programs[False], graph, "pair") == free
    assert longest_path(programs[False], graph, "everything") == early
    assert longest_path(programs[True], graph, "everything") == late


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize(("schedule", "rounds"), SCHEDULED)
def test_no_receive_is_posted_before_a_shared_compute_that_starts_before_its_send(
    schedule: str, rounds: int, one_queue: bool
) -> None:
    graph, microbatches = pipeline((2, 1, 3), rounds), 6
    orders = SCHEDULES[schedule].order(graph, microbatches)
    timing = time_orders(graph, orders, microbatches, seconds)
    groups = build_group_programs(graph, orders, microbatches, transfer_seconds=seconds, one_queue=one_queue)
    sent: dict[Message, float] = {}
    for program in groups.programs:
        ended, ends = 0.0, iter(timing.rank_ends[program.rank] if program.instructions else ())
        for instruction in program.instructions:
            if isinstance(instruction, Send):
                sent[instruction.message] = ended
            elif not isinstance(instruction, Recv | OptimizerStep):
                ended = next(ends)
    early = 0
    for leader in (0, 3):
        starts = timing.rank_starts[leader][::-1]
        before: list[float] = []
        """When each receive is sent whose next compute has not come yet."""
        for instruction in groups.programs[leader].instructions:
            if isinstance(instruction, Recv):
                before.append(sent[instruction.message])
            elif not isinstance(instruction, Send | OptimizerStep):
                start = starts.pop()
                early += sum(start < other - 1e-9 for other in before)
                before.clear()
    assert (early == 0) is one_queue


def test_a_late_receive_reads_as_in_the_docs() -> None:
    graph = SegmentGraph(
        (Segment(0, (0,), COST), Segment(1, (1, 2), COST, has_backward=False)),
        (Value("x", 0, (1,), 8, False, (PieceBytes(0, 1, 8), PieceBytes(0, 2, 8))),),
        3,
    )
    orders = (tuple(Forward(0, mb) for mb in range(3)), tuple(Forward(1, mb) for mb in range(3)))
    early, late = (
        build_programs(graph, orders, 3, transfer_seconds=no_time, training=False, one_queue=one_queue)
        for one_queue in (False, True)
    )
    assert str(early[1]) == "rank 1: <x:0@0 <x:1@0 <x:2@0 1F0 1F1 1F2"
    assert str(late[1]) == "rank 1: <x:0@0 1F0 <x:1@0 1F1 <x:2@0 1F2"


# Circles that only this rule has


def both(message: Message) -> tuple[Instruction, Instruction]:
    queue = pair_queue(message.source, message.target)
    return Send(message, queue), Recv(message, queue)


def test_a_receive_before_a_shared_compute_that_its_sender_waits_for_is_found() -> None:
    """Rank 0 sends x:1 after the gradient of x:0, which rank 2 sends after 1B0; rank 1 has x:1 in its queue before 1F0."""
    pieces = (PieceBytes(0, 1, 4), PieceBytes(0, 2, 4))
    graph = SegmentGraph(
        (Segment(0, (0,), COST), Segment(1, (1, 2), COST)),
        (Value("x", 0, (1,), 8, True, pieces, (PieceBytes(2, 0, 8),)),),
        3,
    )
    (s10, r10), (s20, r20), (s11, r11), (s21, r21) = (
        both(Message("x", mb, False, 0, rank)) for mb in (0, 1) for rank in (1, 2)
    )
    (g0, back0), (g1, back1) = (both(Message("x", mb, True, 2, 0)) for mb in (0, 1))
    f, b = (
        [[Forward(s, 0), Forward(s, 1)] for s in (0, 1)],
        [[Backward(s, 0), Backward(s, 1)] for s in (0, 1)],
    )
    step = OptimizerStep()
    programs = [
        Program(0, (f[0][0], s10, s20, back0, b[0][0], f[0][1], s11, s21, back1, b[0][1], step)),
        Program(1, (r10, r11, f[1][0], b[1][0], f[1][1], b[1][1], step)),
        Program(2, (r20, f[1][0], b[1][0], g0, r21, f[1][1], b[1][1], g1, step)),
    ]
    check(programs, graph, 2)
    with pytest.raises(DeadlockError) as caught:
        check(programs, graph, 2, one_queue=True)
    said = str(caught.value)
    assert "with one queue per device for messages and collectives" in said
    assert "rank 1: 1F0 (its other side is on rank 2) waits for <x:1@0" in said
    programs[1] = Program(1, (r10, f[1][0], b[1][0], r11, f[1][1], b[1][1], step))
    check(programs, graph, 2, one_queue=True)


def test_a_sum_before_a_message_that_its_ranks_wait_for_is_found() -> None:
    """Rank 0 sums before it sends x, which rank 1 has in its queue before the sum."""
    cost = SegmentCost(1.0, 0.0, 0.0)
    graph = SegmentGraph(
        (Segment(0, (0,), cost, has_backward=False), Segment(1, (1,), cost, has_backward=False)),
        (Value("x", 0, (1,), 8, False),),
        2,
    )
    send, receive = both(Message("x", 0, False, 0, 1))
    summed = ReduceGradients(("w",), (0, 1), group_queue((0, 1)))
    tied = (TiedGroup(("w",), (0, 1)),)
    programs = [
        Program(0, (Forward(0, 0), summed, send)),
        Program(1, (receive, summed, Forward(1, 0))),
    ]
    check(programs, graph, 1, tied=tied)
    with pytest.raises(DeadlockError, match=r"rank 1: \+w@0,1 .* waits for <x:0@0"):
        check(programs, graph, 1, tied=tied, one_queue=True)
