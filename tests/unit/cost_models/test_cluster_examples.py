"""The two example files of the documentation: what they say is what is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.devices import DEFAULT_EFFICIENCY
from cost_models.links import fair_rates

EXAMPLES = Path(__file__).parents[3] / "docs" / "clusters"


def test_every_example_loads_and_survives_being_saved(tmp_path: Path) -> None:
    files = sorted(EXAMPLES.glob("*.yaml"))
    assert len(files) >= 2
    for file in files:
        cluster = ClusterSpec.load(file)
        cluster.save(tmp_path / file.name)
        assert ClusterSpec.load(tmp_path / file.name) == cluster


def test_two_unlike_nodes() -> None:
    cluster = ClusterSpec.load(EXAMPLES / "two-unlike-nodes.yaml")
    assert cluster.name == "two-unlike-nodes"
    assert cluster.ranks_per_node == ((0, 1, 2, 3), (4, 5))
    server, workstation = cluster.devices[0], cluster.devices[5]
    assert (server.model, server.host) == ("A100-80GB", "192.168.1.10")
    assert server.memory_bytes == round(79.25 * 2**30)
    assert (workstation.model, workstation.host) == ("RTX-4090", "192.168.1.11")
    assert workstation.memory_bytes == round(23.6 * 2**30) - 200 * 2**20
    assert workstation.flops_per_second["bfloat16"] == 165.2e12
    assert dict(workstation.efficiency) == {
        **DEFAULT_EFFICIENCY["cuda"],
        "matmul": 0.8,
        "attention": 0.6,
    }
    for a, b, bandwidth, latency in [
        (0, 3, 235e9, 3.4e-6),
        (4, 5, 12e9, 10e-6),
        (3, 4, 3.125e9, 30e-6),
        (5, 0, 3.125e9, 30e-6),
    ]:
        assert cluster.path(a, b).bandwidth_bytes_per_second == bandwidth
        assert cluster.path(a, b).latency_seconds == pytest.approx(latency)
    # One card per node: two transfers out of the server share it, one in each direction does not.
    assert fair_rates([cluster.path(0, 4), cluster.path(1, 5)], cluster.links) == (1.5625e9, 1.5625e9)
    assert fair_rates([cluster.path(0, 4), cluster.path(5, 1)], cluster.links) == (3.125e9, 3.125e9)


def test_64_dgx_nodes_behind_an_oversubscribed_spine() -> None:
    cluster = ClusterSpec.load(EXAMPLES / "dgx-h100-64-nodes.yaml")
    assert cluster.world_size == 512
    assert cluster.devices[511].node_name == "dgx63"
    assert cluster.devices[511].host == "10.0.0.64"
    for a, b, bandwidth, latency in [
        (0, 7, 365e9, 3.4e-6),  # one node
        (0, 8, 50e9, 9.6e-6),  # one leaf
        (0, 255, 50e9, 9.6e-6),  # the same leaf's last
        (255, 256, 50e9, 10.2e-6),  # neighbours by number, but across the spine
        (0, 511, 50e9, 10.2e-6),
    ]:
        assert cluster.path(a, b).bandwidth_bytes_per_second == bandwidth
        assert cluster.path(a, b).latency_seconds == pytest.approx(latency)
    assert cluster.links["leaf0/up"].bandwidth_bytes_per_second == 256 * 50e9
    crossing = [cluster.path(rank, (rank + 256) % 512) for rank in range(512)]
    assert set(fair_rates(crossing, cluster.links)) == {12.5e9}
    inside = [cluster.path(rank, (rank + 8) % 256 + rank // 256 * 256) for rank in range(512)]
    assert set(fair_rates(inside, cluster.links)) == {50e9}
