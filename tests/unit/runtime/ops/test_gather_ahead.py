"""Gathers started ahead: behind which, and that what is computed stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, fx

from runtime.ops import bridges
from runtime.ops.gather_ahead import StepWays, WaitForGather, gather_steps, start_ahead
from runtime.segment.recompute import checkpointed, marked
from tests.support.alive import AliveBytes

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


def doubled(happened: list[str]) -> Callable[[Sequence[fx.Node]], StepWays]:
    """As gathers of two equal parts, by two ranks that compute the same."""

    def ways(gathers: Sequence[fx.Node]) -> StepWays:
        names = [str(gather.args[0]) for gather in gathers]

        def under_way(name: str, result: Tensor) -> WaitForGather:
            happened.append(f"start {name}")

            def wait() -> Tensor:
                happened.append(f"wait {name}")
                return result

            return wait

        def start(parts: Sequence[Tensor]) -> list[WaitForGather]:
            return [under_way(name, torch.cat([x, x])) for name, x in zip(names, parts, strict=True)]

        def sums(gradients: Mapping[int, Tensor]) -> dict[int, WaitForGather]:
            return {n: under_way(f"d{names[n]}", g[: g.shape[0] // 2] * 2) for n, g in gradients.items()}

        return StepWays(start, sums)

    return ways


def test_each_step_starts_behind_the_one_before() -> None:
    graph = graph_of((1, 2, 1))
    names = [node.name for node in graph.nodes]
    steps = gather_steps(gathers_of(graph))
    assert [len(step.gathers) for step in steps] == [1, 2, 1]
    happened: list[str] = []
    start_ahead(graph, steps, doubled(happened))
    graph.lint()
    assert [node.name for node in graph.nodes if node.name in names] == names
    x, *w = (torch.full((size,), float(i + 1)) for i, size in enumerate((4, 2, 2, 2, 2)))
    (y,) = fx.GraphModule(torch.nn.Module(), graph)(x, *w)
    torch.testing.assert_close(y, torch.full((4,), 120.0))
    first = ["start w0", "wait w0", "start w1", "start w2", "wait w1", "wait w2", "start w3", "wait w3"]
    assert happened == first, "nothing is in front of w0"


def test_gathers_of_a_block_are_one_step_in_front_of_the_block_before() -> None:
    """Two blocks of two layers; the second forward of each stops at its last product, as in backward it may."""
    graph = graph_of((1, 1, 1, 1))
    gathers = gathers_of(graph)
    layers = [(gather.name, next(iter(gather.users)).name) for gather in gathers]
    blocks = [(*layers[0], *layers[1]), (*layers[2], *layers[3])]
    happened: list[str] = []
    steps = gather_steps(gathers, blocks)
    assert [len(step.gathers) for step in steps] == [2, 2]
    start_ahead(graph, steps, doubled(happened))
    again = checkpointed(marked(fx.GraphModule(torch.nn.Module(), graph), blocks), random=False)
    x, *w = (torch.full((size,), float(i + 1), requires_grad=True) for i, size in enumerate((4, 2, 2, 2, 2)))
    (y,) = again(x, *w)
    torch.testing.assert_close(y, torch.full((4,), 120.0))
    begun = ["start w0", "start w1", "start w2", "start w3"]
    assert happened == [*begun, "wait w0", "wait w1", "wait w2", "wait w3"]
    happened.clear()
    y.sum().backward()
    assert happened[:4] == ["start w2", "start w3", "wait w2", "start w0"], "when the last block begins again"
    assert happened.index("start w1") < happened.index("start dw3") < happened.index("wait w0")
    sums = [event for event in happened if " d" in event]
    first = ["start dw3", "start dw2", "start dw1", "start dw0"]
    assert sums[:4] == first, "those of a block are waited for behind the block before it"
    assert sorted(sums[4:]) == ["wait dw0", "wait dw1", "wait dw2", "wait dw3"]
    for i, part in enumerate(w):
        assert part.grad is not None
        torch.testing.assert_close(part.grad, torch.full((2,), 2 * 2 * 120.0 / 2 / (i + 2)))


@pytest.mark.parametrize("frozen", [None, 1])
def test_backward_starts_a_step_again_when_it_has_the_one_behind(frozen: int | None) -> None:
    """Each block is a gather and the op that reads it: forward starts the gathers outside, backward in reverse."""
    graph = graph_of((1, 1, 1))
    blocks = [(node.name, next(iter(node.users)).name) for node in gathers_of(graph)]
    happened: list[str] = []
    steps = gather_steps(gathers_of(graph), blocks)
    assert [len(step.gathers) for step in steps] == [1, 1, 1]
    start_ahead(graph, steps, doubled(happened))
    again = checkpointed(marked(fx.GraphModule(torch.nn.Module(), graph), blocks), random=False)
    x, *w = (
        torch.full((size,), float(i + 1), requires_grad=i != frozen) for i, size in enumerate((4, 2, 2, 2))
    )
    (y,) = again(x, *w)
    torch.testing.assert_close(y, torch.full((4,), 24.0))
    assert happened == ["start w0", "start w1", "wait w0", "start w2", "wait w1", "wait w2"]
    happened.clear()
    y.sum().backward()
    last = ["start w2", "wait w2", "start w1", "start dw2", "wait w1"]
    if frozen is None:
        others = ["start w0", "start dw1", "wait dw2", "wait w0", "start dw0", "wait dw1", "wait dw0"]
    else:
        others = ["start dw1", "wait dw2", "start w0", "wait w0", "wait dw1"]
    assert happened == [*last, *others]
    assert w[2].grad is not None
    torch.testing.assert_close(w[2].grad, torch.full((2,), 12.0))


@pytest.mark.parametrize("repeated", [False, True], ids=["kept", "repeated"])
def test_what_is_repeated_is_not_kept(repeated: bool) -> None:
    """Four layers of weights of n x n, gathered from halves, with a batch of one sample."""
    n, layers = 64, 4
    graph = fx.Graph()
    x = graph.placeholder("x")
    parts = [graph.placeholder(f"w{i}") for i in range(layers)]
    blocks, y = [], x
    for part in parts:
        weight = graph.call_function(bridges.all_gather, (part, 0), {"axis": "data", "parts": 2})
        y = graph.call_function(aten.linear.default, (y, weight))
        blocks.append((weight.name, y.name))
    graph.output((y,))
    regions = blocks if repeated else []
    start_ahead(graph, gather_steps(gathers_of(graph), regions), doubled([]))
    module = checkpointed(marked(fx.GraphModule(torch.nn.Module(), graph), regions), random=False)
    given = [
        torch.randn(1, n, requires_grad=True),
        *(torch.randn(n // 2, n, requires_grad=True) for _ in range(layers)),
    ]
    size = n * n * given[0].itemsize
    with AliveBytes(given) as alive:
        before = alive.current_bytes
        (result,) = module(*given)
        kept = alive.current_bytes - before
        result.sum().backward()
    assert kept // size == (0 if repeated else layers)
    assert (alive.peak_bytes - before) // size <= (layers if repeated else 2 * layers)


def test_a_gather_that_follows_those_of_a_block_is_none_of_them() -> None:
    graph = graph_of((2, 1, 1))
    gathers = gathers_of(graph)
    block = (gathers[0].name, next(iter(gathers[0].users)).name)
    steps = gather_steps(gathers, [block, (gathers[3].name,)])
    assert [[str(gather.args[0]) for gather in step.gathers] for step in steps] == [
        ["w0"],
        ["w1"],
        ["w2"],
        ["w3"],
    ]
    assert [bool(step.block) for step in steps] == [True, False, False, True]
