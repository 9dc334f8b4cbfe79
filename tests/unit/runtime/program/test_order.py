"""The global order of communications: which messages there are, and where each rank issues them."""

from __future__ import annotations

import graphlib
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given

from cost_models.errors import DeadlockError, InternalError
from runtime.program.order import EARLY_BYTES
from runtime.program.program import (
    Backward,
    Compute,
    ComputeOrder,
    Forward,
    Message,
    Program,
    Recv,
    ReduceGradients,
    Segment,
    SegmentCost,
    SegmentGraph,
    Send,
    TiedGroup,
    Value,
)
from runtime.program.timing import quick_makespan, time_orders
from runtime.schedules import SCHEDULES
from tests.support.matrix import drawn
from tests.support.random_dags import Case, cases
from tests.support.rank_programs import build_programs
from tests.support.work import calls
from tests.unit.runtime.schedules.helpers import COST, chain, gpipe, no_time, one_f_one_b, split_backward

LARGE = 2 * EARLY_BYTES


def text(programs: tuple[Program, ...]) -> list[str]:
    return [str(program) for program in programs]


def messages(programs: tuple[Program, ...], kind: type) -> list[Message]:
    return [i.message for p in programs for i in p.instructions if isinstance(i, kind)]


def test_1f1b_two_stages_reads_as_in_the_docs() -> None:
    programs = build_programs(chain(2, size_bytes=LARGE), one_f_one_b(2, 3), 3, transfer_seconds=no_time)
    assert text(programs) == [
        "rank 0: 0F0 >x0:0@1 0F1 >x0:1@1 <d(x0):0@1 0B0 <d(x0):1@1 0F2 >x0:2@1 <d(x0):2@1 0B1 0B2 step",
        "rank 1: <x0:0@0 1F0 <x0:1@0 1B0 >d(x0):0@0 1F1 1B1 >d(x0):1@0 <x0:2@0 1F2 1B2 >d(x0):2@0 step",
    ]


def test_split_backward_sends_the_gradient_before_the_weight_half() -> None:
    programs = build_programs(chain(2), split_backward(gpipe(2, 1)), 1, transfer_seconds=no_time)
    assert text(programs)[1] == "rank 1: <x0:0@0 1F0 1I0 >d(x0):0@0 1W0 step"


def test_a_value_goes_once_to_each_rank_and_its_gradient_comes_back_once() -> None:
    segments = tuple(Segment(i, (rank,), COST) for i, rank in enumerate([0, 1, 1, 2]))
    values = (
        Value("x", 0, (1, 2, 3), 8, True),
        Value("mask", 0, (3,), 8, False),
        Value("y", 1, (2,), 8, True),
        Value("z", 2, (3,), 8, True),
    )
    graph = SegmentGraph(segments, values, 4)
    orders = ((Forward(0, 0), Backward(0, 0)), (Forward(1, 0), Forward(2, 0), Backward(2, 0), Backward(1, 0)),
              (Forward(3, 0), Backward(3, 0)))  # fmt: skip
    programs = build_programs(graph, orders, 1, transfer_seconds=no_time)
    assert sorted(messages(programs, Send)) == sorted(messages(programs, Recv))
    assert {m.label + f" {m.source}>{m.target}" for m in messages(programs, Send)} == {
        "x:0 0>1", "x:0 0>2", "mask:0 0>2", "z:0 1>2", "d(x):0 1>0", "d(x):0 2>0", "d(z):0 2>1",
    }  # fmt: skip
    rank1 = str(programs[1]).split()
    assert rank1.index(">d(x):0@0") > rank1.index("1B0"), (
        "the gradients of both local consumers are summed first"
    )
    assert programs[3].instructions == ()


def test_large_receives_are_posted_one_compute_ahead_but_not_from_the_start() -> None:
    programs = build_programs(chain(2, size_bytes=LARGE), gpipe(2, 4), 4, transfer_seconds=no_time)
    assert str(programs[1]).startswith("rank 1: <x0:0@0 <x0:1@0 1F0 <x0:2@0 1F1 <x0:3@0 1F2 1F3")


def test_small_receives_are_posted_as_early_as_the_order_allows() -> None:
    programs = build_programs(chain(2), gpipe(2, 4), 4, transfer_seconds=no_time)
    assert str(programs[1]).startswith("rank 1: <x0:0@0 <x0:1@0 <x0:2@0 <x0:3@0 1F0 1F1 1F2 1F3")
    assert " >x0:3@1 <d(x0):0@1 <d(x0):1@1 <d(x0):2@1 <d(x0):3@1 0B0 " in str(programs[0])


