"""Which ops form a block: layers by repetition, a block per call, and nothing that leads out of a block and back."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from passes.graph.blocks import SELECTIVE, attention_of, block_of, regions_of, regions_of_stages
from passes.graph.graph import OpGraph
from passes.trace.trace import trace
from tests.support.traced_models import small, small_gpt2


class Mlp(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


class Stack(nn.Module):
    """Layers that repeat, inside groups that do not."""

    def __init__(self, widths: tuple[int, ...] = (4, 4, 8), calls: int = 1) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.groups = nn.ModuleList([nn.ModuleList(Mlp(width) for width in widths), nn.ModuleList([Mlp(6)])])
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.calls):
            for group in self.groups:
                assert isinstance(group, nn.ModuleList)
                for layer in group:
                    x = layer(x)
        return x


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = Mlp(5), Mlp(6), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.decoder(self.encoder(x)))
        return result


def squares(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def traced(model: nn.Module) -> OpGraph:
    return trace(model, torch.randn(2, 4), loss_fn=squares)


def test_the_layers_of_a_transformer() -> None:
    _, graph = small_gpt2()
    found = Counter(block_of(graph).values())
    assert list(found) == ["transformer.h.0", "transformer.h.1"]
    assert len(set(found.values())) == 1


def test_encoder_and_decoder() -> None:
    workload = small("t5")
    found = set(block_of(trace(workload.model, workload.example_inputs)).values())
    assert found == {f"{half}.block.{i}" for half in ("encoder", "decoder") for i in range(2)}


def test_children_of_the_container_that_repeats_and_unlike_ones_too() -> None:
    assert list(dict.fromkeys(block_of(traced(Stack())).values())) == [
        "groups.0.0",
        "groups.0.1",
        "groups.0.2",
    ]


def test_a_block_for_each_call() -> None:
    found = Counter(block_of(traced(Stack((4, 4), calls=2))).values())
    assert list(found) == ["groups.0.0", "groups.0.1", "groups.0.0#1", "groups.0.1#1"]


def test_stages_that_repeat_but_for_their_sizes() -> None:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(Mlp(width) for width in (4, 5, 6))

        def forward(self, x: Tensor) -> Tensor:
            for stage in self.stages:
                x = stage(x)
            return x

    assert list(dict.fromkeys(block_of(traced(Pyramid())).values())) == ["stages.0", "stages.1", "stages.2"]


def test_without_repetition_the_outermost_modules() -> None:
    assert list(dict.fromkeys(block_of(traced(Plain())).values())) == ["encoder", "decoder"]


@pytest.mark.parametrize("model", [Stack(), Stack((4, 4), calls=3), Plain()], ids=["stack", "calls", "plain"])
def test_nothing_leads_out_of_a_block_and_back(model: nn.Module) -> None:
    graph = traced(model)
    blocks = block_of(graph)
    assert blocks
    for name in set(blocks.values()):
        inside = {op for op, block in blocks.items() if block == name}
        behind: set[str] = set()
        for node in graph.ops:
            sources = {source.name for source in node.all_input_nodes}
            if node.name in inside:
                assert not sources & behind
            elif sources & (inside | behind):
                behind.add(node.name)


def test_a_block_that_stages_share_is_a_region_in_each() -> None:
    graph = traced(Plain())
    ops = [op for op, block in block_of(graph).items() if block == "decoder"]
    stage_of = {node.name: 0 for node in graph.ops} | dict.fromkeys(ops[2:], 1)
    assert regions_of_stages(graph, stage_of, [("decoder",), ("decoder",)]) == (
        (tuple(ops[:2]),),
        (tuple(ops[2:]),),
    )
    assert regions_of_stages(graph, stage_of, [(), ("decoder",)]) == ((), (tuple(ops[2:]),))
    assert regions_of_stages(graph, stage_of, [(), ()]) == ()


class Attending(nn.Module):
    """Two attentions between products with parameters; ``plain``: scores and softmax, as ops of their own."""

    def __init__(self, *, plain: bool) -> None:
        super().__init__()
        self.plain = plain
        self.into, self.out = (nn.ModuleList(nn.Linear(4, width) for _ in range(2)) for width in (12, 4))

    def forward(self, x: Tensor) -> Tensor:
        for into, out in zip(self.into, self.out, strict=True):
            q, k, v = into(x).chunk(3, dim=-1)
            if self.plain:
                mixed = (q @ k.transpose(1, 2) / 2).softmax(dim=-1) @ v
            else:
                mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + out(mixed)
        return x


def test_an_attention_goes_from_the_product_of_query_and_key_to_that_with_the_values() -> None:
    graph = trace(Attending(plain=True), torch.randn(2, 3, 4), loss_fn=squares)
    regions = regions_of(graph, (SELECTIVE,))
    names = [[op.split("_")[0] for op in region] for region in regions]
    assert names == [["matmul", "div", "softmax", "matmul"]] * 2
    assert set(attention_of(graph)) == {op for region in regions for op in region}


def test_an_attention_of_one_op_keeps_no_scores() -> None:
    graph = trace(Attending(plain=False), torch.randn(2, 3, 4), loss_fn=squares)
    assert attention_of(graph) == {}
    assert regions_of(graph, (SELECTIVE,)) == ()
