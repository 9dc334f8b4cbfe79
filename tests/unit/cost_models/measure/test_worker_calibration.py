"""Calibrations: fits recover what was planted, files are data that nobody needs to trust, local clusters use them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cost_models.cluster import ClusterSpec
from cost_models.compute import optimizer_seconds
from cost_models.conversion import group_links
from cost_models.errors import UsageError
from cost_models.files import CALIBRATION, calibration_path
from cost_models.measure import run
from cost_models.measure.calibration import Calibration, Machine, Measurement, PhaseTiming
from cost_models.measure.cases import OpCase, worker_cases
from cost_models.measure.fit import STANDS_FOR_ALL, fit_curve, fit_line, worker_rates
from cost_models.measure.messages import fit_latency
from cost_models.measure.ops import CaseSeconds, CaseWork, time_case, worker_record
from cost_models.measure.shown import render_calibration
from cost_models.measure.stored import stored_calibration
from cost_models.memory import StateBytes
from cost_models.op_profile import ARITHMETIC, CostCurve, CostLine, OpTimes, Phase, kind_of, op_phase_seconds
from passes.costs.cases import count_case


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def op_times() -> OpTimes:
    return OpTimes(
        (
            (("elementwise", "backward_input"), CostCurve(((1e3, 4e-6), (1e6, 400e-6)))),
            (("elementwise", "forward"), CostCurve(((1e3, 2e-6), (1e6, 200e-6)))),
            (("linear", "forward"), CostLine(5e-6, 1e-11, 2e-11)),
            (("optimizer adamw", "forward"), CostLine(20e-6, 0.0, 4e-10)),
            (("view", "forward"), CostCurve(((1.0, 1e-6),))),
        )
    )


LINE = CostLine(5e-6, 1e-11, 2e-11)


def measured(kind: str, phase: Phase, *samples: tuple[float, float, float]) -> dict[str, Measurement]:
    """Records of one kind: (FLOPs, bytes, seconds) of each."""
    return {
        f"{kind} {phase} {number}": Measurement(
            kind=kind,
            number="float32",
            parts={phase: PhaseTiming(flops=flops, moved_bytes=moved, seconds=seconds)},
        )
        for number, (flops, moved, seconds) in enumerate(samples)
    }


def link(**seconds: float) -> Measurement:
    return Measurement(
        kind="link", backend="gloo", values={size.removeprefix("of_"): s for size, s in seconds.items()}
    )


def calibration(**change: object) -> Calibration:
    works = [(2.0 * n**3, 12.0 * n**2) for n in (8, 64, 512)]
    lines = [(f, b, float(LINE.seconds(array(f), array(b))[0])) for f, b in works]
    rates = {"float32": 9e10, "float64": 4e10, "bfloat16": 3e11}
    whole = Calibration(
        machine=Machine.this(torch.device("cpu")),
        date="2026-01-31T12:00:00+00:00",
        workers=2,
        seconds=12.0,
        records={
            **measured("mul", "forward", (0, 1e3, 2e-6), (0, 1e6, 200e-6)),
            **measured("mul", "backward_input", (0, 1e3, 4e-6), (0, 1e6, 400e-6)),
            **measured("view", "forward", (0, 0, 1e-6)),
            **measured("linear", "forward", *lines),
            **{
                f"product {number}": Measurement(
                    kind="product",
                    number=number,
                    parts={"forward": PhaseTiming(flops=rate, moved_bytes=1, seconds=1)},
                )
                for number, rate in rates.items()
            },
            "copy": Measurement(
                kind="copy", parts={"forward": PhaseTiming(flops=0, moved_bytes=3e10, seconds=1)}
            ),
            "optimizer adamw single": Measurement(
                kind="optimizer adamw",
                backend="single",
                values={"seconds_per_tensor": 20e-6, "seconds_per_byte": 4e-10},
            ),
            "message x2": link(of_1000=60e-6, of_3000060=60e-6 + 3000060 / 3e9),
            "all_reduce x2": link(of_1000=1e-4, of_1000000=1e-3),
            "all_gather x2": link(of_1000=5e-5, of_1000000=4e-4),
            "host": Measurement(
                kind="host",
                values={
                    "busy_slowdown": 1.1,
                    "contention": 1.3,
                    "compute_seconds": 7e-6,
                    "send_seconds": 30e-6,
                    "receive_seconds": 10e-6,
                },
            ),
        },
    )
    return whole.model_copy(update=change)


def on_machine(**change: object) -> Calibration:
    return calibration(machine=calibration().machine.model_copy(update=change))


# ------------------------------------------------------------------------------------------------ fits


def test_a_line_is_recovered_from_its_points() -> None:
    line = CostLine(8e-6, 1.1e-11, 4e-11)
    works = [(2.0 * n**3, 12.0 * n**2) for n in (8, 32, 64, 256, 512)]
    found = fit_line([(f, b, float(line.seconds(array(f), array(b))[0])) for f, b in works])
    assert found.overhead_seconds == pytest.approx(8e-6, rel=1e-6)
    assert found.seconds_per_flop == pytest.approx(1.1e-11, rel=1e-6)
    assert found.seconds_per_byte == pytest.approx(4e-11, rel=1e-6)


def test_a_line_never_has_a_negative_price() -> None:
    # Faster per FLOP as it grows, with bytes that mislead: unconstrained least squares would go below zero.
    found = fit_line([(1e6, 9e6, 2e-5), (1e8, 1e6, 1.2e-3), (1e9, 9e7, 1.0e-2), (2e9, 1e6, 2.1e-2)])
    assert min(found.overhead_seconds, found.seconds_per_flop, found.seconds_per_byte) >= 0.0
    assert found.seconds_per_flop > 0.0


def test_a_curve_never_falls() -> None:
    found = fit_curve([(0, 4000, 3e-6), (0, 100, 4e-6), (0, 100_000, 9e-6)])
    assert found.points == ((100.0, 4e-6), (4000.0, 4e-6), (100_000.0, 9e-6))


def test_a_curve_keeps_its_points_and_its_last_rate() -> None:
    curve = CostCurve(((1e3, 2e-6), (1e5, 20e-6)))
    seconds = curve.seconds(array(0, 0, 0, 0), array(10, 1e3, 1e4, 1e6))
    assert seconds == pytest.approx([2e-6, 2e-6, np.sqrt(2e-6 * 20e-6), 200e-6])


def test_the_latency_is_the_smallest_messages_and_the_rate_what_larger_ones_leave() -> None:
    latency, rate = fit_latency(((1024, 50e-6), (100_000, 100e-6), (1_000_000, 550e-6), (4_000_000, 2050e-6)))
    assert latency == 50e-6
    assert rate == pytest.approx(2e9)


def test_each_phase_of_each_kind_gets_its_record() -> None:
    linear, gelu = (OpCase(kind, kind, torch.relu, tuple) for kind in ("linear", "gelu"))
    both = worker_record(linear, CaseWork((100, 10), (100, 20), (100, 30)), CaseSeconds(1e-6, 5e-6, 2e-6))
    assert set(both.parts) == {"forward", "backward_input", "backward_weight"}
    assert both.parts["backward_input"].seconds == pytest.approx(3e-6), "the whole less the weight half"
    one = worker_record(gelu, CaseWork((0, 10), (0, 20), (0, 0)), CaseSeconds(1e-6, 2e-6, 0.0))
    assert {phase: part.moved_bytes for phase, part in one.parts.items()} == {
        "forward": 10,
        "backward_input": 20,
    }


def test_planted_rates_are_recovered() -> None:
    rates = worker_rates(calibration())
    times, host = rates.op_times, rates.host_costs
    assert times is not None
    assert host is not None
    line = times.get("linear", "forward")
    assert isinstance(line, CostLine)
    assert [line.overhead_seconds, line.seconds_per_flop, line.seconds_per_byte] == pytest.approx(
        [5e-6, 1e-11, 2e-11], rel=1e-6
    )
    assert times.get("elementwise", "backward_input") == CostCurve(((1e3, 4e-6), (1e6, 400e-6)))
    assert times.get("optimizer adamw", "forward") == CostLine(20e-6, 0.0, 4e-10)
    assert rates.flops_per_second == pytest.approx({"float32": 9e10, "float64": 4e10, "bfloat16": 3e11})
    assert rates.memory_bandwidth_bytes_per_second == pytest.approx(3e10)
    assert rates.link_bandwidth_bytes_per_second == pytest.approx(3e9)
    assert (host.contention, host.compute_overhead, host.send_overhead, host.receive_overhead) == (
        1.3,
        7e-6,
        30e-6,
        10e-6,
    )
    text = render_calibration(calibration())
    for part in ("2 workers measured at once in 12.0 s", "90 GFLOP/s float32", "30.0 GB/s; 5 kinds of ops"):
        assert part in text
    assert "60 us + bytes at 3.00 GB/s; computing beside it takes 1.30x" in text
    assert "7 us per compute, 30 us per send, 10 us per receive" in text


def test_one_worker_has_no_link() -> None:
    records = {name: r for name, r in calibration().records.items() if r.kind != "link"}
    records["host"] = Measurement(kind="host", values={"busy_slowdown": 1.0, "compute_seconds": 7e-6})
    alone = calibration(workers=1, records=records)
    cluster = ClusterSpec.local(2).with_device_rates(worker_rates(alone), "test")
    assert cluster.path(0, 1) == ClusterSpec.local(2).path(0, 1), "the preset's"
    assert cluster.contention([0]) == 1.0
    assert "link" not in render_calibration(alone)


# --------------------------------------------------------------------------------- what an op is charged


def test_unknown_kinds_are_charged_as_elementwise_kernels() -> None:
    seconds = op_phase_seconds(op_times(), "erfinv", "forward", array(0, 0), array(1e3, 2e6), array(1, 2))
    assert seconds == pytest.approx([2e-6, 400e-6])


def test_views_cost_their_overhead_and_nothing_launched_costs_nothing() -> None:
    seconds = op_phase_seconds(op_times(), "transpose", "forward", array(0, 0), array(0, 0), array(1, 0))
    assert seconds == pytest.approx([1e-6, 0.0])


def test_a_half_without_a_kernel_of_its_own_still_costs_its_work() -> None:
    # One kernel computes both halves of a convolution's backward: the input half launches nothing.
    seconds = op_phase_seconds(op_times(), "linear", "forward", array(1e9), array(1e6), array(0))
    assert seconds == pytest.approx([5e-6 + 1e-2 + 2e-5])


def test_slower_types_scale_the_arithmetic_only() -> None:
    one, two = (
        op_phase_seconds(op_times(), "linear", "forward", array(1e9), array(1e6), array(1), scale)[0]
        for scale in (1.0, 2.0)
    )
    assert two - one == pytest.approx(1e9 * 1e-11)


def test_kinds_of_ops() -> None:
    aten = torch.ops.aten
    assert kind_of(aten.gelu.default) == "gelu"
    assert kind_of(aten.sub.Tensor) == "add"
    assert kind_of(len) == ""


def test_a_measured_optimizer_replaces_the_memory_bound() -> None:
    cluster = ClusterSpec.local(2).with_device_rates(worker_rates(calibration(), 2), "test")
    state = StateBytes(parameters=1000, gradients=1000, optimizer_state=2000, trained=1000)
    seconds = optimizer_seconds(state, cluster.devices[0], "adamw", tensors=3)
    assert seconds == pytest.approx(3 * 20e-6 + 1000 * 4e-10)
    assert optimizer_seconds(state, cluster.devices[0]) == pytest.approx(7000 / 3e10)


# -------------------------------------------------------------------------------------------- measuring


def test_measuring_a_case_finds_more_time_for_more_work() -> None:
    def case(rows: int) -> OpCase:
        return OpCase(
            "linear",
            "linear",
            torch.nn.functional.linear,
            lambda: (torch.ones(rows, 64),),
            lambda: (torch.ones(64, 64),),
        )

    small, large = time_case(case(8)), time_case(case(4096))
    assert 0 < small.forward < large.forward
    assert 0 < small.backward_weight < large.backward


def test_cases_have_names_of_their_own_and_cover_the_kinds_with_lines() -> None:
    names, kinds = [case.name for case in worker_cases()], {case.kind for case in worker_cases()}
    assert len(set(names)) == len(names)
    assert [case.name for case in worker_cases()] == names, "the same in every process"
    assert kinds >= {*ARITHMETIC, STANDS_FOR_ALL, "view"}


def test_workers_measurements_become_a_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [case for case in worker_cases() if case.kind in ("mul", "view")]
    # Of each worker one call that pays for loading, then three turns; the second worker is twice as slow.
    spent = (
        turn * worker
        for worker in (1.0, 2.0)
        for turn in (9e-6, *(s for s in (4e-6, 2e-6, 3e-6) for _ in chosen))
    )

    def in_this_process(world: int, kind: str, backend: str, _: float, function: Any, *arguments: Any) -> Any:
        assert (kind, backend) == ("cpu", "gloo")
        return [function(rank, 1, *arguments) for rank in range(world)]

    monkeypatch.setattr(run, "run_ranks", in_this_process)
    monkeypatch.setattr(run, "worker_cases", lambda: chosen)
    monkeypatch.setattr(run, "time_case", lambda _: CaseSeconds(next(spent), 1e-6, 0.0))
    monkeypatch.setattr(run, "product_seconds", lambda _: 1e-3)
    monkeypatch.setattr(run, "copy_seconds", lambda: 1e-2)
    monkeypatch.setattr(run.dist, "barrier", lambda: None)
    whole = run.calibrate_workers(2, count_case)
    assert Calibration.from_dict(json.loads(whole.model_dump_json())) == whole
    assert whole.workers == 2
    rates = worker_rates(whole)
    assert rates.flops_per_second is not None
    assert rates.flops_per_second == pytest.approx(
        dict.fromkeys(("float32", "float64", "bfloat16", "float16"), 2 * 512**3 / 1e-3)
    )
    assert rates.memory_bandwidth_bytes_per_second == pytest.approx(2 * 2**25 / 1e-2)
    assert rates.op_times is not None
    seconds = whole.records[chosen[0].name].parts["forward"].seconds
    assert seconds == pytest.approx(3e-6), "the least of three turns, the mean of two workers"
    assert rates.op_times.get("optimizer adam", "forward") is not None
    assert rates.host_costs is not None
    assert rates.host_costs.compute_overhead > 0.0
    with pytest.raises(UsageError, match="expected 1 to 64"):
        run.calibrate_workers(65, count_case)


# ------------------------------------------------------------------------------------------------ files


def test_a_file_holds_everything(tmp_path: Path) -> None:
    path = tmp_path / "made" / "calibration.json"
    calibration().save(path)
    assert Calibration.load(path, "cpu") == calibration()


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the calibration"):
        calibration().save(tmp_path / "file" / "calibration.json")


def use(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setenv(CALIBRATION, str(path))


def test_local_clusters_use_it_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "calibration.json"
    use(monkeypatch, path)
    assert not ClusterSpec.local(2).calibrated
    calibration().save(path)
    cluster = ClusterSpec.parse("local:2")
    assert cluster.provenance == f"calibration of 2026-01-31T12:00:00+00:00 with 2 workers ({path})"
    device = cluster.devices[0]
    assert device.op_times == worker_rates(calibration(), 2).op_times
    slowdown = max(1.0, 2 / calibration().machine.count)
    assert device.peak_flops(torch.float32) == pytest.approx(9e10 / slowdown)
    assert cluster.host_costs.contention == 1.3
    assert cluster.path(0, 1).latency_seconds == pytest.approx(60e-6)


def test_a_calibrated_cluster_survives_being_written(tmp_path: Path) -> None:
    cluster = ClusterSpec.local(2).with_device_rates(worker_rates(calibration(), 2), "calibration of a test")
    for name in ("cluster.yaml", "cluster.json"):
        cluster.save(tmp_path / name)
        again = ClusterSpec.load(tmp_path / name)
        assert again == cluster
        assert again.devices == cluster.devices
        assert again.host_costs == cluster.host_costs


def test_more_workers_than_cores_share_them() -> None:
    whole, rates = worker_rates(on_machine(count=1)), worker_rates(on_machine(count=1), 4)
    assert rates.flops_per_second is not None
    assert rates.flops_per_second["float32"] == pytest.approx(9e10 / 4)
    assert whole.op_times is not None
    assert rates.op_times == whole.op_times.slower(4.0)


def test_collectives_of_workers_go_by_their_curves() -> None:
    cluster = ClusterSpec.local(4).with_device_rates(worker_rates(calibration()), "measured")
    again = ClusterSpec.from_dict(cluster.to_dict())
    assert again == cluster
    pair, four = group_links([(0, 1)], again), group_links([(0, 1, 2, 3)], again)
    assert pair.seconds("all_reduce", 1e6) == pytest.approx(1e-3)
    assert pair.seconds("all_gather", 5.005e5) == pytest.approx(2.25e-4), "half of the way between two sizes"
    assert pair.seconds("all_gather", 2e6) == pytest.approx(4e-4 + 1e6 * 3.5e-4 / 999e3), (
        "as the last piece rises"
    )
    assert four.seconds("all_reduce", 2e6) == pytest.approx(3 * 1e-3), (
        "three times what two take for half of it"
    )
    by_link = replace(pair, measured=()).seconds("reduce_scatter", 1e6)
    assert pair.seconds("reduce_scatter", 1e6) == by_link > 0.0, "not measured"


def corrupted(**changes: object) -> str:
    return json.dumps({**calibration().model_dump(mode="json"), **changes})


def with_record(name: str, record: Measurement | None) -> str:
    """The file with another record, or without it."""
    records = {**calibration().records, **({} if record is None else {name: record})}
    if record is None:
        del records[name]
    return calibration(records=records).model_dump_json()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "expected a calibration of format 4, got 'list'"),
        ("{}", "expected a calibration of format 4, got None"),
        ('{"format": 3, "machine": {}}', "got None of format 3"),
        ("[" * 100_000, "not JSON"),
        ("\udcff", "not JSON"),
        (corrupted(extra=1), "extra"),
        (corrupted(seconds=float("nan")), "seconds"),
        (corrupted(machine={"card": "x"}), "machine.count"),
        (corrupted(records={}), "expected records of copy, host, product float32"),
        (corrupted(op_times={}), "op_times"),
        (on_machine(kind="cuda").model_dump_json(), "it is one of a GPU, which cannot stand for CPU workers"),
        (with_record("product float32", None), "expected records of product float32"),
        (with_record("host", Measurement(kind="host")), "compute_seconds"),
        (with_record("host", Measurement(kind="host", values={"compute_seconds": -1.0})), "compute_overhead"),
        (
            with_record("all_reduce x2", link(of_1000=1.0)),
            "collectives[1].measured: tuple should have at least 2",
        ),
        (with_record("all_reduce x2", link(of_many=1.0)), "many"),
        (with_record("copy", Measurement(kind="copy")), "forward"),
    ],
)
def test_a_file_that_is_wrong_is_left_aside_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, reason: str
) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    use(monkeypatch, path)
    with caplog.at_level(logging.WARNING, "partitioner"):
        assert stored_calibration() is None
        assert ClusterSpec.local(2).provenance == "defaults"
    assert "ignoring the calibration" in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize("change", [{"card": "abacus"}, {"count": 4096}, {"torch": "1.0"}])
def test_another_machines_file_is_left_aside(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, object],
) -> None:
    path = tmp_path / "calibration.json"
    on_machine(**change).save(path)
    use(monkeypatch, path)
    with caplog.at_level(logging.WARNING, "partitioner"):
        assert stored_calibration() is None
    ((name, value),) = change.items()
    assert f"it is of another machine or other software; {name}: {value} and " in caplog.text


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CALIBRATION, "none")
    assert stored_calibration() is None
    monkeypatch.delenv(CALIBRATION)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration_path() == tmp_path / "partitioner" / "calibration.json"
    assert stored_calibration() is None