def test_receives_posted_early_hold_a_bounded_amount_of_memory() -> None:
    size = EARLY_BYTES // 2
    programs = build_programs(chain(2, size_bytes=size), gpipe(2, 6), 6, transfer_seconds=no_time)
    assert str(programs[1]).startswith(
        "rank 1: <x0:0@0 <x0:1@0 <x0:2@0 <x0:3@0 1F0 <x0:4@0 1F1 <x0:5@0 1F2 1F3"
    )


def test_slow_transfers_are_posted_earlier() -> None:
    slow = build_programs(chain(2), gpipe(2, 8), 8, transfer_seconds=lambda s, t, n: 2.0)
    words = str(slow[0]).split()
    # Backwards take 2 s each and gradients 2 s: without a longer lead than one compute every backward would wait.
    assert words.index("<d(x0):2@1") < words.index("0B1")


def test_tied_gradients_are_summed_after_the_last_backward_and_before_the_step() -> None:
    programs = build_programs(
        chain(3),
        one_f_one_b(3, 2),
        2,
        transfer_seconds=no_time,
        tied=[TiedGroup(("wte",), (2, 0)), TiedGroup(("alone",), (1,))],
    )
    assert str(programs[0]).endswith("0B1 +wte@0,2 step")
    assert str(programs[2]).endswith("2B1 >d(x1):1@1 +wte@0,2 step")
    assert "+" not in str(programs[1])


def test_overlapping_reductions_have_one_order_everywhere() -> None:
    tied = [TiedGroup(("a",), (0, 1, 2)), TiedGroup(("b",), (1, 2)), TiedGroup(("c",), (0, 1))]
    programs = build_programs(chain(3), gpipe(3, 2), 2, transfer_seconds=no_time, tied=tied)
    orders = [[i.parameters[0] for i in p.instructions if isinstance(i, ReduceGradients)] for p in programs]
    joined = orders[1]
    assert sorted(joined) == ["a", "b", "c"]
    assert all(order == [name for name in joined if name in order] for order in orders)


def test_forward_only_programs_have_no_gradients_and_no_step() -> None:
    orders = tuple(tuple(c for c in order if isinstance(c, Forward)) for order in gpipe(2, 2))
    programs = build_programs(
        chain(2), orders, 2, transfer_seconds=no_time, training=False, tied=[TiedGroup(("w",), (0, 1))]
    )
    assert text(programs) == [
        "rank 0: 0F0 >x0:0@1 0F1 >x0:1@1",
        "rank 1: <x0:0@0 <x0:1@0 1F0 1F1",
    ]


def test_an_order_whose_computes_wait_in_a_circle_is_refused() -> None:
    orders = ((Backward(0, 0), Forward(0, 0)), (Forward(1, 0), Backward(1, 0)))
    with pytest.raises(DeadlockError) as caught:
        build_programs(chain(2), orders, 1, transfer_seconds=no_time)
    assert "rank 0: 0B0 waits for d(x0):0" in str(caught.value)
    assert "rank 1: 1F0 waits for x0:0" in str(caught.value)


def test_all_impossible_things_are_reported_at_once() -> None:
    frozen = SegmentGraph(
        (Segment(0, (0,), COST), Segment(1, (1,), COST, has_backward=False)),
        (Value("x", 0, (1,), 8, True),),
        2,
    )
    with pytest.raises(InternalError) as caught:
        build_programs(
            frozen, ((Forward(0, 0), Forward(1, 0)), (Forward(5, 0),)), 1, transfer_seconds=no_time
        )
    assert "1F0 belongs on ranks (1,)" in str(caught.value)
    assert "5F0 names a segment that does not exist" in str(caught.value)
    assert "value x needs a gradient but segment 1 has no backward" in str(caught.value)


def test_missing_computes_are_reported() -> None:
    orders = ((Forward(0, 0), Backward(0, 0)), (Forward(1, 0), Backward(1, 0)))
    with pytest.raises(InternalError, match="the orders lack 1F1"):
        build_programs(chain(2), orders, 2, transfer_seconds=no_time)


