"""The graph that every rank runs on its shards: names and sizes."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn

from cost_models.layout import Mesh, Shard
from passes.graph.graph import OpGraph
from passes.graph.verify import verify_graph
from passes.shard.shard import ShardedGraph, shard_graph
from passes.shard.words import FeaturePlacement
from passes.trace.trace import trace
from tests.distributed.sharded_models import BATCH, HEADS, FusedGpt, fused_batch, place


class Repeats(nn.Module):
    """x [b, 3], y [b, 6]: a whole dimension of three is repeated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = ((self.w(x).repeat(1, 2) - y) ** 2).mean()
        return loss


def by_samples(graph: OpGraph) -> ShardedGraph:
    sharded = shard_graph(graph, place(graph, Mesh((0, 1), (2,), ("data",)), (BATCH,), 1))
    verify_graph(sharded.graph, after="shard")
    return sharded


def test_whole_dimensions_are_repeated_a_whole_number_of_times() -> None:
    sharded = by_samples(trace(Repeats(), {"x": torch.zeros(2, 3), "y": torch.zeros(2, 6)}))
    (repeat,) = [node for node in sharded.graph.ops if node.target is torch.ops.aten.repeat.default]
    assert str(repeat.args[1]) == "[1, 2]"


class Squares(nn.Module):
    """x, y [b, 8]: a view by samples, then a product."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pairs = x.view(x.shape[0], 4, 2)
        squares: Tensor = (pairs * pairs).sum(-1).mean() * y.mean()
        return squares


def test_ops_keep_their_names_beside_sizes() -> None:
    graph = trace(Squares(), {"x": torch.zeros(2, 8), "y": torch.zeros(2, 8)})
    mesh = Mesh((0, 1), (2,), ("data",))
    leaves = dict.fromkeys(graph.batch.batch_dims, (Shard(0),))  # gathered: a rank has twice its own samples
    local = shard_graph(graph, FeaturePlacement(mesh, {}, {}, leaves, 1)).graph
    verify_graph(local, after="shard")
    assert operator.mul in {node.target for node in local.ops}
    kept = {node.name: node.target for node in local.ops}
    tensors = [node for node in graph.ops if isinstance(node.meta["val"], Tensor)]
    assert [kept.get(node.name) for node in tensors] == [node.target for node in tensors]


def test_heads_of_one_product_take_any_order_in_memory() -> None:
    """Between the whole product and a rank's heads is a bridge, whose result lies in the order of its dimensions."""
    graph = trace(FusedGpt().double(), dict(fused_batch(2)))
    local = shard_graph(graph, place(graph, Mesh((0, 1), (2,), ("tensor",)), (HEADS,), 1)).graph
    verify_graph(local, after="shard")
    (attention,) = [n for n in local.ops if n.target is torch.ops.aten.scaled_dot_product_attention.default]
    assert tuple(attention.meta["val"].shape[1:]) == (2, 4, 4)
