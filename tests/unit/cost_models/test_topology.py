"""Which links a path takes: inside a node, through switches, through an explicit graph."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.devices import Device
from cost_models.errors import ClusterError
from cost_models.links import fair_rates
from tests.support.work import calls

FAST, SLOW = {"bandwidth": "100GB/s", "latency": "2us"}, {"bandwidth": "10GB/s", "latency": "6us"}


def _cluster(network: Any, *names: str, count: int = 2, **node: Any) -> ClusterSpec:
    nodes = [{"name": name, "count": count, "device": "A100-80GB", "links": FAST, **node} for name in names]
    nodes = [{**n, "links": {"default": FAST} if n["links"] is FAST else n["links"]} for n in nodes]
    return ClusterSpec.from_dict({"nodes": nodes, "network": network})


def test_inside_a_node_each_device_has_a_port() -> None:
    cluster = _cluster(None, "a", count=3)
    assert cluster.path(0, 2).links == ("a/port0/out", "a/port2/in")
    assert cluster.path(2, 0).links == ("a/port2/out", "a/port0/in")
    assert cluster.path(0, 2).latency_seconds == 2e-6
    assert cluster.path(1, 1).links == ()
    # Two devices sending to a third get half each; to different ones, all.
    assert fair_rates([cluster.path(0, 2), cluster.path(1, 2)], cluster.links) == (50e9, 50e9)
    assert fair_rates([cluster.path(0, 1), cluster.path(1, 2)], cluster.links) == (100e9, 100e9)


def test_a_pair_with_a_wire_of_its_own_uses_it() -> None:
    links = {"default": SLOW, "pairs": [{"between": [1, 0], **FAST}]}
    cluster = _cluster(None, "a", count=3, links=links)
    assert cluster.path(0, 1).links == ("a/wire0-1/out",)
    assert cluster.path(1, 0).links == ("a/wire0-1/in",)
    assert cluster.path(0, 1).bandwidth_bytes_per_second == 100e9
    assert cluster.path(0, 2).bandwidth_bytes_per_second == 10e9


@pytest.mark.parametrize(
    ("setting", "together"),
    [
        ({"per": "device"}, 10e9),
        ({}, 10e9),
        ({"per": "node"}, 2.5e9),
        ({"cards": 2}, 5e9),
        ({"cards": 9}, 10e9),
    ],
)
def test_cards_per_node_or_per_device(setting: dict[str, Any], together: float) -> None:
    """Four devices send to four others at once: one shared card makes that a factor of four."""
    cluster = _cluster({**SLOW, **setting}, "a", "b", count=4)
    paths = [cluster.path(i, 4 + i) for i in range(4)]
    assert {path.bandwidth_bytes_per_second for path in paths} == {10e9}
    assert set(fair_rates(paths, cluster.links)) == {together}
    assert paths[0].latency_seconds == 6e-6


def test_half_duplex_shares_both_directions() -> None:
    full = _cluster({**SLOW, "per": "node"}, "a", "b")
    half = _cluster({**SLOW, "per": "node", "duplex": "half"}, "a", "b")
    assert fair_rates([full.path(0, 2), full.path(2, 0)], full.links) == (10e9, 10e9)
    assert fair_rates([half.path(0, 2), half.path(2, 0)], half.links) == (5e9, 5e9)


def test_the_way_to_the_card_counts_where_it_is_given() -> None:
    pcie = {"bandwidth": "5GB/s", "latency": "1us"}
    cluster = _cluster(SLOW, "a", "b", links={"default": FAST, "host": pcie})
    assert cluster.path(1, 2).links == ("a/host1/out", "a/nic1/out", "b/nic0/in", "b/host0/in")
    assert cluster.path(1, 2).bandwidth_bytes_per_second == 5e9
    assert cluster.path(1, 2).latency_seconds == pytest.approx(8e-6)
    assert cluster.path(0, 1).bandwidth_bytes_per_second == 100e9


def _switched(**spine: Any) -> ClusterSpec:
    switches = [
        {"name": "leaf0", "members": ["n[0-1]"], "oversubscription": 2, "latency": "1us"},
        {"name": "leaf1", "members": ["n2", "n3"], "oversubscription": 4, "latency": "2us"},
    ]
    if spine:
        switches.append({"name": "spine", "members": ["leaf0", "leaf1"], **spine})
    return _cluster({**SLOW, "switches": switches}, "n[0-3]")


def test_switches_narrow_what_passes_them() -> None:
    cluster = _switched(oversubscription=2, latency="4us")
    inside, across = cluster.path(0, 2), cluster.path(0, 6)
    assert inside.links == ("n0/nic0/out", "n1/nic0/in")
    assert across.links == ("n0/nic0/out", "leaf0/up", "spine/across", "leaf1/down", "n3/nic0/in")
    assert across.latency_seconds == pytest.approx(6e-6 + 1e-6 + 4e-6 + 2e-6)
    # Members' total 4 × 10 GB/s: leaf0 passes half of it, leaf1 a quarter, the spine half of both.
    assert cluster.links["leaf0/up"].bandwidth_bytes_per_second == 20e9
    assert cluster.links["leaf1/down"].bandwidth_bytes_per_second == 10e9
    assert cluster.links["spine/across"].bandwidth_bytes_per_second == 15e9
    assert across.bandwidth_bytes_per_second == 10e9  # alone
    everybody = [cluster.path(rank, rank + 4) for rank in range(4)]
    assert fair_rates(everybody, cluster.links) == (2.5e9,) * 4  # leaf1 is the narrowest


def test_several_top_switches_meet_in_an_ideal_core() -> None:
    cluster = _switched()
    assert cluster.path(0, 6).links == ("n0/nic0/out", "leaf0/up", "leaf1/down", "n3/nic0/in")
    assert cluster.path(0, 6).bandwidth_bytes_per_second == 10e9


def test_a_single_top_switch_that_does_not_block_is_no_link() -> None:
    assert "spine/across" not in _switched(oversubscription=1).links


GRAPH = {
    "links": [
        {"a": "x", "b": "s0", **SLOW},
        {"a": "s0", "b": "y", **SLOW},
        {"a": "x", "b": "s1", **FAST},
        {"a": "s1", "b": "y", **FAST},
        {"a": "y", "b": "z", **SLOW, "duplex": "half"},
    ]
}


def test_a_graph_takes_the_fewest_hops_then_the_lowest_latency() -> None:
    cluster = _cluster(GRAPH, "x", "y", "z", count=1)
    assert cluster.path(0, 1).links == ("x>s1", "s1>y")
    assert cluster.path(1, 0).links == ("y>s1", "s1>x")
    assert cluster.path(0, 1).latency_seconds == pytest.approx(4e-6)
    assert cluster.path(0, 2).links == ("x>s1", "s1>y", "y-z")
    assert cluster.path(2, 1).links == ("y-z",)
    direct = {"links": [*GRAPH["links"], {"a": "x", "b": "y", "bandwidth": "1GB/s", "latency": "50s"}]}
    # Hops decide first, whatever the latency.
    assert _cluster(direct, "x", "y", "z", count=1).path(0, 1).links == ("x>y",)


def test_a_graph_can_wire_devices() -> None:
    ring = {"links": [{"a": f"n:{i}", "b": f"n:{(i + 1) % 4}", **FAST} for i in range(4)]}
    cluster = _cluster(ring, "n", count=4, links=None)
    assert cluster.path(0, 1).links == ("n:0>n:1",)
    assert cluster.path(0, 3).links == ("n:0>n:3",)
    assert len(cluster.path(0, 2).links) == 2
    there, back = cluster.path(0, 2).links, cluster.path(2, 0).links
    assert [link.split(">")[::-1] for link in reversed(back)] == [link.split(">") for link in there]


def test_ranks_that_do_not_exist() -> None:
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.preset("dgx-h100").path(0, 8)
    assert caught.value.render() == (
        "error[cluster]: there is no path from rank 0 to rank 8\n  because: dgx-h100:1 has ranks 0 to 7"
    )
    with pytest.raises(ClusterError):
        ClusterSpec.preset("dgx-h100").path(-1, 0)


def test_a_path_that_was_asked_for_is_looked_up() -> None:
    cluster = ClusterSpec.preset("dgx-h100", nodes=64)
    pairs = [(rank, (rank + step) % 512) for rank in range(512) for step in (1, 8)]
    first = [cluster.path(a, b) for a, b in pairs]
    assert [cluster.path(a, b) for a, b in pairs] == first
    assert calls(lambda: [cluster.path(a, b) for a, b in pairs]) <= 10 * len(pairs)


def test_twice_the_devices_take_twice_the_work_for_twice_the_paths() -> None:
    def work(nodes: int) -> int:
        cluster, world = ClusterSpec.preset("dgx-h100", nodes=nodes), 8 * nodes
        pairs = [(rank, (rank + step) % world) for rank in range(world) for step in (1, 8)]
        return calls(lambda: [cluster.path(a, b) for a, b in pairs])

    assert work(64) <= 2.5 * work(32)


def test_equal_devices_are_read_once() -> None:
    """A device of a thousand alike costs a copy: a call for each of its fields, and a few."""
    cluster = ClusterSpec.preset("dgx-h100", nodes=128)
    assert calls(lambda: cluster.devices) <= (len(fields(Device)) + 5) * cluster.world_size
