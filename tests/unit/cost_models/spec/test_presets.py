"""Presets are valid data of known sources, and their numbers are the dense, usable, one-direction ones."""

from __future__ import annotations

import re
from itertools import chain

import pytest
import torch

from cost_models.cluster import ClusterSpec
from cost_models.devices import EFFICIENCY_NAMES, RATE_NAMES
from cost_models.spec.presets import (
    DEVICE_LINKS,
    DEVICE_ORIGINS,
    DEVICES,
    LIKE,
    LINK_ORIGINS,
    LINKS,
    MACHINE_NETWORKS,
    MACHINE_ORIGINS,
    MACHINES,
    NEWEST,
    SOURCES,
    efficiency_of,
    is_called,
    is_verified,
)
from cost_models.spec.sections import DeviceSpec, NodeSpec
from cost_models.spec.wiring import LinkSpec, NetworkSpec

NOMINAL_GB = {
    "TitanX-12GB": 12,
    "V100-32GB": 32,
    "B200": 192,
    "B300": 288,
    "MI300X": 192,
    "L40S": 48,
    "T4": 16,
}
"""What the box says; names with "-80GB" say it themselves."""


def _nominal(name: str) -> int | None:
    said = re.search(r"-(\d+)GB", name)
    return NOMINAL_GB.get(name) or (int(said[1]) if said else None)


def test_device_presets() -> None:
    assert len(DEVICES) >= 40
    for name in DEVICES:
        device = DeviceSpec.model_validate(DEVICES[name])
        assert device.problems() == [], name
        assert set(device.flops or {}) <= set(RATE_NAMES), name
        assert set(efficiency_of(name, NEWEST)) <= set(EFFICIENCY_NAMES), name
        # Usable is below the box's number in binary units, and not far below; MPS gets a part of the machine's.
        share = 0.6 if device.kind == "mps" else 0.85
        usable = ClusterSpec.one_node(name, 1).devices[0].memory_bytes / 2**30
        nominal = _nominal(name)
        assert nominal is None or share <= usable / nominal <= 1.0, name


def test_every_number_has_sources_that_are_known() -> None:
    origins = (*DEVICE_ORIGINS.items(), *LINK_ORIGINS.items(), *MACHINE_ORIGINS.items())
    used = set(chain.from_iterable(keys for _, found in origins for keys in found.values()))
    assert used <= {*SOURCES, LIKE}
    digits = re.compile(r"\d")
    for name, row in chain(DEVICES.items(), LINKS.items()):
        numbers = {key: value for key, value in row.items() if key not in ("flops", "rings", "kind")}
        numbers |= {f"{key}.{part}": v for key in ("flops", "rings") for part, v in row.get(key, {}).items()}
        found = {**DEVICE_ORIGINS, **LINK_ORIGINS}[name]
        unsourced = [key for key, value in numbers.items() if digits.search(str(value)) and key not in found]
        assert not unsourced, (name, unsourced)
    for name, row in MACHINES.items():
        assert "usd_per_hour" not in row or "usd_per_hour" in MACHINE_ORIGINS[name], name


def test_what_stands_in_for_a_measurement_is_unverified() -> None:
    rtx = DEVICE_ORIGINS["RTX3090"]
    assert rtx["efficiency.matmul"] == (LIKE,)
    assert not is_verified(rtx["efficiency.matmul"])
    assert efficiency_of("RTX3090", NEWEST)["matmul"] == efficiency_of("A6000", NEWEST)["matmul"]
    # The best product of an MI300X, of which models' shapes reach 0.9.
    assert efficiency_of("MI300X", NEWEST)["matmul"] == pytest.approx(0.9 * 668.4 / 1307.4, rel=1e-3)
    assert is_verified(DEVICE_ORIGINS["MI300X"]["efficiency.matmul"])
    assert not is_verified(("A100", "recalled"))


def test_every_table_is_about_the_same_names() -> None:
    assert set(DEVICES) == set(DEVICE_LINKS)
    assert set(MACHINES) == set(MACHINE_NETWORKS)
    assert set(DEVICE_LINKS.values()) <= set(LINKS)
    assert not set(DEVICES) & set(MACHINES)


def test_link_presets() -> None:
    for name in LINKS:
        bandwidth, latency, _ = LinkSpec.model_validate(LINKS[name]).resolved()
        assert 1e9 <= bandwidth <= 1e12, name
        assert 1e-6 <= latency <= 1e-4, name


def test_machine_presets() -> None:
    for name in MACHINES:
        node = NodeSpec.model_validate(MACHINES[name])
        NetworkSpec.model_validate(MACHINE_NETWORKS[name])
        cluster = ClusterSpec.preset(name, nodes=2)
        assert cluster.world_size == 2 * (node.count or 0), name
        assert cluster.usd_per_hour == (None if node.usd_per_hour is None else 2 * node.usd_per_hour), name
        assert cluster.path(0, cluster.world_size - 1).bandwidth_bytes_per_second > 1e9, name


def test_rates_are_dense() -> None:
    h100 = ClusterSpec.one_node("H100-80GB", 1).devices[0]
    assert h100.peak_flops(torch.bfloat16) == 989.4e12  # 1979 with sparsity
    assert h100.peak_flops(torch.float8_e4m3fn) == 1978.9e12
    assert ClusterSpec.one_node("A100-80GB", 1).devices[0].peak_flops(torch.bfloat16) == 312e12


@pytest.mark.parametrize(
    ("preset", "card", "called"),
    [
        ("H100-80GB", "NVIDIA H100 80GB HBM3", True),
        ("A100-40GB", "NVIDIA A100-SXM4-40GB", True),
        ("H100-PCIE-80GB", "NVIDIA H100 PCIe", True),
        ("H100-PCIE-80GB", "NVIDIA H100 80GB HBM3", False),
        ("TitanX-12GB", "NVIDIA GeForce GTX TITAN X", True),
        ("RTX6000Ada", "NVIDIA RTX 6000 Ada Generation", True),
        ("L4", "NVIDIA L40S", False),
        ("A10", "NVIDIA A100 80GB PCIe", False),
        ("H20-96GB", "NVIDIA H200", False),
        ("B200", "NVIDIA GB200", False),
        ("RTX4070", "NVIDIA GeForce RTX 4070 Ti", False),
        ("RTX4060Ti-16GB", "NVIDIA GeForce RTX 4060 Ti", True),
    ],
)
def test_drivers_names_of_cards(preset: str, card: str, called: bool) -> None:
    assert is_called(preset, card) == called


def test_dgx_v100_is_a_hybrid_cube_mesh() -> None:
    cluster = ClusterSpec.preset("dgx-v100", nodes=2)
    expected = _of_a_dgx_1v()
    for a in range(8):
        wires = [cluster.path(a, b).bandwidth_bytes_per_second / 25e9 for b in range(8) if b != a]
        links = "".join("0" if w < 1 else str(round(w)) for w in wires)
        assert links == expected[a][:a] + expected[a][a + 1 :]
        assert sum(map(int, links)) == 6  # a V100 has six
    # Four cards for eight GPUs: 0 and 1 share one, 2 has another.
    assert cluster.path(0, 8).links == cluster.path(1, 9).links
    assert not set(cluster.path(0, 8).links) & set(cluster.path(2, 10).links)


def _of_a_dgx_1v() -> list[str]:
    """NVLinks between each two GPUs, as `nvidia-smi topo -m` prints them on that machine."""
    return [
        "01122000",
        "10210200",
        "12020010",
        "21200001",
        "20000112",
        "02001021",
        "00101202",
        "00012120",
    ]
