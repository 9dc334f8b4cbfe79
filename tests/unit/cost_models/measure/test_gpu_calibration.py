"""A GPU's calibration on a CPU: what is measured, kept, gone on with, merged, and what its rates are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cost_models.cluster import ClusterSpec
from cost_models.compute import optimizer_seconds
from cost_models.devices import Device
from cost_models.errors import ClusterError, UsageError
from cost_models.measure import ops, run, timing
from cost_models.measure.calibration import Calibration, Machine, Measurement, PhaseTiming, merged
from cost_models.measure.cases import OpCase, PlannedOp, cases_of, device_cases
from cost_models.measure.fit import fit
from cost_models.measure.gpu_links import measure_links
from cost_models.measure.run import calibrate_device, jobs_of
from cost_models.measure.shown import render_calibration, render_rates
from cost_models.memory import StateBytes
from cost_models.op_profile import OpTimes
from cost_models.variants import calibrated
from partitioner import Workload, partition
from partitioner.cli import run_command
from partitioner.commands.calibrate import _cases as planned_cases
from passes.costs.cases import count_case

CPU = torch.device("cpu")
OPS = [
    PlannedOp("aten.linear.default", (4, 8, 32), "float32", 2 * 32 * 16 * 32),
    PlannedOp("aten.linear.default", (4, 8, 32), "float32", 2 * 32 * 16 * 32),
    PlannedOp("aten.bmm.default", (3, 8, 5), "float32", 2 * 3 * 8 * 7 * 5),
    PlannedOp("aten.gelu.default", (32, 64), "bfloat16", 0),
    PlannedOp("aten.layer_norm.default", (32, 64), "float32", 0),
    PlannedOp("aten.scaled_dot_product_attention.default", (1, 2, 16, 8), "float32", 4 * 2 * 16 * 16 * 8),
    PlannedOp("aten.view.default", (32, 64), "float32", 0),
    PlannedOp("aten.gelu.default", (32, 64), "float64", 0),
]


def cases() -> list[OpCase]:
    return cases_of(OPS, ("float32", "bfloat16"))


def machine(**change: Any) -> Machine:
    made = Machine(
        card="NVIDIA H100 80GB HBM3",
        count=1,
        memory_bytes=85 * 10**9,
        compute_capability="9.0",
        processor="x86_64",
        driver="550.54",
        power_limit_watts=700.0,
        torch="2.13.0",
        cuda="12.8",
        cudnn=91002,
    )
    return made.model_copy(update=change)


# ------------------------------------------------------------------------------------------- what is measured


def test_a_plans_ops_become_cases_of_their_own_sizes() -> None:
    names = [case.name for case in cases()]
    assert names[:4] == [
        "linear float32 32x16x32",
        "matmul float32 3x8x7x5",
        "gelu bfloat16 2048",
        "layer_norm float32 32x64",
    ]
    assert {name.split()[-1] for name in names[4:]} == {"flash", "efficient", "math"}
    assert len(names) == 4 + 3 * 2 == len(set(names)), (
        "each once, causal and full, nothing of a view or of float64"
    )
    linear = cases()[0]
    assert [tuple(t.shape) for t in (*linear.inputs(), *linear.weights())] == [(32, 16), (32, 16)]
    assert linear.call(*linear.inputs(), *linear.weights()).shape == (32, 32)


def test_the_common_cases_have_names_of_their_own_and_can_be_counted() -> None:
    whole, short = device_cases(), device_cases(short=True)
    names = [case.name for case in whole]
    assert len(set(names)) == len(names)
    assert {case.name for case in short} < set(names)
    assert len(short) < len(whole) / 2
    kinds = {(case.kind, case.number) for case in whole}
    for number in ("bfloat16", "float16", "float32"):
        assert {("linear", number), ("conv2d", number), ("scaled_dot_product_attention", number)} <= kinds
    assert ("linear", "tf32") in kinds
    for case in short:
        work = count_case(case)
        assert work.forward[1] > 0, case.name
        moved = sum(work.backward_input) + sum(work.backward_weight)
        assert (moved > 0) == (case.kind not in ("add", "contiguous")), "whose gradient is their result's"
    linear = next(case for case in whole if case.name == "linear bfloat16 4096x4096x4096")
    assert count_case(linear).forward == (2 * 4096**3, 3 * 2 * 4096**2)


def test_tf32_is_allowed_while_it_is_measured_only() -> None:
    (before, case) = torch.backends.cuda.matmul.allow_tf32, next(c for c in device_cases(("tf32",)))
    with case.setting():
        assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_everything_is_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(ops.measure_optimizer, sizes=((4, 16), (2, 2**16)))
    monkeypatch.setattr(run, "measure_optimizer", small)
    path, told = tmp_path / "gpu.json", []
    found = calibrate_device(path, cases(), count_case, CPU, tell=told.append)
    assert Calibration.load(path) == found
    assert len(told) == len(found.records)
    linear = found.records["linear float32 32x16x32"]
    assert linear.parts["forward"].flops == 2 * 32 * 16 * 32
    assert linear.parts["backward"].flops == 2 * linear.parts["forward"].flops
    assert found.records["attention float32 1x2x16x8 causal flash"].share == 0.5
    refused = found.records["attention float32 1x2x16x8 full efficient"]
    assert refused.unsupported, "a CPU has no such kernel"
    assert not refused.parts
    assert set(found.records["overheads"].values) == {"kernel_seconds", "forward_seconds", "backward_seconds"}
    assert min(found.records["overheads"].values.values()) > 0.0
    adamw = found.records["optimizer adamw foreach"].values
    assert adamw["seconds_per_tensor"] > 0.0
    assert found.records["memory"].unsupported == "only CUDA devices tell"
    text = render_calibration(found)
    for word in ("driver unknown", "linear float32", "at most", "links       not measured", "not supported"):
        assert word in text


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every job takes no time; the names in the order in which they ran."""
    ran: list[str] = []

    def job(name: str) -> Callable[..., Measurement]:
        def take(first: Any, *rest: Any) -> Measurement:
            ran.append(" ".join([name, *(str(a) for a in (first, *rest) if isinstance(a, str))]))
            return Measurement(kind=name, values={"x": float(len(ran))})

        return take

    for name in ("measure_memory", "measure_overheads", "measure_optimizer"):
        monkeypatch.setattr(run, name, job(name))
    monkeypatch.setattr(
        run, "measure_case", lambda case, *_: ran.append(case.name) or Measurement(kind=case.kind)
    )
    return ran


