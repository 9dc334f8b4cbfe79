"""``engine.profile``: what is measured adds up, fits the programs, and costs nothing when it is off."""

from __future__ import annotations

import dataclasses
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from partitioner import Plan, partition
from partitioner.engine.engine import Engine
from partitioner.pictures.data import report_data
from partitioner.report.profile import Profile
from runtime.program.program import Forward
from runtime.ranks.clock_offset import clock_offset
from runtime.ranks.launch import WorkerPool
from runtime.ranks.side_group import SideGroup
from tests.distributed import engine_model as net


def handlers(engine: Engine) -> list[Any]:
    """The handlers of every batch shape so far."""
    return [binder.handlers for binder, _ in engine.executor._training._bound.values()]


def measure(plan_json: str, folder: str) -> dict[str, Any]:
    """In a worker: train, profile, train; and what a profile leaves behind."""
    plan = Plan.from_json(plan_json)
    result: dict[str, Any] = {}
    with plan.deploy(
        net.workload(), graph=net.graph(), optimizer=net.groups_by_name, timeout_seconds=20.0
    ) as engine:
        engine.train_step(net.batch())
        before, kept = handlers(engine), [list(one) for one in handlers(engine)]
        hooks = len(engine.optimizer._optimizer_step_pre_hooks)
        batches = (net.batch(samples, seed) for seed, samples in enumerate((8, 8, 8, 3, 8)))
        profile = engine.profile(batches, steps=4, max_grad_norm=1.0)
        after = handlers(engine)
        result["same"] = all(a is b for a, b in zip(before, after, strict=True))
        result["same"] &= all(
            a is b for one, two in zip(kept, after, strict=True) for a, b in zip(one, two, strict=True)
        )
        result["hooks"] = len(engine.optimizer._optimizer_step_pre_hooks) - hooks
        result["left"] = len(list(batches))
        result["step"] = engine.step
        engine.train_step(net.batch())
        try:
            engine.profile([])
        except UsageError as error:
            result["none"] = str(error)
        result["parameters"] = {name: p.detach().clone() for name, p in engine.parameters.items()}
    if dist.get_rank() == 0:
        profile.save(f"{folder}/trace.json")
    return {**result, "profile": profile}


def unmeasured(plan_json: str) -> dict[str, torch.Tensor]:
    with Plan.from_json(plan_json).deploy(
        net.workload(), graph=net.graph(), optimizer=net.groups_by_name, timeout_seconds=20.0
    ) as engine:
        engine.train_step(net.batch())
        for seed, samples in enumerate((8, 8, 8, 3)):
            engine.train_step(net.batch(samples, seed), max_grad_norm=1.0)
        engine.train_step(net.batch())
        return {name: p.detach().clone() for name, p in engine.parameters.items()}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return partition(
        net.workload(),
        ClusterSpec.local(3),
        batch_size=net.SAMPLES,
        microbatches=net.MICROBATCHES,
        schedule="1f1b",
        pins=net.PINS,
        strategy="layer",
    )


