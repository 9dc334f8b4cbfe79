"""Blocks on shards that are computed again: the bridges that they repeat, and those that run once."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cost_models.layout import Mesh, Shard
from passes.graph.blocks import GATHERS, regions_of_stages
from passes.graph.graph import OpGraph
from passes.shard.regions import regions_on_shards
from passes.shard.shard import ShardedGraph, shard_graph
from passes.trace.trace import trace
from runtime.ops.bridges import all_gather, is_bridge
from tests.distributed.sharded_models import COLUMN_ROW, SEQUENCE, ZERO3, Forced, Gpt, R, gpt_batch, place

TWO = Mesh((0, 1), (2,), ("all",))


@cache
def gpt() -> OpGraph:
    return trace(Gpt(tied=False), gpt_batch(4), loss_reduction="mean")


def sharded(graph: OpGraph, forced: Forced) -> ShardedGraph:
    return shard_graph(graph, place(graph, TWO, (forced,), 1))


def blocks(graph: OpGraph, *names: str) -> tuple[tuple[str, ...], ...]:
    stage_of = {node.name: 0 for node in graph.ops}
    return regions_of_stages(graph, stage_of, [names])[0]


def repeated(local: OpGraph, regions: tuple[tuple[str, ...], ...]) -> list[list[str]]:
    """The bridges of each region."""
    return [[name for name in names if is_bridge(local.nodes[name])] for names in regions]


@pytest.mark.parametrize(
    ("forced", "kinds"),
    [
        (ZERO3, {"all_gather"}),
        (COLUMN_ROW, {"all_reduce", "sum_gradient"}),
        (SEQUENCE, {"all_gather", "reduce_scatter", "keep_first"}),
    ],
    ids=["zero3", "column_row", "sequence"],
)
def test_a_block_repeats_the_bridges_that_only_it_needs(forced: Forced, kinds: set[str]) -> None:
    local = sharded(gpt(), forced).graph
    first, second = repeated(local, regions_on_shards(local, blocks(gpt(), "h.0", "h.1")))
    assert first
    assert second
    found = {local.nodes[name].target.__name__ for name in (*first, *second)}  # type: ignore[union-attr]
    assert found == kinds
    outside = {node.name for node in local.ops if is_bridge(node)}.difference(first, second)
    read = {local.nodes[name].args[0].name for name in outside}  # type: ignore[union-attr]
    assert not any(name.startswith("p_h_") for name in read), "a block's parameters are gathered in it"


def test_products_alone_repeat_the_gathers_of_their_parameters() -> None:
    """ZeRO-3's, with the products of one value; without gathers nothing is repeated."""
    local = sharded(gpt(), ZERO3).graph
    regions = regions_on_shards(local, blocks(gpt(), GATHERS))
    products = [node for node in gpt().ops if node.target is torch.ops.aten.linear.default]
    assert len(regions) == len({node.args[0] for node in products}) < len(products)
    for names in regions:
        gathers = [name for name in names if local.nodes[name].target is all_gather]
        alike = set(names).difference(gathers)
        assert len({gpt().nodes[name].args[0] for name in alike}) == 1
        assert {user.name for name in gathers for user in local.nodes[name].users} == alike
    assert {name for names in regions for name in names} >= {node.name for node in products}
    assert regions_on_shards(sharded(gpt(), COLUMN_ROW).graph, blocks(gpt(), GATHERS)) == ()


def test_products_of_one_value_gather_it_again() -> None:
    """Sequence parallelism's: query, key and value read one gather, and so do both layers behind a norm."""
    local = sharded(gpt(), SEQUENCE).graph
    regions = regions_on_shards(local, blocks(gpt(), GATHERS))
    assert regions
    for names in regions:
        (gather,) = (node for node in map(local.nodes.__getitem__, names) if node.target is all_gather)
        assert {user.name for user in gather.users} == set(names) - {gather.name}
    assert max(map(len, regions)) == 4


def test_beside_blocks_products_of_other_ops_are_alone() -> None:
    local = sharded(gpt(), ZERO3).graph
    regions = regions_on_shards(local, blocks(gpt(), "h.0", GATHERS))
    alone = regions_on_shards(local, blocks(gpt(), GATHERS))
    (block,) = regions_on_shards(local, blocks(gpt(), "h.0"))
    assert set(regions) == {block, *(names for names in alone if names[-1] not in block)}


def test_every_region_is_one_call() -> None:
    """Nothing leads out of a region and back into it."""
    for forced in (ZERO3, COLUMN_ROW, SEQUENCE):
        local = sharded(gpt(), forced).graph
        for region in regions_on_shards(local, blocks(gpt(), "h.0", "h.1")):
            after: set[str] = set()
            for node in local.ops:
                sources = {source.name for source in node.all_input_nodes}
                if node.name in region:
                    assert not sources & after
                elif sources & (after | set(region)):
                    after.add(node.name)


class Shared(nn.Module):
    """Two layers read one parameter, and what the first made is read once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Own(self.shared) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        second = self.layers[1](first)
        return F.linear(first, self.shared.weight) + second


class Own(nn.Module):
    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.own(torch.sin(self.shared(torch.tanh(x)))))
        return result


def test_what_several_blocks_read_is_bridged_once() -> None:
    model = Shared()
    graph = trace(model, torch.randn(4, 8), loss_fn=lambda y, x: y.square().mean())
    forced = Forced(stored={"*": Shard(0)}, batch=R, values={"*": R})
    local = sharded(graph, forced).graph
    regions = blocks(graph, "layers.0", "layers.1")
    assert len(regions) == 2
    again = repeated(local, regions_on_shards(local, regions))
    own = {given.node: given.name for given in local.inputs}
    read = [{own.get(local.nodes[name].args[0].name, "") for name in names} for names in again]  # type: ignore[union-attr]
    for number, names in enumerate(read):
        assert f"layers.{number}.own.weight" in names
        assert not any("shared" in name for name in names)
    (alone,) = repeated(local, regions_on_shards(local, regions[:1]))
    assert alone == again[0], "what the first layer repeats does not depend on the second"
