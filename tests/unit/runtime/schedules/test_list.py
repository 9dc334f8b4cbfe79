"""The list scheduler: any DAG, any placement, within limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.errors import UsageError
from runtime.program.program import SegmentCost, SegmentGraph
from runtime.schedules import (
    SCHEDULES,
    inference_order,
    limits_within,
    list_order,
)
from tests.support.matrix import drawn
from tests.unit.runtime.schedules.tools import (
    HALF,
    UNIT,
    chain,
    clock,
    default_limits,
    faults,
    graph_of,
    peak_saved_bytes,
)


@st.composite
def free(draw: st.DrawFn) -> SegmentGraph:
    """A random DAG whose segments sit on any device groups, overlapping ones too, at random cost."""
    count, world = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    edges = [(a, b) for b in range(count) for a in range(b)]
    ranks = [
        tuple(sorted(draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=2)))) for _ in range(count)
    ]
    seconds = st.sampled_from([0.0, 0.1, 1.0, 3.0])
    costs = [SegmentCost(draw(seconds), draw(seconds), draw(seconds), 10, 4) for _ in range(count)]
    chosen = draw(st.sets(st.sampled_from(edges), max_size=2 * count)) if edges else set()
    frozen = draw(st.sets(st.integers(0, count - 1)))
    integers = draw(st.sets(st.sampled_from(sorted(chosen)))) if chosen else set()
    return graph_of(ranks, chosen, costs, frozen, world, integers)


@drawn(250)
@given(free(), st.integers(1, 7), st.sampled_from([0.0, 0.3, 5.0]), st.integers(0, 60))
def test_any_dag_on_any_placement_within_memory(
    graph: SegmentGraph, microbatches: int, latency_seconds: float, memory_bytes: int
) -> None:
    memory = [memory_bytes] * graph.world_size
    order = SCHEDULES["list"].order(graph, microbatches, memory, lambda source, target, size: latency_seconds)
    assert faults(graph, order, microbatches, split=False) == []
    one = limits_within(graph, [1] * graph.world_size, memory)
    for rank, peak in enumerate(peak_saved_bytes(graph, order)):
        one_microbatch = sum(10 for s in graph.of_rank(rank) if s.has_backward)
        assert peak <= max(memory_bytes, one[rank] * one_microbatch)


@drawn(100)
@given(free(), st.integers(1, 5), st.integers(1, 3))
def test_any_limit_in_halves_and_whole(graph: SegmentGraph, m: int, limit: int) -> None:
    limits = [limit] * graph.world_size
    split = list_order(graph, m, limits=limits, mode="split")
    assert faults(graph, split, m, split=True) == []
    whole = list_order(graph, m, limits=limits)
    assert faults(graph, whole, m, split=False) == []


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (3, 8), (4, 8), (6, 9), (8, 30)])
def test_greedy_is_1f1b_within_its_limits(p: int, m: int) -> None:
    graph = chain("list", p, cost=HALF)
    one_f_one_b = SCHEDULES["1f1b"].order(graph, m)
    assert list_order(graph, m, limits=[p - i for i in range(p)]) == one_f_one_b
    assert default_limits(graph, m) == tuple(min(m, p - i) for i in range(p))
    assert SCHEDULES["list"].order(graph, m) == one_f_one_b


def test_greedy_is_not_zb_h1() -> None:
    graph = chain("list", 4)
    within_1f1b = list_order(graph, 8, limits=[4, 3, 2, 1], mode="split")
    within_zb_h1 = list_order(graph, 8, limits=[4, 4, 4, 4], mode="split")
    assert clock(graph, within_1f1b, split=True).makespan == 30
    assert clock(graph, within_zb_h1, split=True).makespan == 29  # ZB-H1 itself takes 27


def test_independent_branches_run_side_by_side() -> None:
    #      1 (rank 0)
    #    /           \
    #  0              3     one micro-batch, forward only: 0, then 1 beside 2, then 3
    #    \           /
    #      2 (rank 1)
    graph = graph_of([(0,), (0,), (1,), (0,)], [(0, 1), (0, 2), (1, 3), (2, 3)])
    order = inference_order(graph, 1)
    assert [[str(i) for i in instructions] for instructions in order] == [["0F0", "1F0", "3F0"], ["2F0"]]
    assert clock(graph, order, split=False).makespan == 3


def test_the_longer_path_goes_first() -> None:
    short, long = 1, 2  # both on rank 0 after segment 0; segment 3 on rank 1 hangs on the long one
    graph = graph_of([(0,), (0,), (0,), (1,)], [(0, short), (0, long), (long, 3)])
    assert [str(i) for i in inference_order(graph, 1)[0]] == ["0F0", "2F0", "1F0"]


def test_nobody_waits_for_a_gradient_that_never_comes() -> None:
    # 0 hands 1 an integer mask: 0's own backward (it has other outputs) does not wait for the slow one of 1.
    costs = [SegmentCost(1, 1, 0), SegmentCost(50, 50, 0)]
    waits = graph_of([(0,), (1,)], [(0, 1)], costs)
    free_to_go = graph_of([(0,), (1,)], [(0, 1)], costs, integers=[(0, 1)])
    assert default_limits(waits, 9) == (2, 1)
    assert default_limits(free_to_go, 9) == (1, 1)


def test_a_layer_wise_lstm_is_a_wavefront() -> None:
    layers, steps = 3, 5
    edges = [(t * layers + n, t * layers + n + 1) for t in range(steps) for n in range(layers - 1)]
    edges += [(t * layers + n, (t + 1) * layers + n) for t in range(steps - 1) for n in range(layers)]
    graph = graph_of([(s % layers,) for s in range(layers * steps)], edges)
    assert clock(graph, inference_order(graph, 1), split=False).makespan == layers + steps - 1


def test_slow_links_put_more_microbatches_in_flight() -> None:
    graph = chain("list", 3)
    assert default_limits(graph, 20) == (3, 2, 1)
    # A micro-batch is away from rank 0 for 9 units of work and 4 transfers of 3; a period is 3.
    assert default_limits(graph, 20, lambda source, target, size: 3.0) == (7, 4, 1)


def test_memory_lowers_the_limits_but_not_below_one() -> None:
    graph = chain("list", 3)  # saves 10 bytes per micro-batch and rank
    assert limits_within(graph, (9, 9, 9), (45, 10, 3)) == (4, 1, 1)
    order = SCHEDULES["list"].order(graph, 8, [25, 20, 10])
    assert peak_saved_bytes(graph, order) == (20, 20, 10)


def test_no_microbatch_and_no_limit_are_refused_together() -> None:
    with pytest.raises(UsageError, match=r"(?s)a micro-batch, not 0.*a limit of 1 or more, not \[1, 0\]"):
        list_order(chain("list", 2), 0, limits=[1, 0])
    with pytest.raises(UsageError, match="no segments"):
        inference_order(SegmentGraph((), (), 1), 2)


def test_twice_the_limits_where_instructions_queue() -> None:
    # Four chunks on two ranks, one micro-batch alone takes 24 units, a rank's work per micro-batch is 12: two in
    # flight by Little's law, yet with both chunks of a rank queueing the step is longer than with four.
    graph = chain("list", 2, chunks=4)
    limits = default_limits(graph, 16)
    tight = clock(graph, list_order(graph, 16, limits=limits), split=False, seconds=_units).makespan
    chosen = clock(graph, SCHEDULES["list"].order(graph, 16), split=False, seconds=_units).makespan
    assert chosen < tight
    held = SCHEDULES["list"].order(graph, 16, [limits[0] * 40, limits[1] * 40])
    assert clock(graph, held, split=False, seconds=_units).makespan == tight


def _units(instruction: object) -> float:
    return 1 if type(instruction).__name__ == "Forward" else UNIT.backward_seconds
