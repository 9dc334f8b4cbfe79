"""Shapes of blocks: sizes that end together, which families go together, the ranking on a perceptron."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.search.free.request import FreeRequest
from passes.search.free.shapes import BlockChoice, alternating, equalized, family_seconds, shapes
from passes.search.free.splits import automatic_families
from passes.trace.trace import trace

JOB = Job(64, "sgd")


class Perceptron(nn.Module):
    """Four layers; the second and the fourth sum over the neurons of the first and the third."""

    def __init__(self, width: int = 48, hidden: int = 256) -> None:
        super().__init__()
        sizes = (width, hidden, width, hidden, width)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return trace(Perceptron(), (torch.randn(2, 48),), loss_fn=lambda y, x: y.square().mean())


def cluster(bandwidth: str = "10TB/s", speeds: tuple[float, ...] = (3, 1, 1, 1)) -> ClusterSpec:
    """Slow workers, the first three times as fast: messages cost nothing, or everything."""
    link = {"bandwidth": bandwidth, "latency": "1ns"}
    nodes = [
        {
            "name": f"n{i}",
            "count": 1,
            "device": {
                "name": f"d{i}",
                "kind": "cpu",
                "memory": "1GiB",
                "memory_bandwidth": "10TB/s",
                "flops": {"float32": 1e8 * speed},
                "launch_overhead": "0us",
            },
            "links": {"default": link},
        }
        for i, speed in enumerate(speeds)
    ]
    return ClusterSpec.from_dict({"name": "toys", "nodes": nodes, "network": {**link, "per": "device"}})


def ranked(graph: OpGraph, machine: ClusterSpec, counts: tuple[int, ...] = (1, 4)) -> list[BlockChoice]:
    costs = costs_of(graph, machine)
    chosen = automatic_families(graph, costs, machine)
    return shapes(graph, costs, machine, FreeRequest(JOB), counts, chosen)


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(0.0, 1e3)), min_size=1, max_size=8),
)
def test_equalized_shares_end_together(devices: list[tuple[float, float]]) -> None:
    unit, fixed = zip(*devices, strict=True)
    shares = equalized(unit, fixed)
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(1.0, rel=1e-6)
    ends = [x * u + f for x, u, f in zip(shares, unit, fixed, strict=True)]
    level = max(end for end, x in zip(ends, shares, strict=True) if x > 0)
    assert all(end == pytest.approx(level, rel=1e-6) for end, x in zip(ends, shares, strict=True) if x > 1e-9)
    assert all(f >= level * (1 - 1e-9) for f, x in zip(fixed, shares, strict=True) if x == 0)


def test_equalized_leaves_out_devices_that_cannot_help() -> None:
    assert equalized((1.0, 1.0, 1.0), (0.0, 0.5, 5.0)) == pytest.approx((0.75, 0.25, 0.0))


def test_a_sum_is_not_split_again(graph: OpGraph) -> None:
    """Layers 1 and 3 sum over the blocks of 0 and 2."""
    machine = cluster()
    large = automatic_families(graph, costs_of(graph, machine), machine)
    kept = alternating(large)
    assert [family.ops for family in kept] == [("linear",), ("linear_2",)]
    assert {op for family in large for op in family.ops} > {"linear", "linear_2"}


def test_families_are_large_whatever_the_batch(graph: OpGraph) -> None:
    """FLOPs of families are of the example batch of 2, and compared with the model's for as many."""
    machine = cluster()
    large = automatic_families(graph, costs_of(graph, machine), machine)
    assert {"linear", "linear_2"} <= {op for family in large for op in family.ops}


@pytest.mark.parametrize(("memory", "split"), [(2**22, False), (3 * 2**19, True)])
def test_a_table_that_no_device_holds_is_split(memory: int, split: bool) -> None:
    """A table of 1 MiB, of which next to nothing is computed."""
    layers = nn.EmbeddingBag(2**14, 16, mode="sum"), nn.Linear(16, 256), nn.Linear(256, 256)
    graph = trace(
        nn.Sequential(*layers),
        (torch.zeros(4, 3, dtype=torch.long),),
        loss_fn=lambda out, batch: out.square().mean(),
    )
    machine = ClusterSpec.local(2, memory=memory)
    chosen = automatic_families(graph, costs_of(graph, machine), machine)
    assert chosen
    assert (("embedding_bag",) in [family.ops for family in chosen]) == split


def test_free_messages_are_worth_all_devices(graph: OpGraph) -> None:
    best = ranked(graph, cluster())[0]
    assert set(best.ranks) == {0, 1, 2, 3}
    assert all(sum(sizes) == family.units for family, sizes in zip(best.families, best.sizes, strict=True))


def test_dear_messages_are_worth_none(graph: OpGraph) -> None:
    """0.5 MB/s: the best shape is estimated to take longer than one device."""
    machine = cluster("500kB/s")
    alone = float(
        1 / family_seconds(
            graph, costs_of(graph, machine), machine, FreeRequest(JOB), 1,
            automatic_families(graph, costs_of(graph, machine), machine),
        ).speeds.max()
    )  # fmt: skip
    assert ranked(graph, machine)[0].seconds > alone
    assert ranked(graph, cluster())[0].seconds < alone


def test_the_fastest_device_has_the_first_block(graph: OpGraph) -> None:
    by_speed = [s for s in ranked(graph, cluster(speeds=(1, 1, 3, 1))) if len(s.ranks) == 4]
    assert any(s.ranks[0] == 2 and s.sizes[0][0] == max(s.sizes[0]) for s in by_speed)


def test_estimates_rise_and_shapes_differ(graph: OpGraph) -> None:
    found = ranked(graph, cluster("1GB/s"))
    seconds = [shape.seconds for shape in found]
    assert seconds == sorted(seconds)
    assert len({(shape.families, shape.sizes, shape.ranks) for shape in found}) == len(found)
    assert {shape.microbatches for shape in found} <= {1, 4}
