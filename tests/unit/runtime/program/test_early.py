"""Sums that start while the last backward runs: which ones, that nothing hangs, and what the simulator makes of it."""

from __future__ import annotations

import random

import pytest

from runtime.check.deadlock import QueueRule, find_deadlock
from runtime.program.early import early_sums
from runtime.program.members import GroupPrograms
from runtime.program.order import build_group_programs
from runtime.program.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    OptimizerStep,
    Program,
    ReduceGradients,
    Segment,
    SegmentCost,
    SegmentGraph,
    TiedGroup,
)
from runtime.schedules import SCHEDULES
from runtime.simulate.simulate import simulate
from runtime.simulate.simulation import Simulation
from tests.support.simulate_ranks import simulate_ranks
from tests.support.uniform_links import UniformLinks
from tests.unit.runtime.program.test_between_groups import pipeline
from tests.unit.runtime.schedules.helpers import no_time


def programs_of(
    graph: SegmentGraph, schedule: str, tied: tuple[TiedGroup, ...], *, one_queue: bool = False
) -> GroupPrograms:
    orders = SCHEDULES[schedule].order(graph, 4)
    return build_group_programs(graph, orders, 4, transfer_seconds=no_time, tied=tied, one_queue=one_queue)


def sums_of(graph: SegmentGraph) -> tuple[TiedGroup, ...]:
    """Two per segment, over all of its ranks."""
    return tuple(
        TiedGroup((f"{name}{s.index}",), s.ranks) for s in graph.segments for name in "ab" if len(s.ranks) > 1
    )


@pytest.mark.parametrize(("schedule", "rounds"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_first_stages_sum_early(schedule: str, rounds: int) -> None:
    graph = pipeline((2, 2), rounds)
    groups = programs_of(graph, schedule, sums_of(graph))
    last, early = early_sums(groups.programs[0].instructions, graph)
    assert groups.programs[0].instructions[last] == Backward(0, 3)
    found = [groups.programs[0].instructions[p] for p in early]
    names = [("a0",), ("b0",)] if rounds == 1 else [("a0",), ("b0",), ("a2",), ("b2",)]
    assert [i.parameters for i in found if isinstance(i, ReduceGradients)] == names
    assert early_sums(groups.programs[2].instructions, graph) == (-1, [])  # it sends a gradient in between


def test_halves_and_sums_over_other_groups_stay_behind() -> None:
    graph = pipeline((2, 2))
    tied = (TiedGroup(("w",), (0, 1, 2, 3)), *sums_of(graph))
    first = programs_of(graph, "1f1b", tied).programs[0].instructions
    last, early = early_sums(first, graph)
    assert early == [last + 1, last + 2]
    assert [str(i) for i in first[last + 1 :]] == ["+a0@0,1", "+b0@0,1", "+w@0,1,2,3", "step"]
    halves = programs_of(graph, "zb-h1", sums_of(graph)).programs[0].instructions
    assert any(isinstance(i, BackwardInput) for i in halves)
    assert early_sums(halves, graph) == (-1, [])
    again = (Backward(0, 0), *(ReduceGradients(("a",), ranks, "") for ranks in ((0, 1), (0, 1))))
    assert early_sums(again, graph) == (0, [1])  # the second is of the first's result


@pytest.mark.parametrize("rule", ["pair", "device", "everything"])
def test_nothing_waits_in_a_circle_with_these_sums_ahead_of_the_backward(rule: QueueRule) -> None:
    """Where a rank stands between the backward and its sums is all one: ahead of it is as far as they may come."""
    dice = random.Random(0)
    moved = 0
    for _ in range(40):
        sizes = tuple(dice.choice([1, 2, 3]) for _ in range(dice.randint(1, 4)))
        schedule, rounds = dice.choice([("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
        graph = pipeline(sizes, rounds if len(sizes) > 1 else 1, split=dice.random() < 0.5)
        schedule = schedule if len(sizes) > 1 else "1f1b"
        made = programs_of(graph, schedule, sums_of(graph), one_queue=rule == "everything")
        programs = []
        for program in made.all():
            own = list(program.instructions)
            last, early = early_sums(own, graph)
            if early:
                sums, backward = [own[p] for p in early], own[last]
                assert early == list(range(last + 1, last + 1 + len(early)))
                own[last : early[-1] + 1] = [*sums, backward]
                moved += 1
            programs.append(Program(program.rank, tuple(own)))
        assert find_deadlock(programs, graph, rule=rule) == []
    assert moved > 20


def test_where_one_rank_sends_the_gradient_of_all_no_rank_sums_early() -> None:
    """Ranks 1 to 3 have copies of what they read. Rank 1 alone sends a gradient back, and its sums come after that."""
    graph = pipeline((1, 3), split=False)
    programs = programs_of(graph, "1f1b", sums_of(graph)).all()
    senders = [p.rank for p in programs if any(i == ">d(h0):3@0" for i in map(str, p.instructions))]
    assert senders == [1]
    assert [early_sums(p.instructions, graph) for p in programs] == [(-1, [])] * 4


ALONE = SegmentGraph((Segment(0, (0, 1), SegmentCost(1.0, 6.0, 4.0)),), (), 2)
SUMS = (TiedGroup(("a",), (0, 1)), TiedGroup(("b",), (0, 1)))


def stepped(shares: tuple[float, float], contention: float) -> Simulation:
    """One backward of ten seconds, then sums of two seconds each: by groups and by ranks alike."""
    groups = build_group_programs(
        ALONE, SCHEDULES["1f1b"].order(ALONE, 1), 1, transfer_seconds=no_time, tied=SUMS
    )
    ready = dict(zip("ab", shares, strict=True))
    found = [
        run(
            programs,
            links=UniformLinks(1e9),
            contention=contention,
            optimizer_seconds=[0.5] * 2,
            reduce_seconds=lambda _: 2.0,
            reduce_ready=lambda reduction: (0, ready[reduction.parameters[0]]),
        )
        for run, programs in (
            (simulate, groups),
            (lambda programs, **options: simulate_ranks(programs, ALONE, **options), groups.all()),
        )
    ]
    by_group, by_rank = found
    assert by_group.step_seconds == pytest.approx(by_rank.step_seconds, rel=1e-12)
    return by_group


@pytest.mark.parametrize(
    ("shares", "contention", "seconds"),
    [
        ((1.0, 1.0), 1.0, 14.0),  # nothing is there before the end
        ((0.5, 1.0), 1.0, 12.0),
        ((0.5, 0.6), 1.0, 10.0),  # the second waits for the first, and ends before the backward
        ((0.5, 0.9), 1.0, 11.0),
        ((0.5, 1.0), 2.0, 13.0),  # two seconds of sending are one of computing
        ((0.5, 0.6), 2.0, 12.0),
        ((0.95, 1.0), 2.0, 13.5),  # half a second is left, which takes one
    ],
)
def test_sums_run_beside_the_backward(shares: tuple[float, float], contention: float, seconds: float) -> None:
    simulation = stepped(shares, contention)
    assert simulation.step_seconds == pytest.approx(1.0 + seconds + 0.5, rel=1e-12)
    for spans in simulation.timeline:
        ends = [0.0]
        for span in spans:
            assert span.start_seconds >= ends[-1] - 1e-12
            ends.append(span.end_seconds)
        assert isinstance(spans[-1].instruction, OptimizerStep)
    assert not any(isinstance(span.instruction, BackwardWeight) for span in simulation.timeline[0])
