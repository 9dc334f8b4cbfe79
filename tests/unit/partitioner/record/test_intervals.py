"""A plan's intervals: which kind it is, and what follows from its facts alone, for earlier plans too."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from cost_models import room
from cost_models.cluster import ClusterSpec
from cost_models.intervals import Spread
from cost_models.room import FILLS
from partitioner.plan import Plan
from partitioner.record import data
from partitioner.record.records import RiskRecord
from partitioner.report.intervals import chance_text, peak_text, rates_text, step_text
from tests.support.made_plans import GIB, made_hybrid_plan, made_plan, made_sharded_plan

DATA = Path(__file__).parents[3] / "data" / "plans"


def gpus(count: int) -> ClusterSpec:
    return ClusterSpec.parse(f"A100-40GB:{count}")


def replicas(count: int, *, first_taken: str = "R") -> Plan:
    """A plan whose ops read all parameters whole, but for a lookup first."""
    plan = made_sharded_plan(gpus(count), {"data": count})
    (stage,) = plan.stages
    assert stage.sharding is not None
    rows = tuple(
        row.model_copy(update={"taken": first_taken if row.op == "embedding" else "R" if row.taken else ""})
        for row in stage.sharding.layouts
    )
    sharding = stage.sharding.model_copy(update={"layouts": rows})
    return plan.model_copy(update={"stages": (stage.model_copy(update={"sharding": sharding}),)})


def without_layouts() -> Plan:
    plan = replicas(4)
    (stage,) = plan.stages
    assert stage.sharding is not None
    sharding = stage.sharding.model_copy(update={"layouts": ()})
    return plan.model_copy(update={"stages": (stage.model_copy(update={"sharding": sharding}),)})


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        (made_plan(gpus(1), (0,)), "one device"),
        (made_plan(gpus(4), (2,)), "one device"),
        (made_plan(gpus(2), (0, 0)), "one device"),
        (made_plan(gpus(2), (0, 1)), "pipeline"),
        (made_plan(gpus(2), (0, 1, 0, 1)), "pipeline"),
        (made_sharded_plan(gpus(4), {"tensor": 4}), "sharded"),
        (replicas(4), "data parallel"),
        (replicas(4, first_taken="S1"), "data parallel"),
        (without_layouts(), "sharded"),
        (made_hybrid_plan(gpus(3), [{"data": 2}, {}]), "sharded"),
    ],
)
def test_a_plan_errs_like_others_of_its_kind(plan: Plan, kind: str) -> None:
    assert plan.intervals.kind == kind


@pytest.fixture
def spreads(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = Spread(0.0, 0.05, 4, 7, 2)
    monkeypatch.setattr(
        data,
        "STEP_SECONDS",
        {("pipeline", "presets"): spread, ("pipeline", "named stack"): Spread(0.0, 0.01, 4, 0, 0)},
    )
    monkeypatch.setattr(room, "PEAK_BYTES", {"cuda": spread, "cpu": Spread(0.0, 0.01, 1, 0, 0)})


@pytest.mark.usefixtures("spreads")
def test_intervals_follow_from_the_spread_of_the_kind() -> None:
    """Student's t with 4 degrees of freedom is below 2.131847 in 95 of 100."""
    plan = made_plan(gpus(2), peak_bytes=35 * GIB)
    found, reach = plan.intervals, math.exp(2.131847 * 0.05)
    assert found.step_seconds == pytest.approx((0.25 / reach, 0.25 * reach), rel=1e-6)
    peak = plan.prediction.peak_memory_bytes["1"]  # the fullest
    assert found.peak_memory_bytes == pytest.approx((peak / reach, peak * reach), rel=1e-6)
    assert found.measured_runs == 7
    assert step_text(plan) == "250 ms (220–280)"
    assert peak_text(plan) == "35.0 GiB (31–39)"
    assert rates_text(plan) == "presets, stack 2025; 90% intervals, from 7 measured runs of pipelines"


