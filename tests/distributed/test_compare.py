"""``partitioner compare``: a real profile beside its plan, and whatever else somebody may give as one."""

from __future__ import annotations

import gzip
import json
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from partitioner import Plan, partition
from partitioner.cli import run_command
from partitioner.report.compare import compare
from partitioner.report.comparison import ProfileComparison, render_comparison
from partitioner.report.profile import Profile
from partitioner.report.profile_file import read_profile
from passes.search.certificate import Alternative
from runtime.ranks.launch import WorkerPool
from tests.distributed import engine_model as net

PINS = {"embed": 0, "middle": 0, "norm": 1, "head": 1}


def measure(plan_json: str, path: str, samples: int) -> Profile:
    """In a worker: profile some steps, and save the profile."""
    plan = Plan.from_json(plan_json)
    with plan.deploy(
        net.workload(), graph=net.graph(), optimizer=net.groups_by_name, timeout_seconds=20.0
    ) as engine:
        profile = engine.profile([net.batch(samples, seed) for seed in range(5)])
    if dist.get_rank() == 0:
        profile.save(path)
    return profile


def plan_of(schedule: str, cluster: ClusterSpec | None = None) -> Plan:
    return partition(
        net.workload(),
        cluster or ClusterSpec.local(2),
        batch_size=net.SAMPLES,
        microbatches=net.MICROBATCHES,
        schedule=schedule,
        pins=PINS,
        strategy="layer",
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of("1f1b")


@pytest.fixture(scope="module")
def folder(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    plan.save(folder / "plan.json")
    return folder


@pytest.fixture(scope="module")
def profile(plan: Plan, folder: Path, pool: WorkerPool) -> Profile:
    found: list[Profile] = pool.run(
        measure,
        plan.model_dump_json(),
        str(folder / "trace.json"),
        net.SAMPLES,
        world_size=2,
        timeout_seconds=90.0,
    )
    return found[0]


@pytest.fixture(scope="module")
def found(plan: Plan, folder: Path, profile: Profile) -> ProfileComparison:
    return compare(plan, read_profile(folder / "trace.json"))


def test_sums_agree_with_the_profiles_own(found: ProfileComparison, profile: Profile) -> None:
    exact = {"rel": 1e-9}
    for rank, measured, predicted in zip(found.ranks, profile.times, profile.predicted_times, strict=True):
        for parts, side in ((measured, 0), (predicted, 1)):
            assert rank.computing[side] == pytest.approx(parts.forward + parts.backward, **exact)
            assert rank.waiting[side] == pytest.approx(parts.waiting, **exact)
            assert rank.communication[side] == pytest.approx(parts.communication, **exact)
            assert rank.optimizer[side] == pytest.approx(parts.optimizer, **exact)
        whole = (rank.computing, rank.waiting, rank.communication, rank.optimizer)
        assert sum(side.measured for side in whole) + rank.other_seconds == pytest.approx(
            sum(astuple(measured))
        )
    nanoseconds = {"abs": 1e-7}  # of rounding in the trace, some hundred times a nanosecond
    for segment in found.segments:
        total = segment.seconds.measured * segment.computes
        own = sum(
            span.end_seconds - span.start_seconds
            for spans in profile.measured.timeline
            for span in spans
            if span.text.startswith(f"{segment.segment}{segment.kind[0].upper()}")
        )
        assert total == pytest.approx(own, **nanoseconds)
    computed = sum(s.seconds.measured * s.computes for s in found.segments)
    assert computed == pytest.approx(sum(rank.computing.measured for rank in found.ranks), **nanoseconds)
    assert found.step.measured == pytest.approx(profile.measured.step_seconds, **nanoseconds)
    assert found.step.predicted == profile.predicted.step_seconds
    assert found.bubble.measured == pytest.approx(profile.measured.bubble_fraction, abs=1e-5)
    assert found.bubble.predicted == profile.predicted.bubble_fraction
    sent = {(link.source, link.target): link.size_bytes for link in found.links}
    assert sent == profile.measured.message_bytes


def test_corrected_rates_predict_what_was_measured(
    found: ProfileComparison, plan: Plan, folder: Path, profile: Profile
) -> None:
    (model,) = found.factors.devices
    computing = sum(rank.computing.measured for rank in found.ranks)
    own = sum(rank.computing.predicted for rank in found.ranks)
    assert found.factors.devices[model] == pytest.approx(computing / own)
    wrong = abs(found.step.predicted - found.step.measured)
    assert abs(found.corrected_seconds - found.step.measured) < wrong, "closer than without"
    for key in ("bandwidth_bytes_per_second", "latency_seconds"):
        before, after = getattr(plan.cluster.path(0, 1), key), getattr(found.cluster.path(0, 1), key)
        links = found.factors.node_links
        assert links is not None
        assert after == pytest.approx(before * links if key.startswith("latency") else before / links)
    assert "corrected" in found.cluster.provenance
    path = folder / "corrected.yaml"
    found.cluster.save(path)
    assert plan_of("1f1b", ClusterSpec.load(path)).prediction.confidence == found.cluster.provenance


def test_the_choice_holds_only_as_far_as_it_can_be_told(found: ProfileComparison) -> None:
    def with_rival(seconds: float) -> str:
        rival = Alternative(
            strategy="other", feasible=True, reason="", step_seconds=seconds, peak_memory_bytes=1
        )
        tight = replace(rival, feasible=False, step_seconds=1e-9)
        other = replace(found, plan=found.plan.model_copy(update={"alternatives": (rival, tight)}))
        assert other.choice.rival == "other"
        text = " ".join(render_comparison(other).split())
        assert words[other.choice.verdict] in text
        return other.choice.verdict

    words = {
        "stays": "would still be chosen",
        "changes": "another would be chosen",
        "open": "it cannot be told",
        "alone": "only planning anew tells",
    }
    own, least, most = found.corrected_seconds, min(found.factors.all), max(found.factors.all)
    assert least < most
    assert with_rival(1.01 * own / least) == "stays"
    assert with_rival(0.99 * own / most) == "changes"
    assert with_rival(0.99 * own / least) == "open"
    none = replace(found, plan=found.plan.model_copy(update={"alternatives": ()}))
    assert none.choice.verdict == "alone"
    assert words["alone"] in " ".join(render_comparison(none).split())


def test_the_command_prints_it(
    folder: Path, found: ProfileComparison, profile: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["compare", str(folder / "plan.json"), str(folder / "trace.json")]
    profile.save(folder / "trace.json.gz")
    assert run_command([*arguments[:2], str(folder / "trace.json.gz"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.to_dict()))
    assert run_command([*arguments, "-o", str(folder / "out.yaml")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for word in ("residual", "forward", "0 -> 1", "1 -> 0", "waiting", "corrected", "partitioner plan MODEL"):
        assert word in text
    assert ClusterSpec.load(folder / "out.yaml").calibrated


def test_a_profile_of_another_plan_is_refused(
    folder: Path, plan: Plan, profile: Profile, pool: WorkerPool
) -> None:
    trace = read_profile(folder / "trace.json")
    with pytest.raises(UsageError, match="another schedule"):
        compare(plan_of("gpipe").model_copy(update={"microbatches": 2}), trace)
    with pytest.raises(UsageError, match="another schedule"):
        compare(plan_of("zb-h1"), trace)
    other = plan.model_copy(update={"model": plan.model.model_copy(update={"fingerprint": "0" * 64})})
    with pytest.raises(UsageError, match="fingerprint 0000"):
        compare(plan, replace(trace, facts=replace(trace.facts, fingerprint="0" * 64)))
    with pytest.raises(UsageError, match="fingerprint"):
        compare(other, trace)
    three = plan_of("1f1b", ClusterSpec.local(3))
    moved = replace(trace, facts=replace(trace.facts, devices=(0, 2)))
    with pytest.raises(UsageError, match="of devices 0, 2, the plan uses 0, 1"):
        compare(three, moved)
    short = str(folder / "short.json")
    pool.run(measure, plan.model_dump_json(), short, 5, world_size=2, timeout_seconds=90.0)
    with pytest.raises(UsageError, match=f"had 5 samples, the plan's have {net.SAMPLES}"):
        compare(plan, read_profile(Path(short)))


def without(data: dict[str, Any], *names: str) -> dict[str, Any]:
    """The trace without the measured slices of these names."""
    events = [e for e in data["traceEvents"] if e.get("name") not in names or e["ph"] != "X"]
    return {**data, "traceEvents": events}


def test_bad_files_are_told_apart(
    folder: Path, plan: Plan, profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "trace.json").read_text()
    data = json.loads(text)
    facts = data["otherData"]["partitioner_profile"]
    packed = gzip.compress(text.encode())

    def edited(**change: Any) -> str:
        return json.dumps({**data, "otherData": {"partitioner_profile": {**facts, **change}}})

    wrong_time = json.dumps(data).replace('"dur": ', '"dur": -', 1)
    cases: dict[str, tuple[bytes | str, str]] = {
        "truncated": (text[: len(text) // 2], "it was cut off"),
        "truncated in a string": (text[: text.index("rank 0 measured") + 3], "it was cut off"),
        "truncated gzip": (packed[:-100], "it was cut off"),
        "broken gzip": (b"\x1f\x8b" + b"nonsense", "cannot be unpacked"),
        "empty": ("", "not JSON"),
        "binary": (b"\xff\xfe\x00", "not JSON"),
        "a list": ("[1, 2]", "expected a trace"),
        "the plan itself": (plan.model_dump_json(), "expected a trace"),
        "a prediction": (json.dumps({"traceEvents": data["traceEvents"]}), "nothing measured in it"),
        "another format": (edited(format=2), "otherData.partitioner_profile: format"),
        "no ranks": (edited(devices=[]), "devices"),
        "a rank too many": (edited(devices=[0, 1, 2], times=[*facts["times"], facts["times"][0]]), "0 to 2"),
        "times of too few": (edited(times=facts["times"][:1]), "times of 1 ranks"),
        "infinite times": (edited(step_seconds=[float("inf")]), "step_seconds"),
        "a slice less": (json.dumps(without(data, "0F1")), "slices are missing or changed"),
        "slices backwards": (wrong_time, "ts and dur from 0 up"),
    }
    for name, (content, said) in cases.items():
        path = tmp_path / f"{name}.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert run_command(["compare", str(folder / "plan.json"), str(path)]) == 2, name
        error = capsys.readouterr().err
        assert said in " ".join(error.split()), (name, error)
        assert "profile the plan again" in " ".join(error.split())
    assert run_command(["compare", str(folder / "plan.json"), str(tmp_path / "none.json")]) == 2
    assert "no such file" in capsys.readouterr().err