@pytest.fixture(scope="module")
def results(plan: Plan, pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("profile")
    found = pool.run(measure, plan.model_dump_json(), str(folder), world_size=3, timeout_seconds=90.0)
    found[0]["folder"] = folder
    return found


def test_off_it_is_not_there_and_on_it_trains_alike(
    plan: Plan, results: list[dict[str, Any]], pool: WorkerPool
) -> None:
    others = pool.run(unmeasured, plan.model_dump_json(), world_size=3, timeout_seconds=60.0)
    for result, parameters in zip(results, others, strict=True):
        assert result["same"], "the very handlers from before run again"
        assert (result["hooks"], result["left"], result["step"]) == (0, 1, 5)
        assert "no batch was given" in result["none"]
        assert all(torch.equal(tensor, parameters[name]) for name, tensor in result["parameters"].items())


def test_a_report_lays_it_under_the_prediction(
    plan: Plan, results: list[dict[str, Any]], tmp_path: Path
) -> None:
    profile: Profile = results[0]["profile"]
    timeline = report_data([plan], measured=profile.measured)["plans"][0]["timeline"]
    for predicted, measured in zip(timeline["lanes"], timeline["measured"]["lanes"], strict=True):
        assert sorted(span[2:] for span in measured["spans"]) == sorted(
            span[2:] for span in predicted["spans"]
        )
    plan.report(tmp_path / "plan.html", profile=profile)
    assert '"measured":{"lanes"' in (tmp_path / "plan.html").read_text()


def test_what_is_measured_fits_the_programs_and_adds_up(plan: Plan, results: list[dict[str, Any]]) -> None:
    profile: Profile = results[0]["profile"]
    for result in results[1:]:
        assert result["profile"].measured == profile.measured, "the same on every rank"
        assert result["profile"].times == profile.times
    assert len(profile.step_seconds) == 4
    assert profile.shown in (1, 2), "neither the first step nor the short one"
    assert profile.samples == net.SAMPLES
    assert profile.clock_error_seconds == 0.0
    step = profile.step_seconds[profile.shown]
    assert profile.measured.step_seconds > max(profile.measured.busy_seconds) > 0.0
    for measured, predicted in zip(profile.measured.timeline, profile.predicted.timeline, strict=True):
        assert sorted(s.text for s in measured) == sorted(s.text for s in predicted)
        assert all(a.end_seconds <= b.start_seconds for a, b in pairwise(measured))
    wholes = [sum(dataclasses.astuple(times)) for times in profile.times]
    assert max(wholes) == pytest.approx(step, rel=1e-9)
    assert all(min(dataclasses.astuple(times)) >= 0.0 for times in profile.times)
    assert all(min(times.forward, times.backward, times.optimizer) > 0.0 for times in profile.times)
    messages = profile.predicted.message_bytes
    assert profile.measured.message_bytes == messages, "bytes as predicted"
    summed = sum(2 * (len(tied.ranks) - 1) * tied.size_bytes for tied in plan.tied)
    assert summed > 0, "the tied weight's gradient"
    assert sum(messages.values()) + summed == plan.prediction.communication_bytes
    assert profile.rates.samples_per_second == pytest.approx(net.SAMPLES / step)
    assert profile.rates.tokens_per_second == pytest.approx(net.SAMPLES * net.LENGTH / step)
    assert 0.0 < profile.measured.bubble_fraction < 1.0


def test_nothing_is_computed_before_it_arrives(results: list[dict[str, Any]]) -> None:
    measured = results[0]["profile"].measured
    arrivals = {t.message: t.end_seconds for t in measured.transfers}
    begins = {s.instruction: s.start_seconds for spans in measured.timeline for s in spans}
    assert all(t.end_seconds >= t.start_seconds for t in measured.transfers)
    activations = [m for m in arrivals if not m.gradient and m.target == m.source + 1]
    assert len(activations) >= 2 * net.MICROBATCHES
    for message in activations:
        assert arrivals[message] <= begins[Forward(message.target, message.microbatch)]


def test_it_prints_draws_and_saves_both_timelines(results: list[dict[str, Any]]) -> None:
    profile: Profile = results[0]["profile"]
    text = str(profile)
    for word in (
        "train_step",
        "bubble",
        "samples/s",
        "tokens/s",
        "MFU",
        "waiting",
        "measured",
        "predicted",
        "1.00x",
    ):
        assert word in text
    assert len([line for line in text.splitlines() if " measured " in line or " predicted " in line]) >= 6
    assert max(map(len, text.splitlines())) <= 120
    picture = profile.timeline(60).splitlines()
    assert [line.partition(":")[0] for line in picture[::4]] == ["measured", "predicted"]
    assert len(picture) == 8
    trace = json.loads((results[0]["folder"] / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert names == {n: f"rank {n % 3} {'measured' if n < 3 else 'predicted'}" for n in range(6)}
    slices = [(e["pid"], e["name"]) for e in trace if e["ph"] == "X"]
    assert sorted((p + 3, n) for p, n in slices if p < 3) == sorted((p, n) for p, n in slices if p >= 3)
    ids = [(e["ph"], e["id"]) for e in trace if e["ph"] in "be"]
    assert len(set(ids)) == len(ids)


# ----------------------------------------------------------------------------------- clocks of other machines

SHIFTS = (0.0, 1000.0, -0.25)


def offsets(shifted: bool) -> tuple[float, float]:
    """In a worker: ranks as if on machines of their own, with clocks that are far apart."""
    rank, side = dist.get_rank(), SideGroup(20.0)
    found = clock_offset(
        side,
        str(rank) if shifted else "one",
        lambda: time.perf_counter() + (SHIFTS[rank] if shifted else 0.0),
    )
    side.close()
    return found.seconds, found.error_seconds


def test_clocks_of_other_machines_are_aligned_within_the_error_they_state(pool: WorkerPool) -> None:
    found = pool.run(offsets, True, world_size=3, timeout_seconds=30.0)
    assert found[0] == (0.0, 0.0)
    for shift, (seconds, error) in zip(SHIFTS[1:], found[1:], strict=True):
        assert abs(seconds - shift) <= error < 0.1
    assert pool.run(offsets, False, world_size=3, timeout_seconds=30.0) == [(0.0, 0.0)] * 3
