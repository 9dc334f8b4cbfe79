"""The origin of rates in words, and which comparison with measured runs it is counted to."""

from __future__ import annotations

from typing import Any

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.op_profile import CostLine, OpTimes
from cost_models.spec.rates import MeasuredRates

TIMES = OpTimes(((("elementwise", "forward"), CostLine(1e-6, 0.0, 0.0)),))
OWN = {"memory": "16GiB", "memory_bandwidth": "900GB/s", "flops": {"float32": "15T"}}


def cluster(*devices: dict[str, Any]) -> ClusterSpec:
    return ClusterSpec.from_dict(
        {
            "nodes": [
                {"name": f"n{i}", "count": 2, "links": "PCIe3", "device": d} for i, d in enumerate(devices)
            ],
            "network": "Ethernet-25G",
        }
    )


A100, OLD, TITAN = (
    {"preset": "A100-80GB"},
    {"preset": "A100-80GB", "stack": "2023"},
    {"preset": "TitanX-12GB"},
)


@pytest.mark.parametrize(
    ("devices", "text", "rates"),
    [
        ((A100,), "presets, stack 2025", "presets"),
        ((OLD,), "presets, stack 2023", "named stack"),
        ((A100, OLD), "presets, stacks 2023 and 2025", "presets"),
        ((TITAN,), "presets", "presets"),
        (({"preset": "RTX3090"},), "presets, stack 2025, unverified in part", "presets"),
        (({"preset": "MI300X"},), "presets, stack 2025, unverified in part", None),
        ((OWN,), "numbers of the cluster file", "presets"),
        ((A100, OWN), "presets, stack 2025 and numbers of the cluster file", "presets"),
        (
            ({**OLD, "efficiency": 0.5},),
            "presets, stack 2023, with numbers of the cluster file",
            "named stack",
        ),
        (({**OWN, "kind": "cpu"},), "numbers of the cluster file", None),
        (({**OWN, "kind": "cpu"}, A100), "presets, stack 2025 and numbers of the cluster file", None),
    ],
)
def test_rates_come_from_presets_or_the_file(
    devices: tuple[dict[str, Any], ...], text: str, rates: str | None
) -> None:
    origin = cluster(*devices).origin()
    assert (origin.text, origin.rates) == (text, rates)


def test_only_the_devices_that_run_something_count() -> None:
    assert cluster(A100, OLD).origin([2, 3]).text == "presets, stack 2023"
    assert cluster(A100, OLD).origin([0]).text == "presets, stack 2025"


def test_cpu_workers_are_guessed_until_they_are_calibrated() -> None:
    local = ClusterSpec.local(2)
    assert (local.origin().text, local.origin().rates) == ("presets of CPU workers, guesses", None)
    measured = local.with_device_rates(MeasuredRates(op_times=TIMES), "calibration of a test")
    assert (measured.origin().text, measured.origin().rates) == ("calibration of a test", "calibrated")


def test_a_calibration_of_a_gpu_still_names_the_stack_of_the_rest() -> None:
    measured = cluster(A100).with_device_rates(
        MeasuredRates(flops_per_second={"float32": 1e13}), "calibration x"
    )
    assert measured.origin().text == "calibration x, stack 2025"
