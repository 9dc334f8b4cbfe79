"""Situations in which a comparison, not the plan, was what failed: each model is verified, or trained, as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cost_models.cluster import ClusterSpec
from partitioner import Workload, partition
from partitioner.models.as_graph import as_graph
from runtime.ranks.launch import WorkerPool


class Packed(nn.Parameter):
    """Two codes in a byte, as a subclass of Parameter with attributes of its own."""

    group: int

    def __new__(cls, data: Tensor, group: int) -> Packed:
        self: Packed = torch.Tensor._make_subclass(cls, data, False)
        self.group = group
        return self


class Quantized(nn.Module):
    """A table with sparse gradients, a frozen layer of 4-bit codes with scales in a buffer, an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 8, mode="sum", sparse=True)
        self.codes = Packed(torch.randint(0, 256, (32,), dtype=torch.uint8), 4)
        self.register_buffer("scale", torch.rand(16, 1))
        self.scale: Tensor
        self.down, self.up = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, items: Tensor) -> Tensor:
        x = self.table(items)
        codes = torch.stack([self.codes >> 4, self.codes & 15], 1).view(-1, 4)
        y: Tensor = F.linear(x, (codes * self.scale).view(8, 8)) + self.up(self.down(x))
        return y


class Network(nn.Module):
    """Features of nodes, summed along an edge list that is whole: dimension 0 of the features counts nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        h = h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
        y: Tensor = self.last(h)
        return y


def squared(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def quantized() -> Workload:
    torch.manual_seed(0)
    return Workload(Quantized(), {"items": torch.randint(0, 20, (8, 3))}, squared)


def network() -> Workload:
    torch.manual_seed(0)
    batch = {"x": torch.randn(12, 4), "edges": torch.randint(0, 12, (2, 30))}
    return Workload(Network(), batch, squared)


def test_sparse_gradients_and_quantized_weights_train_as_in_a_plain_loop(pool: WorkerPool) -> None:
    plan = partition(quantized(), ClusterSpec.local(2), batch_size=8, microbatches=2, min_stages=2)
    report = plan.verify(quantized(), train=True, pool=pool)
    report.raise_if_different()
    assert "dense for adamw" in " ".join(report.notes)


@pytest.mark.parametrize("train", [False, True])
def test_indices_into_the_batch_are_verified_on_the_examples_own_samples(
    train: bool, pool: WorkerPool
) -> None:
    workload = network()
    graph = as_graph(workload, batch_dims={"edges": None})
    plan = partition(graph, ClusterSpec.local(2), batch_size=12, microbatches=1, min_stages=2)
    report = plan.verify(workload, pool=pool, batch_dims={"edges": None}, train=train)
    report.raise_if_different()
    assert report.samples == 12
    assert any(
        note.startswith("verified on the 12 samples of the example: on 2 of them, Index")
        for note in report.notes
    )
