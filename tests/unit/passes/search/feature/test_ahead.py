"""What runs beside gathers of parameters and sums of their gradients, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from cost_models.cluster import ClusterSpec
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.search.feature.ahead import backward_beside, computed_beside
from passes.search.recomputed import Recomputed
from passes.shard.state import ALONE_BYTES
from passes.trace.trace import trace

WIDTH = int((ALONE_BYTES / 4) ** 0.5) + 1
"""A square weight of float32 is as large as what is summed alone."""


class Tied(nn.Module):
    """Equal blocks, each behind a norm, between an embedding and the same as the last layer."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(blocks))
        )

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        made = nn.functional.linear(self.blocks(self.first(x)), self.first.weight)
        return nn.functional.mse_loss(made, target)


def graph_of(blocks: int) -> OpGraph:
    x = torch.zeros(4, WIDTH)
    return trace(Tied(blocks), (x, x), loss_reduction="mean")


def test_a_gradient_that_is_there_last_is_summed_beside_nothing() -> None:
    """Others have their part by size of the whole backward, or what is left of it where they are there."""
    graph = graph_of(3)
    backward = np.ones(len(graph.ops))
    names = {given.name: given.node for given in graph.inputs if given.kind == "parameter"}
    found = {name: backward_beside(graph, node, backward) for name, node in names.items()}
    elements = {name: graph.parameters[name].elements for name in names}
    assert found["first.weight"] == 0.0
    share = elements["blocks.2.1.weight"] / sum(elements.values())
    assert found["blocks.2.1.weight"] == pytest.approx(share * len(graph.ops))
    assert found["blocks.0.1.weight"] == 2.0  # the first layer and the norm are before it


@pytest.mark.parametrize("alike", [0, 1, 3])
def test_small_parameters_beside_large_ones_have_no_part(alike: int) -> None:
    """One step of all is beside nothing, and each bears its share: two of each block, of each piece alike."""
    graph = graph_of(4)
    costs = costs_of(graph, ClusterSpec.parse("local:2"))
    found = computed_beside(Recomputed(graph, costs, alike=alike))
    names = {given.node: given.name for given in graph.inputs}
    of = {names[node]: own for node, own in found.items()}
    assert not [name for name in of if name.endswith("1.bias")]
    assert {of[f"blocks.{block}.1.weight"].part for block in range(4)} == {1.0}
    assert list({own.often for own in of.values()}) == [pytest.approx(1 - 1 / (8 * max(alike, 1)))]


def test_layers_reach_back_past_norms() -> None:
    """What a layer's parameters run beside begins where the layer before begins; a norm's own, there too."""
    graph = graph_of(2)
    found = computed_beside(Recomputed(graph, costs_of(graph, ClusterSpec.parse("local:2"))))
    names = {given.node: given.name for given in graph.inputs}
    count = {names[node]: sum(often for _, often in own.ops) for node, own in found.items()}
    assert count["blocks.1.1.weight"] == 3  # the layer before, its GELU, the norm
    assert count["blocks.1.0.weight"] == 2  # the layer before and its GELU
