"""Gathers started ahead: behind which, and that what is computed stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from runtime.ops import bridges
from runtime.ops.gather_ahead import gather_steps, start_ahead

aten = torch.ops.aten


def graph_of(weights: tuple[int, ...]) -> fx.Graph:
    """A chain of layers; each reads so many weights, which are gathered in front of it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    given = [graph.placeholder(f"w{i}") for i in range(sum(weights))]
    y = graph.call_function(aten.relu.default, (x,))
    for count in weights:
        own = [
            graph.call_function(bridges.all_gather, (given.pop(0), 0), {"axis": "data", "parts": 2})
            for _ in range(count)
        ]
        for weight in own:
            y = graph.call_function(aten.mul.Tensor, (y, weight))
    graph.output((y,))
    return graph


def gathers_of(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=bridges.all_gather)


def doubled(happened: list[str]) -> Callable[[fx.Node], tuple[Callable[..., Any], Callable[..., Any]]]:
    """As a gather of two equal parts."""

    def split(node: fx.Node) -> tuple[Callable[..., Any], Callable[..., Any]]:
        name = str(node.args[0])

        def start(x: Tensor) -> Tensor:
            happened.append(f"start {name}")
            return torch.cat([x, x])

        def wait(x: Tensor, under_way: Tensor) -> Tensor:
            happened.append(f"wait {name}")
            return under_way

        return start, wait

    return split


def test_each_step_starts_behind_the_one_before() -> None:
    graph = graph_of((1, 2, 1))
    names = [node.name for node in graph.nodes]
    steps = gather_steps(gathers_of(graph))
    assert [len(step) for step in steps] == [1, 2, 1]
    happened: list[str] = []
    start_ahead(graph, steps, doubled(happened))
    graph.lint()
    assert [node.name for node in graph.nodes if node.name in names] == names
    (first,) = gathers_of(graph)  # nothing is in front of it
    first.target = lambda x, *_, **__: torch.cat([x, x])
    x, *w = (torch.full((size,), float(i + 1)) for i, size in enumerate((4, 2, 2, 2, 2)))
    (y,) = fx.GraphModule(torch.nn.Module(), graph)(x, *w)
    torch.testing.assert_close(y, torch.full((4,), 120.0))
    assert happened == ["start w1", "start w2", "wait w1", "wait w2", "start w3", "wait w3"]


@pytest.mark.parametrize("inside", [0, 1])
def test_blocks_that_are_computed_again_gather_as_before(inside: int) -> None:
    graph = graph_of((1, 1, 1))
    own = gathers_of(graph)
    steps = gather_steps(own, [[own[inside].name]])
    assert [own[inside] in step for step in steps] == [False, False]
