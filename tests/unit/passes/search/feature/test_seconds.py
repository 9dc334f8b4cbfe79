"""Seconds of an op on its shards, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from passes.costs.costs import costs_of
from passes.graph.graph import tensor_specs
from passes.lower.job import Job
from passes.search.feature.seconds import LocalRows, local_seconds, traffic_of_parts
from passes.search.hybrid.recipes.joints import pieces_of
from passes.search.hybrid.recipes.pieces import GroupKind, PieceSearch
from passes.trace.trace import trace
from tests.support.traced_models import loaded

X, WEIGHT, Y = 64 * 8 * 4.0, 16 * 8 * 4.0, 64 * 16 * 4.0


class Linear(nn.Module):
    """x [b, 8], y [b, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).square().mean()


def test_splitting_samples_does_not_split_the_sums_of_gradients() -> None:
    """Split 4 ways, by samples or by columns: forward and the weight's gradient touch x, weight and y once each.

    The weight's gradient is then added to that of earlier micro-batches: two read, one written, of the local weight.
    """
    graph = trace(Linear(), {"x": torch.randn(2, 8)}, loss_reduction="mean")
    device = {"kind": "cpu", "memory": "1GiB", "memory_bandwidth": 1e9, "flops": {"float32": 1e18}}
    cluster = ClusterSpec.from_dict({"nodes": [{"name": "n", "device": device}]})
    linear = next(node for node in graph.ops if node.name == "linear")
    shares = np.array([[1 / 4, 1.0, 1 / 4], [1.0, 1 / 4, 1 / 4]])
    specs = [tensor_specs(node)[0] for node in linear.all_input_nodes], tensor_specs(linear)
    symbols, parts = {graph.batch.batch_symbol: 64}, np.array([4, 1])
    traffic = traffic_of_parts(graph, linear, specs, symbols, (shares[:, :2], shares[:, 2:]), parts)
    row = LocalRows(np.full(2, graph.ops.index(linear)), np.full(2, 1 / 4), traffic, parts)
    seconds = local_seconds(costs_of(graph, cluster), [row], 64, cluster.devices)
    by_samples = 2 * (X / 4 + WEIGHT + Y / 4) + 3 * WEIGHT
    by_columns = 2 * (X + WEIGHT / 4 + Y / 4) + 3 * WEIGHT / 4
    assert seconds.tolist() == pytest.approx([by_samples / 1e9, by_columns / 1e9])


@pytest.mark.parametrize("model", ["alexnet", "gpt2"])
def test_replicas_take_as_long_as_one_device_with_their_samples(model: str) -> None:
    """So a bound by one replica is one for any number of them."""
    _, graph = loaded(model)
    cluster = ClusterSpec.local(4)
    search = PieceSearch(pieces_of(graph), cluster, frozenset())
    for kind, first in enumerate(search.pieces.first):
        one, four = (
            search.problem(kind, GroupKind(tuple(range(n)), n, 1), Job(2 * n * 8), 8) for n in (1, 4)
        )
        for unit, alone, replicas in zip(one.space.units, one.units, four.units, strict=True):
            if unit.kind == "op":
                assert replicas.seconds.min() >= alone.seconds.min() * (1 - 1e-12), (first, unit.name)