def test_it_goes_on_where_it_was_stopped(
    tmp_path: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu.json"
    monkeypatch.setattr(run, "SAVE_SECONDS", -1.0)
    fail = cases()[2].name
    ok = run.measure_case

    def interrupted(case: OpCase, *rest: Any) -> Measurement:
        if case.name == fail:
            raise KeyboardInterrupt
        return ok(case, *rest)

    monkeypatch.setattr(run, "measure_case", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate_device(path, cases(), count_case, CPU)
    kept = Calibration.load(path)
    assert [case.name in kept.records for case in cases()] == [True, True, *[False] * 8]
    quick.clear()
    monkeypatch.setattr(run, "measure_case", ok)
    found = calibrate_device(path, cases(), count_case, CPU)
    assert quick == [case.name for case in cases()[2:]], "nothing is measured twice"
    assert found.records.keys() >= {case.name for case in cases()}
    quick.clear()
    assert calibrate_device(path, cases(), count_case, CPU) == found
    assert quick == []


def test_it_ends_in_time_and_says_what_is_left(tmp_path: Path, quick: list[str]) -> None:
    told: list[str] = []
    calibrate_device(tmp_path / "gpu.json", cases(), count_case, CPU, seconds=-1.0, tell=told.append)
    assert (quick, told) == ([], ["out of time: 24 of 24 are left for the next call"])


def test_a_file_of_another_machine_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    Calibration(machine=machine(), date="2026-01-01").save(path)
    with pytest.raises(UsageError, match="it is of another machine") as caught:
        calibrate_device(path, cases(), count_case, CPU)
    assert any(line.startswith("card: NVIDIA H100") for line in caught.value.because)


def test_links_are_measured_by_size() -> None:
    found = measure_links(2, "cpu", "gloo", sizes=(4096, 2**23))
    assert set(found) == {"message x2", "all_reduce x2", "all_gather x2", "reduce_scatter x2"}
    for record in found.values():
        assert 0.0 < record.values["4096"] < record.values["8388608"]


def test_links_are_jobs_where_there_are_two_gpus() -> None:
    def names(kind: str, devices: int) -> list[str]:
        jobs = jobs_of([], count_case, torch.device(kind), devices)
        return [name for job in jobs for name in job.names if " x" in name]

    assert names("cuda", 1) == names("cpu", 4) == []
    assert names("cuda", 2) == ["message x2", "all_reduce x2", "all_gather x2", "reduce_scatter x2"]
    assert names("cuda", 8)[4:] == ["all_reduce x8", "all_gather x8", "reduce_scatter x8"]


def test_a_round_on_a_gpu_begins_once_the_host_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, **_: Any) -> None:
            pass

        def record(self) -> None:
            done.append("mark")

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, _: Event) -> float:
            return 6.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: done.append("idle"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("sleep" if cycles > 0 else "none"))
    assert timing.round_seconds(lambda: done.append("run"), 3, torch.device("cuda")) == pytest.approx(6e-3)
    assert done == ["run", "idle", "sleep", "mark", "run", "run", "run", "mark", "wait"]


