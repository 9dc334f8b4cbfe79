"""Schedules against what their papers promise, with every instruction taking one unit of time."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from passes.search.layer.options import ScheduleOption
from runtime.program.program import Backward, SegmentCost
from runtime.schedules import SCHEDULES, peak_bytes
from runtime.schedules.held import ComputeStep, chunk_corners
from tests.unit.runtime.schedules.tools import chain, clock, held_microbatches, ordered, peak_saved_bytes

SIZES = [(1, 1), (1, 4), (2, 1), (2, 3), (3, 3), (4, 4), (4, 8), (4, 9), (5, 13), (8, 8), (8, 20)]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name: str, p: int, m: int) -> None:
    _, time = ordered(name, p, m)
    assert time.makespan == 2 * (m + p - 1)
    assert time.bubble == pytest.approx(float(Fraction(p - 1, m + p - 1)), abs=1e-12)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubble_of_1f1b_when_backward_takes_twice_as_long(p: int, m: int) -> None:
    graph = chain("1f1b", p)
    order = SCHEDULES["1f1b"].order(graph, m)
    time = clock(graph, order, False, lambda i: 2 if isinstance(i, Backward) else 1)
    assert time.makespan == 3 * (m + p - 1)


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= p])
def test_bubble_of_interleaved_also_where_ranks_do_not_divide_the_microbatches(
    p: int, m: int, v: int
) -> None:
    _, time = ordered("interleaved", p, m, v)
    assert time.makespan == 2 * (v * m + p - 1)
    assert time.bubble == pytest.approx(float(Fraction(p - 1, v * m + p - 1)), abs=1e-12)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= p])
def test_zb_h1_has_a_third_of_the_bubble_of_1f1b(p: int, m: int) -> None:
    _, time = ordered("zb-h1", p, m)
    assert time.makespan == 3 * m + p - 1  # 1F1B with B = I + W: 3m + 3(p-1)


def test_zb_h1_of_four_stages_and_eight_microbatches_takes_27() -> None:
    assert ordered("zb-h1", 4, 8)[1].makespan == 27


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 4),
        ("zb-h1", 1),
        ("zb-h2", 1),
        ("zb-v", 2),
    ],
)
def test_the_searches_know_what_a_schedule_hides_of_few_and_many_microbatches(name: str, chunks: int) -> None:
    units = chunks * (3 if SCHEDULES[name].splits_backward else 2)
    for p, m in product((2, 3, 5, 8), (1, 2, 3, 4, 7, 10, 16, 17)):
        _, time = ordered(name, p, m, chunks)
        fill = ScheduleOption(m, name, chunks).fill(p)
        assert time.makespan / units == pytest.approx(m + fill * (p - 1)), (p, m)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize(("name", "units_per_microbatch"), [("zb-h2", 3), ("zb-v", 6)])
def test_zb_h2_and_zb_v_have_no_bubble(name: str, units_per_microbatch: int, p: int) -> None:
    for m in (2 * p - 1, 2 * p, 3 * p + 1):
        _, time = ordered(name, p, m)
        assert time.idle == (0,) * p
        assert time.makespan == units_per_microbatch * m + p - 1  # rank i starts i units late


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_microbatches_in_flight(p: int, m: int) -> None:
    for i in range(p):
        assert SCHEDULES["gpipe"].in_flight(i, p, 1, m) == (m,)
        assert SCHEDULES["1f1b"].in_flight(i, p, 1, m) == (min(m, p - i),)
        assert SCHEDULES["zb-h1"].in_flight(i, p, 1, m) == (min(m, p),)
        assert SCHEDULES["zb-h2"].in_flight(i, p, 1, m) == (min(m, 2 * p - 1),)
        assert _whole("zb-h1", i, p, 1, m) == min(m, p - i)
        assert _whole("zb-h2", i, p, 1, m) == min(m, 2 * (p - i) - 1)
        assert _held("zb-v", i, p, 2, m) <= min(2 * m, 2 * p)
        if m >= 2 * p - 1:
            assert _held("zb-v", i, p, 2, m) == 2 * p


COUNTS = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("zb-h1", 1),
    ("zb-h2", 1),
    ("zb-v", 2),
    ("interleaved", 2),
    ("interleaved", 3),
]


@pytest.mark.parametrize(("name", "v"), COUNTS)
def test_counts_of_many_microbatches_are_those_of_the_order_itself(name: str, v: int) -> None:
    # beyond 2p micro-batches most orders only repeat, and are counted at 2p: here at the real number
    schedule = SCHEDULES[name]
    for p in (1, 2, 3, 5):
        for m in sorted({1, 2, p, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p, 4 * p, 5 * p + 2, 6 * p}):
            for i in range(p):
                steps = schedule.steps(i, p, v, m)
                assert schedule.in_flight(i, p, v, m) == held_microbatches(steps, v)
                assert schedule.corners(i, p, v, m) == chunk_corners(steps, v)


@pytest.mark.parametrize(("name", "v"), COUNTS)
def test_a_chunk_is_fullest_at_a_corner_however_its_counts_are_weighed(name: str, v: int) -> None:
    p, weights = 5, [(1, 0), (0, 1), (1, 1), (3, 2), (2, 3), (7, 1), (1, 7), (5, 4)]
    for m in (1, 4, 9, 10, 15):
        for i in range(p):
            moments, corners = SCHEDULES[name].moments(i, p, v, m), SCHEDULES[name].corners(i, p, v, m)
            for c, (a, b) in product(range(v), weights):
                exact = max(a * moment[c][0] + b * moment[c][1] for moment in moments)
                assert max(a * whole + b * left for whole, left in corners[c]) == exact
                assert set(corners[c]) <= {moment[c] for moment in moments}


def test_corners_leave_out_what_lies_on_or_below_their_connecting_lines() -> None:
    assert SCHEDULES["zb-h1"].corners(5, 8, 1, 64) == (((3, 5), (2, 6)),)
    assert SCHEDULES["1f1b"].corners(1, 4, 1, 64) == (((3, 0),),)
    forward: ComputeStep = ("F", 0, 0)
    half: ComputeStep = ("I", 0, 0)
    one_line: list[ComputeStep] = [
        forward,
        forward,
        forward,
        forward,
        half,
        half,
        half,
    ]  # (4, 0) (3, 1) (2, 2) (1, 3)
    assert chunk_corners(one_line, 1) == (((4, 0), (1, 3)),)


@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_holds_what_its_warm_up_runs_and_one_more(v: int) -> None:
    p, m = 4, 16
    for i in range(p):
        assert _whole("interleaved", i, p, v, m) == 2 * (p - 1 - i) + (v - 1) * p + 1


def _whole(name: str, position: int, p: int, v: int, m: int) -> int:
    """Forwards without their input half, over all chunks."""
    return peak_bytes(SCHEDULES[name].moments(position, p, v, m), [1] * v, [0] * v)


def _held(name: str, position: int, p: int, v: int, m: int) -> int:
    """Forwards without their last backward half, over all chunks."""
    return peak_bytes(SCHEDULES[name].moments(position, p, v, m), [1] * v, [1] * v)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (3, 7), (4, 12)])
@pytest.mark.parametrize(
    "weight_saved_bytes", [0, 4, 15]
)  # 15: the output gradient is larger than what was saved
def test_moments_give_the_peak_of_the_order_itself(
    name: str, p: int, m: int, weight_saved_bytes: int
) -> None:
    schedule = SCHEDULES[name]
    v = schedule.chunks or 2
    graph = chain(name, p, v, SegmentCost(1, 1, 1, 10, weight_saved_bytes))
    peaks = peak_saved_bytes(graph, schedule.order(graph, m))
    for i in range(p):
        assert peaks[i] == peak_bytes(schedule.moments(i, p, v, m), [10] * v, [weight_saved_bytes] * v)


def test_moments_hold_for_chunks_of_unlike_size() -> None:
    moments = SCHEDULES["zb-v"].moments(0, 4, 2, 8)
    assert peak_bytes(moments, [1, 0], [1, 0]) == SCHEDULES["zb-v"].in_flight(0, 4, 2, 8)[0]
    assert peak_bytes(moments, [0, 1], [0, 1]) == SCHEDULES["zb-v"].in_flight(0, 4, 2, 8)[1]
    assert peak_bytes(moments, [3, 5], [1, 2]) < 3 * 7 + 5 * 4


@pytest.mark.parametrize("name", SCHEDULES)
def test_orders_are_the_same_each_time(name: str) -> None:
    graph = chain(name, 3, SCHEDULES[name].chunks or 2)
    assert SCHEDULES[name].order(graph, 7) == SCHEDULES[name].order(graph, 7)
