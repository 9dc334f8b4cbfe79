"""The simulator against closed forms and by hand: time, queues, shared links, contention, memory, traffic."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.errors import DeadlockError, InternalError
from cost_models.links import Link, Path
from runtime.check.check import check
from runtime.program.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Collective,
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
    pair_queue,
)
from runtime.program.timing import quick_makespan
from runtime.schedules import SCHEDULES
from runtime.simulate.fair_share import FairShare
from runtime.simulate.flatten import Overheads
from runtime.simulate.simulation import Simulation
from tests.support.matrix import drawn
from tests.support.random_dags import Case, cases
from tests.support.rank_programs import build_programs
from tests.support.simulate_ranks import simulate_ranks
from tests.support.uniform_links import UniformLinks
from tests.support.work import calls
from tests.unit.runtime.schedules.helpers import chain, gpipe, no_time, one_f_one_b

INSTANT = UniformLinks(math.inf)


class OneWire:
    """All ranks on one shared wire."""

    def __init__(self, bandwidth: float, latency: float = 0.0) -> None:
        self.links = {"wire": Link("wire", bandwidth, latency)}

    def path(self, a: int, b: int) -> Path:
        return Path.over(self.links.values())


def run(graph: SegmentGraph, order: ComputeOrder, microbatches: int, **options: object) -> Simulation:
    programs = build_programs(graph, order, microbatches, transfer_seconds=no_time)
    return simulate_ranks(programs, graph, **{"links": INSTANT, **options})  # type: ignore[arg-type]


# Closed forms


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 4), (4, 8), (8, 16), (7, 30)])
def test_equal_stages_have_the_closed_form_bubble(order: Callable[..., ComputeOrder], p: int, m: int) -> None:
    cost = SegmentCost(0.1, 0.13, 0.07)
    simulation = run(chain(p, cost), order(p, m), m)
    assert simulation.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    assert simulation.step_seconds == pytest.approx((m + p - 1) * 0.3, rel=1e-12)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 8)])
def test_interleaved_stages_have_the_closed_form_bubble(p: int, v: int, m: int) -> None:
    graph = chain(p * v)
    ranks = SCHEDULES["interleaved"].stage_ranks(p * v, range(p))
    graph = replace(
        graph,
        segments=tuple(replace(s, ranks=(r,)) for s, r in zip(graph.segments, ranks, strict=True)),
        world_size=p,
    )
    simulation = run(graph, SCHEDULES["interleaved"].order(graph, m), m)
    assert simulation.bubble_fraction == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)


def test_zero_bubble_h1_idles_a_third_of_1f1b() -> None:
    # p = 4, m = 8, F = I = W = 1: 27 time units, of which 24 are work (Qi et al. 2024, ZB-H1).
    graph = chain(4)
    assert run(graph, SCHEDULES["zb-h1"].order(graph, 8), 8).step_seconds == 27.0


def test_transfers_lengthen_the_first_way_down_and_the_last_way_up() -> None:
    # Two stages, one micro-batch, 10 bytes at 10 B/s + 0.5 s: F, 1.5 s, F B, 1.5 s, B.
    simulation = run(chain(2), gpipe(2, 1), 1, links=UniformLinks(10.0, 0.5))
    assert simulation.step_seconds == 1 + 1.5 + 1 + 2 + 1.5 + 2


@drawn(200)
@given(cases())
def test_random_programs_run_and_never_beat_the_quick_makespan(case: Case) -> None:
    programs = build_programs(
        case.graph, case.orders, case.microbatches, transfer_seconds=case.transfer_seconds, tied=case.tied
    )

    class CaseLinks(UniformLinks):
        def path(self, a: int, b: int) -> Path:
            rate = 1.0 / case.transfer_seconds(a, b, 1) if case.transfer else math.inf
            return Path((f"{a}>{b}",), rate, 0.0)

    for device_queues in (False, True):
        simulation = simulate_ranks(programs, case.graph, links=CaseLinks(1.0), device_queues=device_queues)
        quick = quick_makespan(case.graph, case.orders, case.microbatches, case.transfer_seconds)
        assert simulation.step_seconds >= quick - 1e-9 * quick
        if case.transfer == 0.0 and not device_queues:
            assert simulation.step_seconds == pytest.approx(quick, rel=1e-12)
        for curve in simulation.memory:
            assert curve.bytes_held[-1] == 0, "everything is released by the end of the step"
            assert (curve.bytes_held >= 0).all()


@drawn(50)
@given(cases())
def test_random_programs_run_on_one_shared_wire_with_contention(case: Case) -> None:
    programs = build_programs(
        case.graph, case.orders, case.microbatches, transfer_seconds=case.transfer_seconds
    )
    alone = simulate_ranks(programs, case.graph, links=OneWire(100.0), contention=1.0)
    beside = simulate_ranks(programs, case.graph, links=OneWire(100.0), contention=2.0)
    for simulation in (alone, beside):
        moved = sum(t.size_bytes for t in simulation.transfers)
        assert simulation.link_bytes.get("wire", 0.0) == moved
        assert simulation.step_seconds >= moved / 100.0 * (1 - 1e-9)
    for slow, fast in zip(beside.busy_seconds, alone.busy_seconds, strict=True):
        assert fast * (1 - 1e-9) <= slow <= 2 * fast * (1 + 1e-9)


@drawn(150)
@given(cases(), st.integers(0, 2**32))
def test_the_checker_and_the_simulator_agree_on_what_deadlocks(case: Case, seed: int) -> None:
    """Two communications of a rank swapped: accepted programs run to their end, those with a circle do not."""
    programs = build_programs(
        case.graph, case.orders, case.microbatches, transfer_seconds=case.transfer_seconds
    )
    dice = random.Random(seed)
    for rank, program in enumerate(programs):
        instructions = list(program.instructions)
        found = [i for i, instruction in enumerate(instructions) if isinstance(instruction, Send | Recv)]
        if len(found) < 2:
            continue
        a, b = dice.sample(found, 2)
        instructions[a], instructions[b] = instructions[b], instructions[a]
        swapped = (*programs[:rank], Program(rank, tuple(instructions)), *programs[rank + 1 :])
        device_queues_finish = pair_queues_finish = True
        try:
            check(swapped, case.graph, case.microbatches)
        except InternalError as error:
            if len(error.because) > 1 or "wait for each other forever" not in error.because[0]:
                continue  # also uses a value before it arrives: no question of deadlock
            device_queues_finish, pair_queues_finish = False, "per pair" not in error.because[0]
        for device_queues, finishes in ((True, device_queues_finish), (False, pair_queues_finish)):
            with nullcontext() if finishes else pytest.raises(DeadlockError):
                simulate_ranks(swapped, case.graph, links=INSTANT, device_queues=device_queues)


# Shared links


def test_two_transfers_on_one_wire_get_half_each() -> None:
    share = FairShare(OneWire(10.0))
    wire = OneWire(10.0).path(0, 1)
    assert share.join(0, wire, 100.0, 0.0) == [(0, 10.0)]
    # At 4 s, 60 bytes are left for 5 B/s; the newcomer's 20 bytes end at 8 s, when 40 are left for 10 B/s.
    assert share.join(1, wire, 20.0, 4.0) == [(0, 16.0), (1, 8.0)]
    assert share.leave(1, 8.0) == [(0, 12.0)]
    assert share.leave(0, 12.0) == []


def test_a_transfer_limited_elsewhere_leaves_its_share_to_others() -> None:
    links = {"uplink": Link("uplink", 10.0, 0.0), "thin": Link("thin", 2.0, 0.0)}

    class Cluster:
        def __init__(self) -> None:
            self.links = links

        def path(self, a: int, b: int) -> Path:
            return Path.over([links["uplink"], links["thin"]] if a == 0 else [links["uplink"]])

    cluster = Cluster()
    share = FairShare(cluster)
    share.join(0, cluster.path(0, 2), 20.0, 0.0)
    assert share.join(1, cluster.path(1, 2), 80.0, 0.0) == [(1, 10.0)], "8 of the 10 B/s: max-min fairness"


def test_two_senders_into_one_receiver_share_its_port() -> None:
    segments = tuple(Segment(i, (i,), SegmentCost(1.0, 0.0, 0.0), has_backward=False) for i in range(3))
    values = (Value("a", 0, (2,), 40, False), Value("b", 1, (2,), 40, False))
    graph = SegmentGraph(segments, values, 3)
    order = tuple((Forward(i, 0),) for i in range(3))
    together = run(graph, order, 1, links=OneWire(10.0))
    assert together.step_seconds == 1 + 8 + 1
    assert run(graph, order, 1, links=UniformLinks(10.0)).step_seconds == 1 + 4 + 1
    assert [t.end_seconds for t in together.transfers] == [9.0, 9.0]


def test_the_queue_of_a_pair_moves_one_message_at_a_time() -> None:
    segments = tuple(Segment(i, (i,), SegmentCost(1.0, 0.0, 0.0), has_backward=False) for i in range(2))
    values = (Value("a", 0, (1,), 40, False), Value("b", 0, (1,), 40, False))
    simulation = run(
        SegmentGraph(segments, values, 2), ((Forward(0, 0),), (Forward(1, 0),)), 1, links=OneWire(10.0)
    )
    assert [(t.start_seconds, t.end_seconds) for t in simulation.transfers] == [(1.0, 5.0), (5.0, 9.0)]


def test_a_device_queue_also_serializes_messages_to_different_ranks() -> None:
    segments = tuple(Segment(i, (i,), SegmentCost(1.0, 0.0, 0.0), has_backward=False) for i in range(3))
    graph = SegmentGraph(segments, (Value("a", 0, (1, 2), 40, False),), 3)
    order = tuple((Forward(i, 0),) for i in range(3))
    links = UniformLinks(10.0)
    assert run(graph, order, 1, links=links).step_seconds == 1 + 4 + 1
    assert run(graph, order, 1, links=links, device_queues=True).step_seconds == 1 + 8 + 1


# What slows a rank down


def test_computes_slow_down_only_while_a_transfer_is_under_way() -> None:
    segments = tuple(
        Segment(i, (r,), SegmentCost(4.0, 0.0, 0.0), has_backward=False) for i, r in enumerate([0, 0, 1])
    )
    graph = SegmentGraph(segments, (Value("a", 0, (2,), 20, False),), 2)
    order = ((Forward(0, 0), Forward(1, 0)), (Forward(2, 0),))
    simulation = run(graph, order, 1, links=UniformLinks(10.0), contention=1.6)
    # The transfer takes 2 s from 4 s on; the second forward does 2 / 1.6 s of its work meanwhile.
    assert simulation.timeline[0][1].end_seconds == pytest.approx(4 + 2 + (4 - 2 / 1.6))
    assert simulation.timeline[1][0].end_seconds == pytest.approx(4 + 2 + 4)


def test_overheads_steps_and_reductions_take_time() -> None:
    graph = chain(2)
    programs = build_programs(
        graph, gpipe(2, 1), 1, transfer_seconds=no_time, tied=[TiedGroup(("w",), (0, 1))]
    )
    simulation = simulate_ranks(
        programs,
        graph,
        links=INSTANT,
        overheads=Overheads(compute_seconds=0.25, send_seconds=0.5, receive_seconds=0.125),
        optimizer_seconds=[3.0, 1.0],
        reduce_seconds=lambda reduction: 10.0 * len(reduction.ranks),
    )
    # F+.25 | F+.25 B+.25 | B+.25 on the critical path; rank 0 posts its receive before that; then 20 s, then 3 s.
    assert simulation.step_seconds == 1.25 + 1.25 + 2.25 + 2.25 + 20.0 + 3.0
    assert [span.text for span in simulation.timeline[0]] == ["0F0", "0B0", "+w@0,1", "step"]


def test_what_an_optimizer_makes_is_held_while_it_steps() -> None:
    options = {"optimizer_seconds": [3.0, 1.0], "state_bytes": [1000, 2000]}
    plain = run(chain(2), gpipe(2, 1), 1, **options)
    held = run(chain(2), gpipe(2, 1), 1, update_bytes=[500, 0], **options)
    assert held.step_seconds == plain.step_seconds
    assert held.peak_bytes[1] == plain.peak_bytes[1]
    assert held.peak_bytes[0] == 1000 + 500 > plain.peak_bytes[0]
    step = held.timeline[0][-1]
    changes = list(zip(held.memory[0].seconds.tolist(), held.memory[0].bytes_held.tolist(), strict=True))
    assert changes[-2:] == [(step.start_seconds, 1500.0), (step.end_seconds, 1000.0)]


def test_a_smaller_last_microbatch_is_faster_and_smaller() -> None:
    simulation = run(chain(2), gpipe(2, 2), 2, microbatch_scale=[1.0, 0.5])
    assert [s.end_seconds - s.start_seconds for s in simulation.timeline[0]][:4] == [1.0, 0.5, 2.0, 1.0]
    assert simulation.pair_bytes == {(0, 1): 15.0, (1, 0): 15.0}


# Memory and traffic


def test_memory_of_one_microbatch_by_hand() -> None:
    """saved 100, of which the weight half keeps 40; values of 10 bytes; transfers of 1 s."""
    graph = chain(2)
    order = tuple((Forward(s, 0), BackwardInput(s, 0), BackwardWeight(s, 0)) for s in range(2))
    simulation = run(graph, order, 1, links=UniformLinks(10.0), state_bytes=[1000, 2000])
    # rank 0: F 0-1, sends 1-2, gradient arrives 4-5, I 5-6, W 6-7.   rank 1: F 2-3, I 3-4, W 4-5.
    assert at(simulation, 0, 0.5) == 1000 + 100 + 10
    # The receive of the gradient is posted right after the send is issued: it is one compute ahead.
    assert at(simulation, 0, 1.5) == 1000 + 100 + 10 + 10
    assert at(simulation, 0, 3.0) == 1000 + 100 + 10 + 10
    assert at(simulation, 0, 5.5) == 1000 + 100 + 10 + 10
    assert at(simulation, 0, 6.5) == 1000 + 40
    assert at(simulation, 0, 7.0) == 1000
    assert at(simulation, 1, 1.5) == 2000 + 10
    assert at(simulation, 1, 2.5) == 2000 + 10 + 100
    assert at(simulation, 1, 3.5) == 2000 + 10 + 100 + 10
    assert at(simulation, 1, 4.5) == 2000 + 10 + 40 + 10
    assert at(simulation, 1, 5.0) == 2000
    assert simulation.peak_bytes == (1120, 2120)


def at(simulation: Simulation, rank: int, seconds: float) -> float:
    curve = simulation.memory[rank]
    return float(curve.bytes_held[curve.seconds.searchsorted(seconds, side="right") - 1])


def test_1f1b_holds_as_many_microbatches_as_it_has_in_flight() -> None:
    cost = SegmentCost(1.0, 1.0, 1.0, saved_bytes=1)
    for p, m in ((4, 8), (4, 3), (8, 8)):
        graph = chain(p, cost, size_bytes=0)
        assert run(graph, one_f_one_b(p, m), m).peak_bytes == tuple(min(p - s, m) for s in range(p))
        assert run(graph, gpipe(p, m), m).peak_bytes == (m,) * p


def test_what_backward_computes_again_is_held_while_it_runs() -> None:
    cost = SegmentCost(1.0, 1.0, 0.0, saved_bytes=5, transient_bytes=50)
    graph = SegmentGraph((Segment(0, (0,), cost),), (), 1)
    order = ((Forward(0, 0), Forward(0, 1), Backward(0, 0), Backward(0, 1)),)
    simulation = run(graph, order, 2)
    assert [at(simulation, 0, t) for t in (0.5, 1.5, 2.5, 3.5, 4.0)] == [5, 10, 60, 55, 0]


def test_what_weight_halves_keep_does_not_add_to_what_is_computed_again() -> None:
    cost = SegmentCost(1.0, 1.0, 1.0, saved_bytes=5, weight_saved_bytes=20, transient_bytes=50)
    graph = SegmentGraph((Segment(0, (0,), cost),), (), 1)
    simulation = run(graph, ((Forward(0, 0), BackwardInput(0, 0), BackwardWeight(0, 0)),), 1)
    assert [at(simulation, 0, t) for t in (0.5, 1.5, 2.5, 3.0)] == [5, 55, 20, 0]
    assert simulation.peak_bytes == (55,)


def test_a_value_without_gradient_is_held_until_it_is_sent() -> None:
    segments = tuple(Segment(i, (i,), SegmentCost(1.0, 1.0, 0.0)) for i in range(2))
    graph = SegmentGraph(segments, (Value("mask", 0, (1,), 20, False),), 2)
    simulation = run(graph, gpipe(2, 1), 1, links=UniformLinks(10.0))
    # Rank 0: F 0-1, B 1-2, sends until 3. Rank 1 receives from 0 on, F 3-4, B 4-5.
    assert [at(simulation, 0, t) for t in (0.5, 2.5, 3.5)] == [20, 20, 0]
    assert [at(simulation, 1, t) for t in (0.5, 4.5, 5.0)] == [20, 20, 0]


def test_local_values_and_their_gradients_are_held() -> None:
    segments = tuple(Segment(i, (0,), SegmentCost(1.0, 1.0, 0.0)) for i in range(2))
    graph = SegmentGraph(segments, (Value("x", 0, (1,), 7, True),), 1)
    simulation = run(graph, ((Forward(0, 0), Forward(1, 0), Backward(1, 0), Backward(0, 0)),), 1)
    assert [at(simulation, 0, t) for t in (0.5, 1.5, 2.5, 3.5, 4.5)] == [7, 7, 14, 14, 0]


def test_traffic_is_counted_per_link_and_pair() -> None:
    simulation = run(chain(3), one_f_one_b(3, 4), 4, links=UniformLinks(100.0))
    assert simulation.message_count == 2 * (3 - 1) * 4
    assert simulation.pair_bytes == {(0, 1): 40, (1, 2): 40, (1, 0): 40, (2, 1): 40}
    assert simulation.link_bytes == {"0>1": 40, "1>2": 40, "1>0": 40, "2>1": 40}


def test_idle_ranks_do_not_count_as_bubble() -> None:
    graph = replace(chain(2), world_size=4)
    simulation = run(graph, gpipe(2, 2), 2)
    assert simulation.bubble_fraction == pytest.approx(1 / 3, abs=1e-12)
    assert simulation.timeline[3] == ()


# Refusals


def test_programs_that_deadlock_are_refused_with_where_they_stand() -> None:
    graph = chain(2)
    wrong = Recv(Message("x0", 1, False, 0, 1), pair_queue(0, 1))
    right = Recv(Message("x0", 0, False, 0, 1), pair_queue(0, 1))
    send = [Send(r.message, r.queue) for r in (right, wrong)]
    programs = (
        Program(0, (Forward(0, 0), send[0], Forward(0, 1), send[1])),
        Program(1, (wrong, right, Forward(1, 0), Forward(1, 1))),
    )
    with pytest.raises(DeadlockError, match="rank 1 waits before 1F0"):
        simulate_ranks(programs, graph, links=INSTANT)


def test_a_reduction_without_all_of_its_ranks_is_refused() -> None:
    programs = (Program(0, (ReduceGradients(("w",), (0, 1), "g"),)), Program(1, ()))
    with pytest.raises(DeadlockError, match=r"rank 0 waits before \+w@0,1"):
        simulate_ranks(programs, chain(2), links=INSTANT)


def test_wrong_lengths_are_refused_together() -> None:
    with pytest.raises(InternalError) as caught:
        run(chain(2), gpipe(2, 2), 2, state_bytes=[1], optimizer_seconds=[1.0], microbatch_scale=[1.0])
    assert len(caught.value.because) == 3


def test_twice_the_microbatches_are_simulated_with_twice_the_work() -> None:
    graph = chain(64)

    def work(microbatches: int) -> int:
        orders = one_f_one_b(64, microbatches)
        programs = build_programs(graph, orders, microbatches, transfer_seconds=no_time)
        return calls(lambda: simulate_ranks(programs, graph, links=UniformLinks(1000.0)))

    assert work(128) <= 2.2 * work(64)


def test_a_segment_of_several_ranks_starts_when_all_are_ready() -> None:
    """It lasts its seconds on all of them; its collectives' bytes go round the ring, forward and backward."""
    inside = (
        Collective("all_reduce", ((0, 1),), 100.0, backward=False),
        Collective("reduce_scatter", ((0, 1),), 30.0, backward=True),
    )
    shared = Segment(0, (0, 1), SegmentCost(1.0, 2.0, 0.0, saved_bytes=10), collectives=inside)
    graph = SegmentGraph((shared,), (), 2)
    programs = build_programs(
        graph,
        ((Forward(0, 0), Backward(0, 0), Forward(0, 1), Backward(0, 1)),),
        2,
        transfer_seconds=no_time,
        tied=(TiedGroup(("w",), (0, 1)),),
    )
    result = simulate_ranks(
        programs,
        graph,
        links=INSTANT,
        state_bytes=(5.0, 7.0),
        microbatch_scale=(1.0, 0.5),
        optimizer_seconds=(0.25, 0.5),
        reduce_seconds=lambda _: 4.0,
        reduce_bytes=lambda _: 1000.0,
    )
    assert result.step_seconds == 3.0 + 1.5 + 4.0 + 0.5
    assert [span.start_seconds for span in result.timeline[1]] == [0.0, 1.0, 3.0, 3.5, 4.5, 8.5]
    assert result.timeline[0][:4] == result.timeline[1][:4]
    assert result.busy_seconds == (4.5, 4.5)
    sent = 1.5 * (100.0 + 30.0) + 1000.0
    assert result.pair_bytes == {(0, 1): sent, (1, 0): sent}
    assert result.peak_bytes == (15, 17)