def test_ranks_of_a_group_get_one_order_and_sums_in_one_order() -> None:
    graph = SegmentGraph((Segment(0, (0, 1, 2, 3), COST),), (), 4)
    tied = (
        TiedGroup(("a",), (0, 2), scattered=True),
        TiedGroup(("a",), (0, 1)),
        TiedGroup(("a",), (2, 3)),
        TiedGroup(("a",), (1, 3), scattered=True),
    )
    programs = build_programs(
        graph, ((Forward(0, 0), Backward(0, 0)),), 1, transfer_seconds=no_time, tied=tied
    )
    assert [str(program) for program in programs] == [
        "rank 0: 0F0 0B0 +/a@0,2 +a@0,1 step",
        "rank 1: 0F0 0B0 +a@0,1 +/a@1,3 step",
        "rank 2: 0F0 0B0 +/a@0,2 +a@2,3 step",
        "rank 3: 0F0 0B0 +a@2,3 +/a@1,3 step",
    ]


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (4, 4), (4, 9), (8, 32)])
def test_quick_makespan_of_equal_stages_is_the_closed_form(order, p: int, m: int) -> None:  # type: ignore[no-untyped-def]
    # (m + p − 1) (F + B) without transfer time: Huang et al., GPipe.
    assert quick_makespan(chain(p), order(p, m), m, no_time) == (m + p - 1) * 3.0


@drawn(100)
@given(cases())
def test_programs_keep_the_orders_and_project_one_order(case: Case) -> None:
    programs = build_programs(
        case.graph, case.orders, case.microbatches, transfer_seconds=case.transfer_seconds, tied=case.tied
    )
    timing = time_orders(case.graph, case.orders, case.microbatches, case.transfer_seconds)
    assert (
        timing.makespan_seconds
        >= max((sum(_seconds(case, c) for c in o) for o in case.orders), default=0.0) - 1e-9
    )
    before: dict[object, set[object]] = {}
    for program, order in zip(programs, case.orders, strict=True):
        assert tuple(i for i in program.instructions if isinstance(i, Compute)) == order
        issued = [_key(i) for i in program.instructions if isinstance(i, Send | Recv | ReduceGradients)]
        for earlier, later in pairwise(issued):
            before.setdefault(later, set()).add(earlier)
    assert _acyclic(before), "the ranks' communications are no projections of one order"


def _seconds(case: Case, compute) -> float:  # type: ignore[no-untyped-def]
    cost = case.graph.segments[compute.segment].cost
    return {"F": cost.forward_seconds, "B": cost.backward_seconds, "I": cost.backward_input_seconds,
            "W": cost.backward_weight_seconds}[str(compute).lstrip("0123456789")[0]]  # fmt: skip


def _key(instruction: Send | Recv | ReduceGradients) -> object:
    return instruction if isinstance(instruction, ReduceGradients) else instruction.message


def _acyclic(before: dict[object, set[object]]) -> bool:
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_published_schedules_keep_their_makespan(name: str) -> None:
    """Without transfer time the programs' computes are timed as the schedule means them: no rank idles twice."""
    p, m = 4, 8
    schedule = SCHEDULES[name]
    chunks = schedule.chunks or 2
    ranks = schedule.stage_ranks(p * chunks, range(p))
    graph = SegmentGraph(
        tuple(Segment(i, (r,), SegmentCost(1.0, 1.0, 1.0)) for i, r in enumerate(ranks)),
        tuple(Value(f"x{i}", i, (i + 1,), 8, True) for i in range(p * chunks - 1)),
        p,
    )
    orders = schedule.order(graph, m)
    makespan = quick_makespan(graph, orders, m, no_time)
    work = 3.0 * m * chunks
    bubble = {"gpipe": 9.0, "1f1b": 9.0, "interleaved": 9.0, "zb-h1": 3.0}.get(name)
    assert makespan >= work
    if bubble is not None:
        assert makespan == work + bubble


def test_twice_the_microbatches_take_twice_the_work() -> None:
    graph = chain(64)
    few, many = one_f_one_b(64, 64), one_f_one_b(64, 128)

    def growth(run: Callable[[ComputeOrder, int], object]) -> float:
        return calls(lambda: run(many, 128)) / calls(lambda: run(few, 64))

    assert growth(lambda orders, m: quick_makespan(graph, orders, m, no_time)) <= 2.2
    assert growth(lambda orders, m: build_programs(graph, orders, m, transfer_seconds=no_time)) <= 2.2
