"""Pass bags: an embedding bag is one op, and its bags are rows of the model's own indices where they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from partitioner import Workload
from passes.graph.graph import OpGraph
from passes.shard.couplings import couplings
from passes.trace.trace import trace
from runtime.ops.bags import EMBEDDING_BAG
from tests.support.traced_models import eager_loss, run

Forward = Callable[[nn.EmbeddingBag, Tensor, Tensor], Tensor]

FIXED: dict[str, Forward] = {
    "matrix": lambda bag, ids, shares: bag(ids),
    "weighted": lambda bag, ids, shares: bag(ids, per_sample_weights=shares),
    "flat": lambda bag, ids, shares: bag(ids.flatten(), torch.arange(0, ids.numel(), ids.shape[1])),
    "counted": lambda bag, ids, shares: bag(ids.reshape(-1), torch.arange(ids.shape[0]) * ids.shape[1]),
}
BY_OFFSETS: dict[str, Forward] = {
    "counted": lambda bag, ids, shares: bag(ids.flatten(), (ids[:, 0] > 0).long().cumsum(0) - 1),
    "others' weights": lambda bag, ids, shares: bag(
        ids.flatten(), torch.arange(0, ids.numel(), 5), per_sample_weights=shares.t().flatten()
    ),
    "other bags": lambda bag, ids, shares: bag(ids.flatten(), torch.arange(0, ids.numel(), 3))[
        : ids.shape[0]
    ],
}


class Bags(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.bag, self.made = nn.EmbeddingBag(20, 4, mode="sum"), forward

    def forward(self, ids: Tensor, shares: Tensor) -> Tensor:
        return self.made(self.bag, ids, shares).pow(2).mean()


def traced(forward: Forward) -> tuple[Workload, OpGraph, fx.Node]:
    torch.manual_seed(0)
    batch = {"ids": torch.randint(1, 20, (4, 5)), "shares": torch.rand(4, 5)}
    workload = Workload(Bags(forward), batch, None)
    graph = trace(workload.model, batch)
    (node,) = (node for node in graph.ops if "embedding_bag" in str(node.target))
    assert node.target is EMBEDDING_BAG
    assert torch.equal(run(graph, workload.model, batch)[0], eager_loss(workload, batch))
    return workload, graph, node


@pytest.mark.parametrize("forward", FIXED.values(), ids=FIXED)
def test_bags_of_one_size_are_rows_and_couple_no_samples(forward: Forward) -> None:
    workload, graph, node = traced(forward)
    assert (node.args[1].op, node.args[2]) == ("placeholder", None)
    assert couplings(graph) == ()
    larger = {"ids": torch.randint(1, 20, (7, 5)), "shares": torch.rand(7, 5)}
    assert torch.equal(run(graph, workload.model, larger)[0], eager_loss(workload, larger))


@pytest.mark.parametrize("forward", BY_OFFSETS.values(), ids=BY_OFFSETS)
def test_other_bags_are_read_by_their_offsets(forward: Forward) -> None:
    _, graph, node = traced(forward)
    assert isinstance(node.args[2], fx.Node)
    assert couplings(graph)
