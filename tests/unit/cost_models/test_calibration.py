"""Calibrations: fits recover what was planted, files are data that nobody needs to trust, local clusters use them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cost_models.calibration import VARIABLE, Calibration, Machine, cache_path, stored_calibration
from cost_models.calibration_fit import STANDS_FOR_ALL, CaseWork, fit_curve, fit_line, fit_op_times
from cost_models.cluster import ClusterSpec
from cost_models.compute import optimizer_seconds
from cost_models.conversion import group_links
from cost_models.errors import UsageError
from cost_models.measure_links import fit_latency
from cost_models.measure_ops import CaseSeconds, measure_case
from cost_models.memory import StateBytes
from cost_models.op_cases import ARITHMETIC, OpCase, kind_of, op_cases
from cost_models.op_profile import CostCurve, CostLine, OpTimes, op_phase_seconds


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


def calibration() -> Calibration:
    return Calibration(
        machine=Machine.this(),
        date="2026-01-31T12:00:00+00:00",
        workers=2,
        flops_per_second={"float32": 9e10, "float64": 4e10, "bfloat16": 3e11},
        memory_bandwidth_bytes_per_second=3e10,
        busy_slowdown=1.1,
        op_times=op_times(),
        link_latency_seconds=60e-6,
        link_bandwidth_bytes_per_second=3e9,
        contention=1.3,
        compute_overhead_seconds=7e-6,
        send_overhead_seconds=30e-6,
        receive_overhead_seconds=10e-6,
        collectives={"all_reduce": ((1e3, 1e-4), (1e6, 1e-3)), "all_gather": ((1e3, 5e-5), (1e6, 4e-4))},
        seconds=12.0,
    )


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


def test_each_phase_of_each_kind_gets_its_cost() -> None:
    linear, gelu = OpCase("linear", torch.mm, tuple), OpCase("gelu", torch.relu, tuple)
    works = [CaseWork((100, 10), (100, 20), (100, 30)), CaseWork((0, 10), (0, 20), (0, 0))]
    seconds = [CaseSeconds(1e-6, 5e-6, 2e-6), CaseSeconds(1e-6, 2e-6, 0.0)]
    found = fit_op_times([linear, gelu], works, seconds)
    assert {key for key, _ in found.costs} == {
        ("gelu", "backward_input"),
        ("gelu", "forward"),
        ("linear", "backward_input"),
        ("linear", "backward_weight"),
        ("linear", "forward"),
    }
    whole = found.get("linear", "backward_input")
    assert whole is not None
    assert whole.seconds(array(100), array(20)) == pytest.approx([3e-6])  # the whole less the weight half


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
    cluster = ClusterSpec.local(2).with_device_rates(calibration().rates(2), "test")
    state = StateBytes(parameters=1000, gradients=1000, optimizer_state=2000, trained=1000)
    seconds = optimizer_seconds(state, cluster.devices[0], "adamw", tensors=3)
    assert seconds == pytest.approx(3 * 20e-6 + 1000 * 4e-10)
    assert optimizer_seconds(state, cluster.devices[0]) == pytest.approx(7000 / 3e10)


# -------------------------------------------------------------------------------------------- measuring


def test_measuring_a_case_finds_more_time_for_more_work() -> None:
    def case(rows: int) -> OpCase:
        return OpCase(
            "linear",
            torch.nn.functional.linear,
            lambda: (torch.ones(rows, 64),),
            lambda: (torch.ones(64, 64),),
        )

    small, large = measure_case(case(8)), measure_case(case(4096))
    assert 0 < small.forward < large.forward
    assert 0 < small.backward_weight < large.backward


def test_cases_are_the_same_in_every_process_and_cover_the_kinds_with_lines() -> None:
    assert [c.kind for c in op_cases()] == [c.kind for c in op_cases()]
    kinds = {c.kind for c in op_cases()}
    assert kinds >= ARITHMETIC
    assert {STANDS_FOR_ALL, "view"} <= kinds


# ------------------------------------------------------------------------------------------------ files


def test_a_file_holds_everything(tmp_path: Path) -> None:
    path = tmp_path / "made" / "calibration.json"
    calibration().save(path)
    assert Calibration.from_dict(json.loads(path.read_text())) == calibration()
    assert "op_times" in json.loads(path.read_text())


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the calibration"):
        calibration().save(tmp_path / "file" / "calibration.json")


def use(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(path))


def test_local_clusters_use_it_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "calibration.json"
    use(monkeypatch, path)
    assert not ClusterSpec.local(2).calibrated
    calibration().save(path)
    cluster = ClusterSpec.parse("local:2")
    assert cluster.provenance == f"calibration of 2026-01-31T12:00:00+00:00 with 2 workers ({path})"
    device = cluster.devices[0]
    assert device.op_times == op_times()
    slowdown = max(1.0, 2 / Machine.this().cores)
    assert device.peak_flops(torch.float32) == pytest.approx(9e10 / slowdown)
    assert cluster.host_costs.contention == 1.3
    assert cluster.path(0, 1).latency_seconds == pytest.approx(60e-6)


def test_a_calibrated_cluster_survives_being_written(tmp_path: Path) -> None:
    cluster = ClusterSpec.local(2).with_device_rates(calibration().rates(2), "calibration of a test")
    for name in ("cluster.yaml", "cluster.json"):
        cluster.save(tmp_path / name)
        again = ClusterSpec.load(tmp_path / name)
        assert again == cluster
        assert again.devices == cluster.devices
        assert again.host_costs == cluster.host_costs


def test_more_workers_than_cores_share_them() -> None:
    shared = replace(calibration(), machine=replace(Machine.this(), cores=1))
    rates = shared.rates(4)
    assert rates.flops_per_second is not None
    assert rates.flops_per_second["float32"] == pytest.approx(9e10 / 4)
    assert rates.op_times == op_times().slower(4.0)


def test_collectives_of_workers_go_by_their_curves() -> None:
    cluster = ClusterSpec.local(4).with_device_rates(replace(calibration(), workers=4).rates(1), "measured")
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
    return json.dumps({**calibration().to_dict(), **changes})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "expected a calibration of format 3, found list"),
        ("{}", "expected a calibration of format 3, found None"),
        ("[" * 100_000, ""),
        ("\udcff", ""),
        (corrupted(format=1), "format 3, found 1"),
        (corrupted(extra=1), "exactly the keys"),
        (corrupted(contention="fast"), "positive numbers for contention"),
        (corrupted(contention=-1), "positive numbers for contention"),
        (corrupted(link_bandwidth_bytes_per_second=float("nan")), "link_bandwidth_bytes_per_second"),
        (corrupted(link_latency_seconds=float("inf")), "link_latency_seconds"),
        (corrupted(flops_per_second={"float32": True}), "flops_per_second.float32"),
        (corrupted(flops_per_second=[1]), "expected mappings"),
        (corrupted(machine={"processor": "x"}), "machine: expected"),
        (corrupted(collectives={"gossip": [[1, 1], [2, 2]]}), "collectives: expected"),
        (corrupted(collectives={"all_reduce": [[2, 1], [1, 1]]}), "collectives: expected"),
        (corrupted(collectives=[]), "collectives: expected"),
        (corrupted(op_times={}), "at least elementwise.forward"),
        (corrupted(op_times={"gelu": {"sideways": {}}}), "gelu.sideways"),
        (corrupted(op_times={"gelu": {"forward": {"points": [[2, 1], [1, 1]]}}}), "bytes rising"),
        (corrupted(op_times={"gelu": {"forward": {"line": [1, 2]}}}), "gelu.forward"),
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


@pytest.mark.parametrize("change", [{"processor": "abacus"}, {"cores": 4096}, {"torch": "1.0"}])
def test_another_machines_file_is_left_aside(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, object],
) -> None:
    path = tmp_path / "calibration.json"
    other = replace(calibration(), machine=replace(Machine.this(), **change))  # type: ignore[arg-type]
    other.save(path)
    use(monkeypatch, path)
    with caplog.at_level(logging.WARNING, "partitioner"):
        assert stored_calibration() is None
    assert "this is" in caplog.text


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, "none")
    assert stored_calibration() is None
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_path() == tmp_path / "partitioner" / "calibration.json"
    assert stored_calibration() is None