# --------------------------------------------------------------------------------------------------- rates

PLANTED: Mapping[str, float] = {
    "matmul": 0.61,
    "attention": 0.42,
    "attention_backward": 0.31,
    "conv": 0.55,
    "vector": 0.83,
    "memory": 0.88,
}
KERNEL = 3e-6


def planted(device: Device) -> Calibration:
    """A profile as a device with these rates would give it: large ops, and small ones that tell nothing."""

    def seconds(flops: float, moved: float, number: str, share: float, name: str) -> float:
        bandwidth = device.memory_bandwidth_bytes_per_second * PLANTED["memory"]
        computing = (
            share * flops / (device.peak_flops(getattr(torch, number)) * PLANTED[name]) if flops else 0
        )
        return KERNEL + computing + moved / bandwidth

    records: dict[str, Measurement] = {
        "overheads": Measurement(
            kind="overheads",
            values={"kernel_seconds": KERNEL, "forward_seconds": 8e-6, "backward_seconds": 12e-6},
        ),
        "optimizer adamw foreach": Measurement(
            kind="optimizer adamw",
            backend="foreach",
            values={"seconds_per_tensor": 2e-6, "seconds_per_byte": 5e-12},
        ),
        "optimizer adamw fused": Measurement(
            kind="optimizer adamw",
            backend="fused",
            values={"seconds_per_tensor": 1e-6, "seconds_per_byte": 1e-12},
        ),
        "message x2": Measurement(kind="link", values={"65536": 6e-6, "268435456": 6e-6 + 2**28 / 3e11}),
        "tf32": Measurement(
            kind="linear",
            number="tf32",
            parts={"forward": PhaseTiming(flops=1e12, moved_bytes=1e6, seconds=1e-3)},
        ),
    }
    for number in ("bfloat16", "float32"):
        for flops in (1e9, 1e12, 4e12):
            for kind, name in (
                ("linear", "matmul"),
                ("conv2d", "conv"),
                ("scaled_dot_product_attention", "attention"),
            ):
                share = 0.5 if kind.startswith("scaled") else 1.0
                rate = "vector" if number == "float32" else name
                back = "attention_backward" if (name, rate) == ("attention", "attention") else rate
                parts = {
                    "forward": PhaseTiming(
                        flops=flops, moved_bytes=1e8, seconds=seconds(flops, 1e8, number, share, rate)
                    ),
                    "backward": PhaseTiming(
                        flops=flops, moved_bytes=1e8, seconds=seconds(flops, 1e8, number, share, back)
                    ),
                }
                for backend in ("flash", "math") if share < 1 else (None,):
                    slow = 5.0 if backend == "math" else 1.0
                    records[f"{kind} {number} {flops} {backend}"] = Measurement(
                        kind=kind,
                        number=number,
                        share=share,
                        backend=backend,
                        parts={
                            n: p.model_copy(update={"seconds": slow * p.seconds}) for n, p in parts.items()
                        },
                    )
    for moved in (1e6, 2e8, 5e8):
        slow = 10.0 if moved < 1e8 else 1.0  # a small one is in a cache, or waits for the host
        part = PhaseTiming(
            flops=0, moved_bytes=moved, seconds=slow * seconds(0, moved, "float32", 1.0, "vector")
        )
        records[f"add {moved}"] = Measurement(kind="add", number="float32", parts={"forward": part})
    return Calibration(machine=machine(), date="2026-01-31", records=records)


