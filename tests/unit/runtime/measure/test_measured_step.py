"""Records of ranks become one step on one clock."""

from __future__ import annotations

import pytest

from runtime.measure.instrument import HostClock, RunRecord, SendMark, WaitMark
from runtime.measure.measured_step import (
    RankTimes,
    StepRecord,
    measured_step,
    measured_times,
    simulated_times,
)
from runtime.program.program import (
    Backward,
    Forward,
    Message,
    OptimizerStep,
    Program,
    Recv,
    ReduceGradients,
    Send,
    pair_queue,
)
from runtime.simulate.timeline import render
from runtime.simulate.trace_events import chrome_trace

HIDDEN = Message("h", 0, False, 0, 1)
GRADIENT = Message("h", 0, True, 1, 0)
QUEUE = pair_queue(0, 1)
TIED = ReduceGradients(("wte",), (0, 1), "group:0-1")

SHIFT = 100.0
"""Rank 1's clock is ahead by as much."""


def records() -> list[StepRecord]:
    """One micro-batch through two ranks, in seconds of rank 0's clock; it starts at 10.

    rank 0   F 10–12, sends, waits 12.5–17, B 17–19, starts to sum, waits 19.5–20, optimizer 21–22
    rank 1   waits 10.5–13, F 13–14, B 14–16, sends, starts to sum, waits 19–20, optimizer 20–20.5
    """
    first = Program(0, (Forward(0, 0), Send(HIDDEN, QUEUE), Recv(GRADIENT, QUEUE), Backward(0, 0), TIED))
    second = Program(1, (Recv(HIDDEN, QUEUE), Forward(1, 0), Backward(1, 0), Send(GRADIENT, QUEUE), TIED))
    zero = RunRecord(
        first,
        ((10.0, 12.0), (12.0, 12.2), (12.2, 12.5), (12.5, 19.0), (19.0, 19.5)),
        (WaitMark(2, 12.5, 17.0), WaitMark(4, 19.5, 20.0)),
        (SendMark(1, 12.1, 64),),
    )
    one = RunRecord(
        second,
        tuple(
            (s + SHIFT, e + SHIFT)
            for s, e in ((10.2, 10.5), (10.5, 14.0), (14.0, 16.0), (16.0, 16.5), (16.5, 17))
        ),
        (WaitMark(0, 10.5 + SHIFT, 13.0 + SHIFT), WaitMark(4, 19.0 + SHIFT, 20.0 + SHIFT)),
        (SendMark(3, 16.1 + SHIFT, 64),),
    )
    return [
        StepRecord(9.0, 23.0, (21.0, 22.0), zero),
        StepRecord(9.5 + SHIFT, 23.0 + SHIFT, (20.0 + SHIFT, 20.5 + SHIFT), one),
    ]


def test_ranks_are_laid_on_one_clock_and_waits_are_idle() -> None:
    step = measured_step(records(), [0.0, SHIFT])
    assert step.step_seconds == pytest.approx(12.0)
    spans = [
        [(round(s.start_seconds, 6), round(s.end_seconds, 6), s.instruction) for s in t]
        for t in step.timeline
    ]
    assert spans[0] == [
        (0.0, 2.0, Forward(0, 0)),
        (7.0, 9.0, Backward(0, 0)),
        (9.5, 10.0, TIED),
        (11.0, 12.0, OptimizerStep()),
    ]
    assert spans[1] == [
        (3.0, 4.0, Forward(1, 0)),
        (4.0, 6.0, Backward(1, 0)),
        (9.0, 10.0, TIED),
        (10.0, 10.5, OptimizerStep()),
    ]
    assert step.busy_seconds == pytest.approx((4.0, 3.0))
    assert step.bubble_fraction == pytest.approx(1 - 7 / 24)
    moved = [
        (t.message, round(t.start_seconds, 6), round(t.end_seconds, 6), t.size_bytes) for t in step.transfers
    ]
    assert moved == [(HIDDEN, 2.1, 3.0, 64), (GRADIENT, 6.1, 7.0, 64)]
    assert step.pair_bytes == {(0, 1): 64, (1, 0): 64}


def test_the_parts_of_a_ranks_step_add_up() -> None:
    times = measured_times(records()[0])
    expected = RankTimes(
        forward=2.0, backward=2.0, waiting=4.5, communication=0.2 + 0.3 + 0.5 + 0.5, optimizer=1.0, other=3.0
    )
    for name, value in vars(expected).items():
        assert getattr(times, name) == pytest.approx(value), name
    again = simulated_times(measured_step(records(), [0.0, SHIFT]), 0)
    assert (again.forward, again.backward) == pytest.approx((2.0, 2.0))
    assert (again.communication, again.optimizer) == pytest.approx((0.5, 1.0))
    assert again.waiting == pytest.approx(12.0 - 5.5)


def test_a_measured_step_is_drawn_and_saved_without_memory() -> None:
    step = measured_step(records(), [0.0, SHIFT])
    assert render(step, 24).splitlines()[1:] == [
        "rank 0  F0--..........B0--.+..S-  busy  33%",
        "rank 1  ......F0B0--......+-S...  busy  25%",
    ]
    events = chrome_trace(step, "measured", first=5)["traceEvents"]
    assert {event["pid"] for event in events} == {5, 6}
    assert not [event for event in events if event["ph"] == "C"]


def test_the_host_clock_reads_its_own_marks() -> None:
    clock = HostClock()
    marks = [clock.mark() for _ in range(3)]
    assert clock.seconds(marks) == sorted(marks)