@pytest.mark.usefixtures("spreads")
@pytest.mark.parametrize(
    ("share", "chance", "text"),
    [
        (math.exp(-2.131847 * 0.05), 0.05, "5% chance of not fitting"),
        (1.0, 0.5, "50% chance of not fitting"),
        (2.0, 1.0, "99% chance of not fitting"),
        (0.5, 0.0, ""),
    ],
)
def test_the_chance_of_not_fitting_is_that_of_the_fullest_device(
    share: float, chance: float, text: str
) -> None:
    cluster = gpus(2)
    plan = made_plan(cluster, peak_bytes=round(share * cluster.devices[0].memory_bytes))
    assert plan.intervals.chance_of_not_fitting == pytest.approx(chance, abs=2e-3)
    assert chance_text(plan) == text


@pytest.mark.usefixtures("spreads")
@pytest.mark.parametrize(
    ("allowed", "said", "not_safe"),
    [
        (0.2, "13% chance of not fitting (20% allowed)", False),
        (0.005, "13% chance of not fitting (0.5% allowed)", True),
        (FILLS, "13% chance of not fitting", False),
    ],
)
def test_a_plan_says_what_it_was_allowed(allowed: float, said: str, not_safe: bool) -> None:
    cluster = gpus(2)
    memory = cluster.devices[0].memory_bytes
    risk = RiskRecord(allowed=allowed, chance=0.13, room_bytes={"0": memory, "1": memory}, ways=("less",))
    plan = made_plan(cluster, peak_bytes=round(memory * math.exp(-0.0647)), risk=risk)
    assert chance_text(plan) == said
    assert plan.is_too_risky == not_safe
    first = "not safe    13% chance of not fitting, 0.5% allowed; nothing safer was found\ntry         less\nmodel"
    assert str(plan).startswith(first if not_safe else "model")


@pytest.mark.usefixtures("spreads")
def test_software_that_is_named_is_another_kind_of_rates() -> None:
    device = {"preset": "A100-40GB", "stack": "2023"}
    cluster = ClusterSpec.from_dict({"nodes": [{"count": 2, "links": "NVLink3", "device": device}]})
    plan = made_plan(cluster)
    low, high = plan.intervals.step_seconds or (0.0, 0.0)
    assert high / low == pytest.approx(math.exp(2 * 2.131847 * 0.01), rel=1e-6)
    assert rates_text(plan) == (
        "presets, stack 2023; 90% intervals, wide: no pipelines were measured beside such rates"
    )


def test_guessed_rates_have_no_interval_and_memory_has_one() -> None:
    plan = made_plan(ClusterSpec.local(2, "4GiB"))
    assert plan.intervals.step_seconds is None
    assert plan.intervals.peak_memory_bytes.low < 3 * GIB < plan.intervals.peak_memory_bytes.high
    assert step_text(plan) == "250 ms"
    assert rates_text(plan) == (
        "presets of CPU workers, guesses; no interval of the step without a calibration"
    )


def test_kinds_that_were_never_run_have_no_interval_of_the_step_and_that_of_cuda_devices_memory() -> None:
    plan = made_plan(ClusterSpec.parse("MI300X:2"))
    assert plan.intervals.step_seconds is None
    spread = room.PEAK_BYTES["cuda"]
    peak = plan.prediction.peak_memory_bytes[str(plan.fullest_device)]
    assert plan.intervals.peak_memory_bytes == spread.interval(peak)
    assert rates_text(plan) == (
        "presets, stack 2025, unverified in part; no interval of the step: no plan was run on rocm devices; "
        "the peak's is that of CUDA devices"
    )


def test_an_earlier_plan_has_intervals_and_keeps_its_words() -> None:
    plan = Plan.load(DATA / "schema-1.json")
    assert plan.prediction.confidence == "defaults"
    assert 0 < plan.intervals.peak_memory_bytes.low < plan.intervals.peak_memory_bytes.high
    assert "intervals" not in plan.to_dict()