H100 = ClusterSpec.parse("H100-80GB:2")


def test_planted_rates_are_recovered() -> None:
    fitted = fit(planted(H100.devices[0]), H100.devices[0])
    assert fitted.rates.efficiency is not None
    assert dict(fitted.rates.efficiency) == pytest.approx(dict(PLANTED), rel=1e-6)
    assert fitted.rates.launch_overhead_seconds == pytest.approx(10e-6)
    assert fitted.rates.kernel_overhead_seconds == KERNEL
    assert fitted.rates.link_latency_seconds == pytest.approx(6e-6)
    assert fitted.rates.link_bandwidth_bytes_per_second == pytest.approx(3e11)
    assert fitted.samples["matmul"] == 4, "two sizes, both directions; the small one is all memory"
    text = render_rates(fitted, "H100-80GB")
    assert "matmul               61.0% of the data sheet's rate (4 measurements)" in text


def test_a_cluster_plans_with_them_and_survives_being_written(tmp_path: Path) -> None:
    cluster = calibrated(H100, planted(H100.devices[0]))
    assert cluster.calibrated
    assert "NVIDIA H100 80GB HBM3" in cluster.provenance
    device = cluster.devices[1]
    assert dict(device.efficiency) == pytest.approx({**PLANTED, "unaligned": 0.6}), "the preset's stays"
    assert device.peak_flops(torch.bfloat16) == H100.devices[1].peak_flops(torch.bfloat16), (
        "the sheet's, for MFU"
    )
    assert cluster.path(0, 1).latency_seconds == pytest.approx(6e-6)
    cluster.save(tmp_path / "h100.yaml")
    assert ClusterSpec.load(tmp_path / "h100.yaml").devices == cluster.devices
    state = StateBytes(parameters=1000, gradients=1000, optimizer_state=2000, trained=1000)
    assert optimizer_seconds(state, device, "adamw", tensors=3) == pytest.approx(3 * 2e-6 + 1000 * 5e-12)
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048))
    work = Workload(model, torch.zeros(4096, 2048), lambda output, _: output.square().mean(), "two")

    def step(on: ClusterSpec) -> float:
        plan = partition(work, on, batch_size=4096, microbatches=1, max_stages=1, optimizer_memory="none")
        assert plan.prediction.confidence == f"{on.provenance}, stack 2025"
        return plan.prediction.step_seconds

    fast = replace_efficiency(cluster, 1.0)
    assert step(fast) < step(cluster), "ops are charged by the rates, not by the optimizer's table"


