"""Presets are valid data, and their numbers are the dense, usable, one-direction ones."""

from __future__ import annotations

import pytest
import torch

from cost_models.cluster import ClusterSpec
from cost_models.devices import RATE_NAMES
from cost_models.spec.presets import DEVICE_LINKS, DEVICES, LINKS, MACHINE_NETWORKS, MACHINES
from cost_models.spec.sections import DeviceSpec, NodeSpec
from cost_models.spec.wiring import LinkSpec, NetworkSpec

NOMINAL_GB = {
    "V100-16GB": 16,
    "V100-32GB": 32,
    "A100-40GB": 40,
    "A100-80GB": 80,
    "H100-80GB": 80,
    "H200-141GB": 141,
    "TitanX-12GB": 12,
    "GTX580-3GB": 3,
    "cpu-worker": 4,
}


@pytest.mark.parametrize("name", DEVICES)
def test_device_presets(name: str) -> None:
    device = DeviceSpec.model_validate(DEVICES[name])
    assert device.problems() == []
    assert device.flops is not None
    assert set(device.flops) <= set(RATE_NAMES)
    cluster = ClusterSpec.one_node(name, 1)
    # Usable is below the box's number in binary units, and not far below.
    assert 0.85 <= cluster.devices[0].memory_bytes / (NOMINAL_GB[name] * 2**30) <= 1.0


def test_every_table_is_about_the_same_names() -> None:
    assert set(NOMINAL_GB) == set(DEVICES) == set(DEVICE_LINKS)
    assert set(MACHINES) == set(MACHINE_NETWORKS)
    assert set(DEVICE_LINKS.values()) <= set(LINKS)


@pytest.mark.parametrize("name", LINKS)
def test_link_presets(name: str) -> None:
    bandwidth, latency, _ = LinkSpec.model_validate(LINKS[name]).resolved()
    assert 1e9 <= bandwidth <= 1e12
    assert 1e-6 <= latency <= 1e-4


@pytest.mark.parametrize("name", MACHINES)
def test_machine_presets(name: str) -> None:
    NodeSpec.model_validate(MACHINES[name])
    NetworkSpec.model_validate(MACHINE_NETWORKS[name])
    cluster = ClusterSpec.preset(name, nodes=2)
    assert cluster.world_size == 16
    assert cluster.ranks_per_node == (tuple(range(8)), tuple(range(8, 16)))


def test_rates_are_dense() -> None:
    h100 = ClusterSpec.one_node("H100-80GB", 1).devices[0]
    assert h100.peak_flops(torch.bfloat16) == 989.4e12  # 1979 with sparsity
    assert h100.peak_flops(torch.float8_e4m3fn) == 1978.9e12
    assert ClusterSpec.one_node("A100-80GB", 1).devices[0].peak_flops(torch.bfloat16) == 312e12


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
