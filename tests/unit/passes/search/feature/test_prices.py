"""Prices of memory in the feature-wise search: a negative one would make its bounds false."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from passes.costs.costs import costs_of
from passes.lower.job import Job
from passes.search.feature.place import FeatureRequest, place_features
from passes.search.feature.solve import ProblemSearch
from passes.trace.trace import trace

CASES = (
    ([512, 64, 256, 1024, 512, 512], 3.622e8, 10_538_188, "0.01GB/s", 512),
    ([512, 1024, 256, 512], 7.85e10, 8_808_038, "0.01GB/s", 512),
    ([256, 64, 512], 1.165e9, 1_048_576, "0.01GB/s", 512),
    ([128, 1024, 512], 1.1e11, 10_485_760, "0.01GB/s", 512),
)
"""Sizes, FLOP/s, memory, links, samples: in each, a choice of fewer bytes is found that is the faster one as well."""


class Chain(nn.Module):
    """x [b, sizes[0]]."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def test_memory_never_has_a_negative_price(monkeypatch: pytest.MonkeyPatch) -> None:
    prices: list[float] = []
    ascend = ProblemSearch._ascend

    def noted(self: ProblemSearch, price: float, *rest: float) -> object:
        prices.append(price)
        return ascend(self, price, *rest)

    monkeypatch.setattr(ProblemSearch, "_ascend", noted)
    for sizes, flops, memory, bandwidth, samples in CASES:
        graph = trace(Chain(sizes), {"x": torch.randn(8, sizes[0])}, loss_reduction="mean")
        device = {"kind": "cpu", "memory": f"{memory}B", "memory_bandwidth": 1e9, "flops": {"float32": flops}}
        links = {"default": {"bandwidth": bandwidth, "latency": 1e-5}}
        node = {"name": "n", "count": 4, "device": device, "links": links}
        cluster = ClusterSpec.from_dict({"nodes": [node]})
        with suppress(InfeasibleError):
            place_features(
                graph, costs_of(graph, cluster), cluster, FeatureRequest(Job(samples), microbatches=1)
            )
    assert any(price > 0.0 for price in prices)
    assert min(prices) >= 0.0
