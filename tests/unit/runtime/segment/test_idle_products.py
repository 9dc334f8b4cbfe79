"""Products whose results lead out of a region: the second forward keeps their operands and multiplies nothing."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.ops.fused_linear import linears_behind
from runtime.ops.idle_products import KERNELS
from runtime.segment.recompute import checkpointed, marked

aten = torch.ops.aten


class Counting(TorchDispatchMode):
    """Counts kernels that multiply, and those that take a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.found["products"] += func in KERNELS and not args[0].is_meta  # shapes alone cost nothing
        self.found["sines"] += func is aten.sin.default
        return func(*args, **(kwargs or {}))


def products(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """Three products of one value that the region makes; the first is read before the last is there."""
    y = aten.sin.default(x)
    q = aten.linear.default(y, w, b)
    q = aten.sigmoid.default(q)
    k = aten.matmul.default(y, v)
    k = aten.mul.Tensor(k, q)
    u = aten.linear.default(y, v)
    return aten.add.Tensor(aten.mul.Tensor(u, k), q)


def images(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    y = aten.sin.default(x)
    return aten.mul.Tensor(aten.conv2d.default(y, w, b), aten.conv2d.default(y, v, None))


def normalized(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """Two products of a value whose making writes statistics."""
    mean, variance = aten.zeros_like.default(b), aten.ones_like.default(b)
    y = aten.batch_norm.default(aten.sin.default(x), None, None, mean, variance, True, 0.1, 1e-5, False)
    return aten.mul.Tensor(aten.linear.default(y, w, b), aten.linear.default(y, v))


def behind_a_bridge() -> fx.GraphModule:
    """Two layers in one call with the bridge before them, which takes a sine."""
    graph = fx.Graph()
    x, w, b, v = (graph.placeholder(name) for name in "xwbv")
    run = linears_behind("all_gather", torch.sin, lambda gradient: lambda: gradient)
    call = graph.call_function(run, (x, w, b, v, None))
    q, k = (graph.call_function(operator.getitem, (call, number)) for number in range(2))
    graph.output(graph.call_function(aten.mul.Tensor, (q, k)))
    return fx.GraphModule(torch.nn.Module(), graph)


def region(module: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    inside = [node.name for node in module.graph.nodes if node.name.startswith(tuple(names))]
    return checkpointed(marked(module, [inside]), random=False)


def run(module: fx.GraphModule, shapes: Sequence[tuple[int, ...]]) -> tuple[list[Tensor], Counter[str]]:
    """Return the gradients, and what backward counted."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(*s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    result = module(*values).sum()
    with Counting() as counted:
        result.backward()
    return [value.grad for value in values if value.grad is not None], counted.found


@pytest.mark.parametrize(
    ("module", "shapes", "names"),
    [
        (fx.symbolic_trace(products), [(2, 3, 4), (4, 4), (4,), (4, 4)], ["sin", "linear", "matmul"]),
        (fx.symbolic_trace(images), [(2, 3, 5, 5), (3, 3, 2, 2), (3,), (3, 3, 2, 2)], ["sin", "conv2d"]),
        (fx.symbolic_trace(normalized), [(3, 4), (4, 4), (4,), (4, 4)], ["sin", "batch", "linear"]),
        (behind_a_bridge(), [(2, 3, 4), (4, 4), (4,), (4, 4)], ["linears", "getitem"]),
    ],
    ids=["products", "images", "beside statistics", "behind a bridge"],
)
def test_a_second_forward_does_not_multiply_for_nobody(
    module: fx.GraphModule, shapes: Sequence[tuple[int, ...]], names: Sequence[str]
) -> None:
    (kept, plain), (again, found) = (run(f, shapes) for f in (module, region(module, names)))
    assert len(kept) == 4
    torch.testing.assert_close(again, kept, rtol=0, atol=0)
    assert found == {"products": plain["products"], "sines": 1}


def test_a_product_that_its_region_reads_runs_again() -> None:
    module = fx.symbolic_trace(products)
    shapes = [(2, 3, 4), (4, 4), (4,), (4, 4)]
    (kept, plain), (again, found) = (
        run(f, shapes) for f in (module, region(module, ["sin", "linear", "sigmoid"]))
    )
    torch.testing.assert_close(again, kept, rtol=0, atol=0)
    assert found["products"] == plain["products"] + 1
