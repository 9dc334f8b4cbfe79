"""The layer-wise search on hand-made graphs: placements, pins, unlike devices, memory, errors,
certificate."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, UsageError
from cost_models.op_profile import CostLine, OpTimes
from passes.costs.costs import costs_of
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.search.certificate import Certificate
from passes.search.fastest import fastest_of
from passes.search.infeasible import overflow_bytes
from passes.search.judge import Judge, Simulated
from passes.search.layer.options import (
    ScheduleOption,
    device_table,
    fullest_moments,
    in_flight,
    microbatch_counts,
)
from passes.search.layer.problem import evaluate
from passes.search.layer.provider import LayerProvider
from passes.search.layer.request import LayerRequest, prepare
from passes.search.outcome import Outcome
from runtime.schedules import SCHEDULES, peak_bytes
from tests.support.traced_models import loaded
from tests.unit.passes.search.layer.toys import ToyCosts, ToyJudge, toy_cluster, toy_graph

BIG = 10**9


def _place(
    blocks: int = 8,
    speeds: tuple[float, ...] = (1.0, 1.0),
    towers: int = 1,
    memory: tuple[int, ...] | None = None,
    memory_factor: float = 1.0,
    batch_size: int = 16,
    **request: Any,
) -> Outcome:
    graph = toy_graph(blocks, towers=towers)
    costs = ToyCosts(graph)
    cluster = toy_cluster(speeds, memory or (BIG,) * len(speeds))
    judge = ToyJudge(graph, costs, cluster, batch_size, memory_factor)
    return _searched(LayerRequest(judge.job, **request), judge)


def _searched(request: LayerRequest, judge: ToyJudge) -> Outcome:
    """Search the whole cluster, none of its parts."""
    limit = request.time_limit_seconds
    deadline = math.inf if limit is None else time.perf_counter() + limit
    return fastest_of([LayerProvider(judge, request)], judge, deadline)


def _linears(result: Outcome) -> list[int]:
    """Linear ops per stage."""
    candidate = result.best.candidate
    counts = [0] * len(candidate.ranks)
    for name, stage in candidate.stage_of.items():
        counts[stage] += name.startswith("linear")
    return counts


@pytest.mark.parametrize(
    "unlike",
    [
        {"kernel_overhead_seconds": 1e-3},
        {"launch_overhead_seconds": 1e-3},
        {"op_times": OpTimes(((("linear", "forward"), CostLine(1e-5, 2e-11, 1e-10)),))},
        {"memory_bandwidth_bytes_per_second": 1.0},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_unlike_devices_share_no_row(unlike: dict[str, Any]) -> None:
    """Place and memory make no device faster; all else that seconds depend on does."""
    cluster = toy_cluster((1.0, 1.0, 1.0), (BIG, BIG, 2 * BIG))
    first, second, third = cluster.devices
    devices = (first, replace(second, **unlike), replace(third, node=1, node_name="b"))
    table = device_table(replace(cluster, devices=devices))
    assert table.row_of == (0, 1, 0)


def test_equal_devices_get_equal_stages() -> None:
    result = _place(schedule="1f1b", microbatches=16)
    assert _linears(result) == [4, 4]
    assert result.best.candidate.ranks == (0, 1)
    assert result.certificate.gap == pytest.approx(0.0, abs=1e-6)
    assert result.certificate.solver_status == "optimal"


def test_an_uneven_number_of_blocks_uses_the_first_devices() -> None:
    result = _place(blocks=2, speeds=(1.0,) * 4, schedule="1f1b", microbatches=16)
    assert len(result.best.candidate.ranks) in (2, 3, 4)
    assert result.best.candidate.ranks[:2] == (0, 1)


def test_as_many_devices_as_asked_for_are_used() -> None:
    slow: dict[str, Any] = {"speeds": (1.0, 0.01, 0.01), "blocks": 6}
    assert len(_place(**slow).best.candidate.ranks) == 1, "the slow ones do not help"
    for least in (2, 3):
        result = _place(**slow, min_stages=least)
        assert len(set(result.best.candidate.ranks)) >= least
        assert f"{least} devices or more" in result.certificate.space


def test_more_devices_than_there_are_or_than_the_model_can_be_cut_for_are_refused() -> None:
    with pytest.raises(InfeasibleError, match="the cluster has 2, and min_stages is 3"):
        _place(min_stages=3)
    with pytest.raises(InfeasibleError, match="no split obeys") as error:
        _place(blocks=1, speeds=(1.0,) * 9, min_stages=9)
    assert "min_stages=9 keeps out what fits" in str(error.value)


def test_a_faster_device_gets_more_and_devices_are_taken_in_any_order() -> None:
    result = _place(blocks=8, speeds=(3.0, 1.0), schedule="1f1b", microbatches=16)
    counts = dict(zip(result.best.candidate.ranks, _linears(result), strict=True))
    assert counts == {0: 6, 1: 2}


def test_every_schedule_can_be_asked_for() -> None:
    for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"):
        candidate = _place(schedule=name, microbatches=8).best.candidate
        assert candidate.schedule == name
        assert set(candidate.ranks) == {0, 1}
        assert (len(candidate.ranks) > 2) == (name in ("interleaved", "zb-v"))
        places = SCHEDULES[name].stage_ranks(len(candidate.ranks), (0, 1))
        assert candidate.ranks == places


def test_auto_is_at_least_as_good_as_every_fixed_choice() -> None:
    auto = _place(blocks=8, speeds=(1.0,) * 4)
    for name in ("gpipe", "1f1b", "zb-h1"):
        assert (
            auto.best.step_seconds
            <= _place(blocks=8, speeds=(1.0,) * 4, schedule=name).best.step_seconds + 1e-9
        )
    assert {r.label.kind[0] for r in auto.runner_ups} >= {"1f1b", "zb-h1"}


def test_pins_are_obeyed() -> None:
    result = _place(
        pins={"towers.0.layers.[0-2]": 0, "towers.0.layers.3": 1}, schedule="1f1b", microbatches=16
    )
    assert _linears(result) == [3, 5]
    linears = [stage for name, stage in result.best.candidate.stage_of.items() if name.startswith("linear")]
    assert linears == [0, 0, 0, 1, 1, 1, 1, 1]


def test_pins_across_towers_need_downsets() -> None:
    # program order is tower 0, then tower 1: only a downset puts the end of tower 0 behind the start of
    # tower 1
    pins = {"towers.*.layers.0": 0, "towers.*.layers.1": 1}
    result = _place(blocks=2, towers=2, pins=pins, schedule="1f1b", microbatches=8)
    assert _linears(result) == [2, 2]
    assert "downsets" in result.certificate.space


def test_conflicting_pins_name_both_globs() -> None:
    with pytest.raises(UsageError) as caught:
        _place(pins={"towers.0.layers.1": 0, "towers.0.layers.*": 1})
    assert "'towers.0.layers.1'" in str(caught.value)
    assert "'towers.0.layers.*'" in str(caught.value)
    with pytest.raises(UsageError, match=r"layers.1.*stage 0.*reads from.*layers.0.*stage 1"):
        _place(pins={"towers.0.layers.0": 1, "towers.0.layers.1": 0})
    with pytest.raises(UsageError, match="matches no module path"):
        _place(pins={"encoder.*": 0})


def test_a_pin_beyond_the_devices_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="no split obeys the pins"):
        _place(pins={"towers.0.layers.0": 5})


def test_memory_moves_the_cut() -> None:
    # 8 weights of 64 floats: 16 bytes per element with adamw -> 1,032 bytes each; rank 0 has room for less
    roomy = _place(schedule="gpipe", microbatches=16)
    assert _linears(roomy) == [4, 4]
    tight = _place(schedule="gpipe", microbatches=16, memory=(10**4, BIG))
    held = dict(zip(tight.best.candidate.ranks, _linears(tight), strict=True))
    assert held[0] < 4
    assert tight.best.peak_bytes[0] <= 10**4


def test_simulated_overflow_leads_to_another_search() -> None:
    # the simulation finds twice the memory that the search estimates
    first = _place(schedule="gpipe", microbatches=16, memory=(16_000, BIG))
    doubled = _place(schedule="gpipe", microbatches=16, memory=(16_000, BIG), memory_factor=2.0)
    assert doubled.best.peak_bytes[0] <= 16_000
    assert min(_linears(doubled)) < min(_linears(first))


def test_a_slow_plan_that_fits_does_not_end_the_search_for_fast_ones() -> None:
    # 16 micro-batches are the fastest and overflow by 1% where they are split evenly; 8 fit, 6% slower
    graph = toy_graph(64)
    costs = ToyCosts(graph)
    request = LayerRequest(Job(16), schedule="gpipe")
    roomy = toy_cluster((1.0, 1.0), (BIG, BIG))
    best = _searched(request, ToyJudge(graph, costs, roomy, 16)).best
    cluster = toy_cluster((1.0, 1.0), (round(1.03 * best.peak_bytes[0]), BIG))

    class Heavier(ToyJudge):
        def measure(self, candidate: Candidate) -> Simulated:
            found = super().measure(candidate)
            factor = 1.04 if candidate.microbatches == 16 else 1.0
            peak = [int(factor * each) for each in found.peak_bytes]
            return replace(found, peak_bytes=peak, overflow_bytes=overflow_bytes(peak, self.cluster.devices))

    found = _searched(request, Heavier(graph, costs, cluster, 16))
    assert found.best.candidate.microbatches == 16
    assert best.step_seconds < found.best.step_seconds < 1.03 * best.step_seconds
    slower = [r for r in found.runner_ups if r.fits and "8 micro-batches" in str(r.label)]
    assert slower
    assert sum(not r.fits for r in found.runner_ups) == 1  # and no split is simulated twice


class Reserving(ToyJudge):
    """The allocator reserves half of the first device beyond tensors, unless five linears of eight are there."""

    def measure(self, candidate: Candidate) -> Simulated:
        found = super().measure(candidate)
        first = sum(
            own.startswith("linear") and candidate.ranks[stage] == 0
            for own, stage in candidate.stage_of.items()
        )
        memory = self.cluster.devices[0].memory_bytes
        more = [0 if first == 5 else memory // 2, 0]
        peak = [own + extra for own, extra in zip(found.peak_bytes, more, strict=True)]
        over = overflow_bytes(peak, self.cluster.devices)
        return replace(found, peak_bytes=peak, overflow_bytes=over, allocator_bytes=more, beside_bytes=more)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_what_the_allocator_reserves_of_one_stage_does_not_rule_out_others(schedule: str) -> None:
    """Five linears take more tensors than four do, and are all that fits: smaller devices have no room for them."""
    costs = ToyCosts(graph := toy_graph(8))
    request = LayerRequest(Job(16), schedule=schedule, microbatches=16, min_stages=2)
    roomy = _searched(request, ToyJudge(graph, costs, toy_cluster((1.0, 1.0), (BIG, BIG)), 16)).best
    memory = round(1.4 * max(roomy.peak_bytes))
    found = _searched(request, Reserving(graph, costs, toy_cluster((1.0, 1.0), (memory, memory)), 16))
    assert _linears(found) == [5, 3]


def test_infeasible_says_by_how_much_and_what_would_fit() -> None:
    request: dict[str, Any] = {"blocks": 16, "microbatches": 4, "schedule": "gpipe"}
    with pytest.raises(InfeasibleError) as caught:
        _place(speeds=(1.0,) * 3, memory=(21_000,) * 3, **request)
    error = caught.value
    assert "gpipe with 4 micro-batches of up to 4 samples" in error.because[0]
    assert all("rank" in row and "bytes)" in row for row in error.because[1:])
    assert len(error.because) > 1
    # each way out does fit
    assert any(s.startswith("schedule 1f1b") for s in error.suggestions)
    _place(speeds=(1.0,) * 3, memory=(21_000,) * 3, **{**request, "schedule": "1f1b"})
    more = next(s for s in error.suggestions if s.startswith("more devices"))
    devices = int(more.split(": ")[1].split()[0])
    _place(speeds=(1.0,) * devices, memory=(21_000,) * devices, **request)
    smaller = next(s for s in error.suggestions if s.startswith("a smaller batch"))
    batch = int(smaller.split(": ")[1].split()[0])
    _place(speeds=(1.0,) * 3, memory=(21_000,) * 3, batch_size=batch, **request)


def test_tied_parameters_count_on_every_stage() -> None:
    graph = toy_graph(4, tied=True)
    search = prepare(graph, ToyCosts(graph), toy_cluster((1.0, 1.0), (BIG, BIG)), LayerRequest(Job(4)))
    users = [touch.savers for _, touch in search.model.states]
    assert sorted(map(len, users)) == [1, 1, 1, 2]  # the batch leaf has its reader, too


def test_the_lower_bound_is_below_every_simulation() -> None:
    for speeds in ((1.0, 1.0), (2.0, 1.0, 1.0), (1.0,) * 4):
        for towers in (1, 2):
            result = _place(blocks=5, speeds=speeds, towers=towers)
            simulated = [result.best.step_seconds, *(r.step_seconds for r in result.runner_ups)]
            assert result.certificate.whole_ops_bound_seconds <= min(simulated) * (1 + 1e-12)
            assert result.certificate.whole_ops_bound_seconds >= 0.5 * min(simulated)


def test_a_time_limit_still_gives_a_plan() -> None:
    result = _place(blocks=8, speeds=(1.0,) * 4, time_limit_seconds=1e-6)
    assert result.certificate.solver_status == "time limit"
    assert result.certificate.bound_seconds <= result.certificate.objective_seconds


def test_one_device_is_one_stage() -> None:
    result = _place(speeds=(1.0,), microbatches=4)
    assert result.best.candidate.ranks == (0,)
    assert set(result.best.candidate.stage_of.values()) == {0}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_micro_batches_in_flight_depend_on_the_stages_behind_only(name: str) -> None:
    # stages are numbered from the end: the table for many stages must hold for fewer, or be above it
    for m in (1, 2, 5, 8):
        longest = in_flight(ScheduleOption(m, name, 1), 6, 6)
        for p in range(1, 7):
            exact = tuple(SCHEDULES[name].in_flight(place, p, 1, m)[0] for place in reversed(range(p)))
            assert all(a >= b for a, b in zip(longest, exact, strict=False))
            assert name in ("zb-h1", "zb-h2") or longest[:p] == exact
            assert longest == exact or p < 6


@pytest.mark.parametrize(("name", "chunks"), [("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)])
def test_memory_of_deferred_weight_halves_is_that_of_the_order(name: str, chunks: int) -> None:
    p, schedule = 4, SCHEDULES[name]
    for m in (1, 3, 4, 9, 16):
        places = schedule.positions(p * chunks, p)
        found = fullest_moments(ScheduleOption(m, name, chunks), p, p * chunks)[::-1]
        for whole_bytes, weight_bytes in ((10, 4), (10, 10), (3, 0)):
            for stage, place in enumerate(places):
                own = [0] * chunks
                own[places[:stage].count(place)] = 1
                exact = peak_bytes(
                    schedule.moments(place, p, chunks, m),
                    [whole_bytes * mine for mine in own],
                    [weight_bytes * mine for mine in own],
                )
                assert max(w * whole_bytes + d * weight_bytes for w, d in found[stage]) == exact
    assert fullest_moments(ScheduleOption(8, "1f1b", 1), p, p) == ()


def test_a_zero_bubble_stage_is_charged_for_halves_as_halves() -> None:
    graph = toy_graph(8)
    cluster = toy_cluster((1.0, 1.0), (BIG, BIG))
    last = {}
    for name in ("1f1b", "zb-h1"):
        request = LayerRequest(Job(16), schedule=name, microbatches=16)
        option = prepare(graph, ToyCosts(graph), cluster, request).solve(math.inf)[0]
        last[name] = option.solved[0].split.memory_bytes[-1]
    # 1F1B holds one micro-batch on the last of two stages, ZB-H1 a weight half more: of (linear, relu) pairs it
    # needs what the linears saved and the gradients of their outputs; what the stage received stays with it
    assert last["1f1b"] < last["zb-h1"]
    assert last["zb-h1"] - last["1f1b"] <= 100 * 2 * 4 + 100


def test_micro_batch_counts_divide_the_batch() -> None:
    assert microbatch_counts(12, "auto") == [1, 2, 3, 4, 6, 12]
    assert microbatch_counts(7, "auto") == [1, 2, 4, 7]
    assert microbatch_counts(12, 5) == [5]


def test_a_certificate_refuses_a_bound_above_its_objective() -> None:
    certificate = Certificate(
        objective="o", objective_seconds=1.0, bound_seconds=0.9, gap=0.1, simulated_lower_bound_seconds=0.0,
        space="s", method="m", solver_status="optimal", search_seconds=0.1,
    )  # fmt: skip
    with pytest.raises(ValueError, match="above the objective"):
        replace(certificate, bound_seconds=1.1)


def test_candidates_that_a_bound_rules_out_are_not_simulated_but_listed() -> None:
    graph = toy_graph(8)
    costs, cluster = ToyCosts(graph), toy_cluster((1.0,) * 4, (BIG,) * 4)
    request = LayerRequest(Job(16))
    everything = _searched(request, ToyJudge(graph, costs, cluster, 16))

    class Exact(ToyJudge):
        def lower_bound_seconds(self, candidate: Candidate) -> float:
            return self.measure(candidate).step_seconds

    judge = Exact(graph, costs, cluster, 16)
    exact = _searched(request, judge)
    assert _facts(exact.best) == _facts(everything.best)
    assert len(judge.tried) < 1 + len(everything.runner_ups)
    bounded = [r for r in exact.runner_ups if r.bounded]
    assert bounded
    assert len(bounded) + len(judge.tried) - 1 == len(exact.runner_ups)
    assert all(r.step_seconds >= exact.best.step_seconds for r in bounded)
    assert all(r.step_seconds > 0 and r.peak_bytes > 0 for r in bounded), "estimates of the search"


def _facts(simulated: Simulated) -> tuple[object, ...]:
    """All that a simulated candidate says, to be compared."""
    return vars(simulated.candidate), simulated.step_seconds, simulated.peak_bytes, simulated.overflow_bytes


@pytest.mark.parametrize("last", ["index", "linear"])
def test_a_zero_bubble_stage_keeps_what_it_received_until_its_weight_halves_have_run(last: str) -> None:
    """Logits; and beside tokens the transposed weights of experts, a view where made and a buffer where received."""
    graph, cluster, m = loaded("mixtral")[1], ClusterSpec.parse("dgx-h100:1"), 8
    costs = costs_of(graph, cluster)
    request = LayerRequest(Job(16), microbatches=m, schedule="zb-h1", max_stages=2)
    search = prepare(graph, costs, cluster, request)
    names, unit_of = np.array(search.model.names), search.spaces[0].unit_of
    cut = max(op for op, name in enumerate(names) if name.split("_")[0] == last)
    stages = (unit_of > unit_of[cut]).astype(int)
    problem = search.problem(0, search.options[0])
    assert problem is not None
    stage_of = (np.arange(problem.structure.units) > unit_of[cut]).astype(int).tolist()
    counted = evaluate(problem, stage_of, problem.sequence[:2]).memory_bytes
    placed = dict(zip(names.tolist(), stages.tolist(), strict=True))
    simulated = Judge(graph, costs, cluster, Job(16)).simulate(Candidate(placed, ((0,), (1,)), m, "zb-h1"))
    assert simulated.peak_bytes[1] - simulated.beside_bytes[1] <= counted[1]