def replace_efficiency(cluster: ClusterSpec, vector: float) -> ClusterSpec:
    (node,) = cluster.nodes
    assert node.device is not None
    assert node.device.efficiency is not None
    device = node.device.model_copy(update={"efficiency": {**node.device.efficiency, "vector": vector}})
    return ClusterSpec.from_dict(
        cluster.model_copy(update={"nodes": (node.model_copy(update={"device": device}),)}).to_dict()
    )


def test_a_table_of_optimizers_alone_charges_no_ops() -> None:
    times = OpTimes.from_dict({"optimizer adamw": {"forward": {"line": [1e-6, 0.0, 1e-12]}}})
    assert not times.covers_ops
    for wrong in ({}, {"gelu": {"forward": {"points": [[1, 1]]}}}):
        with pytest.raises(ValueError, match=r"at least elementwise\.forward"):
            OpTimes.from_dict(wrong)


def test_what_was_not_measured_stays() -> None:
    nothing = Calibration(machine=machine(), date="2026-01-31")
    rates = fit(nothing, H100.devices[0]).rates
    assert calibrated(H100, nothing).devices == H100.devices
    assert rates.efficiency is rates.launch_overhead_seconds is rates.op_times is None


def test_the_rates_are_for_the_card_that_was_measured() -> None:
    profile = planted(H100.devices[0])
    with pytest.raises(ClusterError, match="it has no GPU"):
        calibrated(ClusterSpec.local(2), profile)
    node = {"count": 1, "links": "NVLink3"}
    unlike = {
        "nodes": [{"name": "a", "device": "A100-80GB", **node}, {"name": "h", "device": "H100-80GB", **node}],
        "network": "InfiniBand-NDR",
    }
    mixed = calibrated(ClusterSpec.from_dict(unlike), profile)
    assert mixed.devices[0].efficiency["matmul"] == 0.8
    assert mixed.devices[1].efficiency["matmul"] == pytest.approx(PLANTED["matmul"])
    other = profile.model_copy(update={"machine": machine(card="Tesla T4")})
    with pytest.raises(ClusterError, match="A100-80GB, H100-80GB"):
        calibrated(ClusterSpec.from_dict(unlike), other)


# ------------------------------------------------------------------------------------------- files, command


def test_profiles_of_one_machine_are_merged_and_the_latest_counts() -> None:
    old, new = Measurement(kind="a", values={"x": 1.0}), Measurement(kind="a", values={"x": 2.0})
    first = Calibration(machine=machine(), date="2026-01-01", seconds=2.0, records={"a": old, "b": old})
    second = Calibration(machine=machine(), date="2026-01-02", seconds=3.0, records={"a": new})
    found = merged([second, first])
    assert (found.records, found.seconds, found.date) == ({"a": new, "b": old}, 5.0, "2026-01-02")
    with pytest.raises(UsageError, match=r"driver: 550\.54 and 560"):
        merged([first, second.model_copy(update={"machine": machine(driver="560")})])


