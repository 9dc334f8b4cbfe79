"""Parts of a cluster: which there are, what they cost, and that no plan is slower than on one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.fuzz_clusters import KINDS, look_at
from cost_models.cluster import ClusterSpec
from cost_models.variants import part_of
from passes.costs.costs import costs_of
from passes.lower.job import Job
from passes.search import place
from passes.search.hybrid.pools import divisions
from passes.search.judge import Judge
from passes.search.layer.request import LayerRequest
from passes.search.parts import parts
from passes.trace.trace import trace
from tests.support.matrix import thinned


def cluster(*nodes: tuple[str, int]) -> ClusterSpec:
    entries = [
        {"name": f"n{i}", "count": count, "device": device, "links": "NVLink3"}
        for i, (device, count) in enumerate(nodes)
    ]
    return ClusterSpec.from_dict({"nodes": entries, "network": "Ethernet-25G"})


OLD, NEW = "A100-40GB", "A100-80GB"


def listed(whole: ClusterSpec) -> list[tuple[int, ...]]:
    """The parts of a cluster whose devices are equally fast."""
    return parts(whole, lambda ranks: 1 / len(ranks))


def test_parts_are_fewer_nodes_of_a_kind_and_fewer_devices_of_each() -> None:
    found = listed(cluster((OLD, 2), (OLD, 2), (NEW, 2)))
    assert found == [
        (0, 1, 2, 3),  # of one kind, most devices first
        (0, 1),
        (0, 2),
        (4, 5),
        (0,),
        (4,),
        (0, 1, 2, 3, 4),  # a device less
        (0, 1, 2, 4, 5),
        (0, 1, 4, 5),
    ]


def test_parts_of_one_node_are_its_first_devices() -> None:
    assert listed(cluster((OLD, 4))) == [(0, 1, 2), (0, 1), (0,)]
    assert listed(ClusterSpec.local(4)) == [], "they share the cores of this machine"


def test_few_fast_devices_come_before_many_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"name": "n0", "count": 4, **KINDS[3]}, {"name": "n1", "count": 2, **KINDS[2]}]
    whole = ClusterSpec.from_dict({"nodes": nodes, "network": "Ethernet-25G"})
    graph = trace(nn.Linear(1024, 1024), torch.randn(2, 1024), loss_fn=lambda y, x: y.square().mean())
    job = Job(8, "sgd")
    monkeypatch.setattr(place, "fastest_of", lambda providers, judge, deadline, parts_of, *_, **__: parts_of)
    found = place.place_stages(LayerRequest(job), Judge(graph, costs_of(graph, whole), whole, job))
    of_one_kind = [part for part in found if max(part.ranks) < 4 or min(part.ranks) >= 4]
    assert [part.ranks for part in of_one_kind[:3]] == [(4, 5), (4,), (0, 1, 2, 3)]
    assert found[: len(of_one_kind)] == of_one_kind == sorted(of_one_kind, key=lambda own: own.floor_seconds)


def test_a_device_more_or_less_is_among_the_parts_of_many_nodes() -> None:
    for less, more in (((7, 2, 5, 3, 6), (8, 2, 5, 3, 6)), ((3, 3), (3, 4)), ((2, 2, 2), (2, 2, 3))):
        each = cluster(*((OLD, count) for count in more)).ranks_per_node
        part = tuple(rank for ranks, count in zip(each, less, strict=True) for rank in ranks[:count])
        assert part in listed(cluster(*((OLD, count) for count in more)))


def test_groups_on_a_part_are_those_of_a_cluster_like_it() -> None:
    whole = cluster((OLD, 4), (NEW, 2), (OLD, 4))
    for ranks in listed(whole):
        own = divisions(part_of(whole, ranks))
        seen = divisions(whole, ranks)
        assert [[(p.nodes, p.each) for p in pools] for pools in own] == [
            [(p.nodes, p.each) for p in pools] for pools in seen
        ]
        for pools, others in zip(own, seen, strict=True):
            for pool, other in zip(pools, others, strict=True):
                assert other.ranks(0, other.devices) == tuple(ranks[r] for r in pool.ranks(0, pool.devices))


def test_a_node_more_or_less_is_among_the_parts_of_many_kinds() -> None:
    nodes = [(OLD, count) for count in (1, 2, 3, 4, 5, 6)]
    whole = set(range(21))
    found = [set(ranks) for ranks in listed(cluster(*nodes))]
    for ranks in cluster(*nodes).ranks_per_node:
        assert whole - set(ranks) in found
        assert set(ranks) in found


def test_a_part_costs_what_it_costs_in_the_whole() -> None:
    whole = cluster((OLD, 4), (NEW, 3))
    ranks = (1, 4, 6)
    part = part_of(whole, ranks)
    assert [device.model for device in part.devices] == [whole.devices[rank].model for rank in ranks]
    assert [device.rank for device in part.devices] == [0, 1, 2]
    assert part.ranks_per_node == ((0,), (1, 2))
    for a in range(3):
        for b in range(3):
            assert part.path(a, b) == whole.path(ranks[a], ranks[b])


def test_a_part_without_cards_is_not_slowed_by_cards_that_lie_idle() -> None:
    processor = {"name": "n1", "count": 2, "device": KINDS[3]["device"], "links": KINDS[3]["links"]}
    whole = ClusterSpec.from_dict(
        {"nodes": [{"name": "n0", "count": 2, **KINDS[0]}, processor], "network": "Ethernet-25G"}
    )
    assert whole.contention([0, 2]) == whole.contention([1]) > 1.0
    assert whole.contention([2, 3]) == part_of(whole, (2, 3)).contention([0, 1]) == 1.0


@pytest.mark.parametrize("number", thinned([2, 7, 22], [7]))
def test_more_devices_are_never_slower(number: int) -> None:
    for found in look_at(number, ("layer", "feature", "hybrid")):
        assert found.outcome in ("planned", "refused"), found
