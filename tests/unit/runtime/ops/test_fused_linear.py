"""Linear layers behind a bridge: which are put together, that gradients stay, and that the sum starts first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.ops import bridges
from runtime.ops.fused_linear import fuse, linears_behind

aten = torch.ops.aten
happened: list[str] = []


def tripled(gradient: Tensor) -> Callable[[], Tensor]:
    """As a sum over three ranks with equal gradients."""
    happened.append("start")

    def wait() -> Tensor:
        happened.append("wait")
        return gradient * 3

    return wait


class Noting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        happened.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def graph_of(kind: str) -> fx.Graph:
    """x -> bridge -> two linear layers on inputs w, b, v; what else reads what depends on ``kind``."""
    graph = fx.Graph()
    x, w, b, v = (graph.placeholder(name) for name in "xwbv")
    bridge = graph.call_function(bridges.sum_gradient, (x,), {"axis": "tensor"})
    first = graph.call_function(aten.linear.default, (bridge, w, b))
    if kind == "a weight made between":
        v = graph.call_function(aten.mul.Tensor, (v, 2.0))
    if kind == "a weight made of the first":
        v = graph.call_function(aten.mul.Tensor, (v, graph.call_function(aten.mean.default, (first,))))
    second = graph.call_function(aten.linear.default, (bridge, v))
    total = graph.call_function(aten.add.Tensor, (first, second))
    if kind == "another reader":
        total = graph.call_function(aten.add.Tensor, (total, bridge))
    graph.output((total,))
    return graph


def bridge_of(graph: fx.Graph) -> fx.Node:
    return graph.find_nodes(op="call_function", target=bridges.sum_gradient)[0]


def fused(graph: fx.Graph) -> fx.GraphModule:
    fuse(graph, {bridge_of(graph): linears_behind("sum_gradient", None, tripled)})
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("kind", ["two layers", "a weight made between"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_stay(kind: str, dtype: torch.dtype) -> None:
    def tensors() -> list[Tensor]:
        g = torch.Generator().manual_seed(0)
        shapes = [(2, 3, 4), (4, 4), (4,), (4, 4)]
        return [torch.randn(shape, generator=g, dtype=dtype, requires_grad=True) for shape in shapes]

    graph = graph_of(kind)
    module = fused(graph)
    assert not module.graph.find_nodes(op="call_function", target=aten.linear.default)
    given = tensors()
    (y,) = module(*given)
    x, w, b, v = expected = tensors()
    wanted = torch.nn.functional.linear(x, w, b) + torch.nn.functional.linear(
        x, v * 2.0 if kind == "a weight made between" else v
    )
    torch.testing.assert_close(y, wanted)
    y.abs().pow(2).sum().backward()
    wanted.abs().pow(2).sum().backward()
    assert x.grad is not None
    x.grad *= 3
    for found, right in zip(given, expected, strict=True):
        torch.testing.assert_close(found.grad, right.grad)


@pytest.mark.parametrize("kind", ["another reader", "a weight made of the first"])
def test_what_cannot_be_put_together_stays(kind: str) -> None:
    graph = fused(graph_of(kind)).graph
    assert bridge_of(graph) is not None
    assert len(graph.find_nodes(op="call_function", target=aten.linear.default)) == 2


REGION = ("sum_gradient", "linear_default", "mul_tensor", "linear_default_1")


@pytest.mark.parametrize(
    ("regions", "together"), [((), True), ((REGION,), True), ((("linear_default",),), False)]
)
def test_all_of_a_call_is_computed_again_or_nothing(
    regions: tuple[tuple[str, ...], ...], together: bool
) -> None:
    graph = graph_of("a weight made between")
    names = {node.name for node in graph.nodes}
    fuse(graph, {bridge_of(graph): linears_behind("sum_gradient", None, tripled)}, regions)
    graph.lint()
    assert bool(graph.find_nodes(op="call_function", target=aten.linear.default)) is not together
    assert {node.name for node in graph.nodes} == names


def test_what_makes_a_later_weight_comes_first() -> None:
    graph = fused(graph_of("a weight made between")).graph
    order = [node.name for node in graph.nodes]
    assert order.index("mul_tensor") < order.index("sum_gradient")


def test_the_sum_travels_while_weights_gradients_are_computed() -> None:
    x, w, b, v = (torch.randn(shape, requires_grad=True) for shape in [(2, 4), (4, 4), (4,), (4, 4)])
    (y,) = fused(graph_of("two layers"))(x, w, b, v)
    happened.clear()
    with Noting():
        y.backward(torch.ones_like(y))
    start, wait = happened.index("start"), happened.index("wait")
    assert happened[:start].count("mm") == 1  # the second layer's is added in place
    assert happened[start:wait].count("mm") == 2


def test_layers_without_gradients_need_no_sum() -> None:
    x, w, b, v = (torch.randn(shape) for shape in [(2, 4), (4, 4), (4,), (4, 4)])
    (y,) = fused(graph_of("two layers"))(x, w.requires_grad_(), b, v)
    happened.clear()
    y.sum().backward()
    assert happened == []
    assert w.grad is not None
    assert v.grad is None