def corrupted(**changes: object) -> str:
    profile = Calibration(machine=machine(), date="2026-01-01").model_dump(mode="json")
    return json.dumps({**profile, **changes})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "expected a calibration of format 4, got 'list'"),
        (corrupted(kind="cpu"), "got 'cpu' of format 4"),
        (corrupted(kind="gpu calibration", format=2), "got 'gpu calibration' of format 2"),
        (corrupted(format=2), "got 'calibration' of format 2"),
        (corrupted(extra=1), "extra"),
        (corrupted(machine={"card": "x"}), "machine.count"),
        (corrupted(records={"a": {"kind": "x", "share": 0}}), "records.a.share"),
        (
            corrupted(
                records={
                    "a": {"kind": "x", "parts": {"forward": {"flops": 1, "moved_bytes": 1, "seconds": -1}}}
                }
            ),
            "records.a.parts.forward.seconds",
        ),
        (corrupted(records={"a": {"kind": "x", "values": {"y": float("nan")}}}), "records.a.values.y"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        Calibration.load(path)
    assert reason in str(caught.value)


def test_a_gpus_file_of_the_first_format_is_read(tmp_path: Path) -> None:
    data = json.loads(corrupted(kind="gpu calibration", format=1))
    del data["workers"], data["machine"]["kind"]
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(data))
    assert Calibration.load(path, "cuda") == Calibration(machine=machine(), date="2026-01-01")
    with pytest.raises(UsageError, match="it is one of a GPU, which cannot stand for CPU workers"):
        Calibration.load(path, "cpu")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--device tpu", "--device is 'tpu', expected cpu, cuda or cuda:N"),
        ("--device cuda:99", "there is no cuda:99 here"),
        ("--short", "--short is for GPUs"),
        ("--for plan.json", "--for is for GPUs"),
        ("--device cuda --workers 2", "--workers is for CPU workers"),
        ("--merge a.json -o x.json", "--merge takes two files or more"),
        ("--merge a.json b.json --short -o x.json", "--merge measures nothing"),
        ("--merge a.json b.json -o x.json", "cannot read the calibration a.json"),
        ("--device cuda --cluster H100-80GB:1", "--cluster and --cluster-output go together"),
        ("--device cuda --seconds 0", "--seconds is 0, expected more than 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    arguments: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["calibrate", *arguments.split()]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_command_merges_and_writes_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = planted(H100.devices[0])
    names = list(whole.records)
    for file, chosen in (("a.json", names[::2]), ("b.json", names[1::2])):
        records = {name: whole.records[name] for name in chosen}
        whole.model_copy(update={"records": records}).save(tmp_path / file)
    arguments = ["calibrate", "--merge", str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    output = ["-o", str(tmp_path / "c.json")]
    cluster = ["--cluster", "H100-80GB:8", "--cluster-output", str(tmp_path / "cluster.yaml")]
    assert run_command([*arguments, *output, *cluster]) == 0
    assert "matmul" in capsys.readouterr().out
    assert Calibration.load(tmp_path / "c.json").records == whole.records
    written = ClusterSpec.load(tmp_path / "cluster.yaml")
    assert len(written.devices) == 8
    assert written.devices[7].efficiency["matmul"] == pytest.approx(PLANTED["matmul"])
    assert run_command([*arguments, *output, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"]["card"] == machine().card


def test_a_failing_op_is_a_record_that_says_why() -> None:
    case = cases()[0]
    small = replace(case, call=lambda *_: (_ for _ in ()).throw(RuntimeError("no memory\nx")))
    found = ops.measure_case(small, lambda _: count_case(case), CPU)
    assert (found.unsupported, dict(found.parts)) == ("no memory", {})


def test_a_saved_plan_lists_its_own_ops(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).bfloat16()
    inputs = torch.zeros(6, 16, dtype=torch.bfloat16)
    plan = partition(
        Workload(model, inputs, lambda output, _: output.square().mean(), "two"),
        ClusterSpec.parse("A100-80GB:1"),
        batch_size=6,
        microbatches=1,
        strategy="layer",
    )
    plan.save(tmp_path / "plan.json")
    listed = [case.name for case in planned_cases(tmp_path / "plan.json", False, plan.cluster)]
    assert {"linear bfloat16 6x16x32", "linear bfloat16 6x32x8", "gelu bfloat16 192"} <= set(listed)
    plan.model_copy(update={"outline": None}).save(tmp_path / "old.json")
    with pytest.raises(UsageError, match="has no outline"):
        planned_cases(tmp_path / "old.json", False, None)
    with pytest.raises(UsageError, match="none of its ops is of a kind"):
        planned_cases(tmp_path / "plan.json", False, ClusterSpec.parse("V100-32GB:1"))
