"""Input gradients first, weight gradients later: equal to a plain backward, whatever is covered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from runtime.segment.code import SegmentCode, SegmentInput, SegmentOutput
from runtime.segment.runner import SegmentRunner, as_leaf

aten = torch.ops.aten
Call = Callable[..., Any]


def linear(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.linear.default(x, w, b),)


def linear_no_bias(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.mul.Tensor(aten.linear.default(x, w), b),)  # b: an ordinary use of a parameter


def used_twice(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.linear.default(aten.tanh.default(aten.linear.default(x, w, b)), w, b),)


def tied_through_a_view(w: Tensor, b: Tensor, x: Tensor) -> Any:
    h = aten.matmul.default(aten.linear.default(x, w, b), aten.t.default(w))
    return (aten.add.Tensor(h, aten.sum.default(aten.view.default(w, [-1]))),)


def matmul_plain(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.add.Tensor(aten.matmul.default(x, w), b),)


def addmm(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.addmm.default(b, aten.view.default(x, [-1, 4]), w),)


def addmm_transposed(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.addmm.default(b, aten.view.default(x, [-1, 4]), aten.permute.default(w, [1, 0])),)


def bias_made_of_a_parameter(w: Tensor, b: Tensor, x: Tensor) -> Any:
    h = aten.linear.default(x, w, aten.mul.Tensor(b, 0.5))
    return (aten.add.Tensor(h, aten.linear.default(x, w, aten.unsqueeze.default(aten.exp.default(b), 0))),)


def addmm_of_a_made_bias(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.addmm.default(aten.mul.Tensor(b, 0.5), aten.view.default(x, [-1, 4]), w),)


def conv(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.conv2d.default(x, w, b, [2, 1], [1, 0]),)


def conv_default_arguments(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.conv2d.default(x, w),)


def conv_unbatched(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.conv2d.default(aten.select.int(x, 0, 0), w, b),)


def conv_transposed(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.convolution.default(x, w, b, [2, 2], [0, 0], [1, 1], True, [1, 1], 1),)


def bmm(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.bmm.default(x, w),)


def parameter_first(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.mm.default(w, aten.view.default(x, [4, -1])),)


def vector_weight(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.matmul.default(x, b),)


def vector_input(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.matmul.default(aten.select.int(aten.select.int(x, 0, 0), 0, 0), w),)


def embedding(w: Tensor, b: Tensor, x: Tensor) -> Any:
    ids = aten.to.dtype(aten.abs.default(aten.view.default(x, [-1])), torch.int64)
    return (aten.mul.Tensor(aten.embedding.default(w, ids, 2), aten.view.default(x, [-1, 1])),)


def layer_norm(w: Tensor, b: Tensor, x: Tensor) -> Any:
    row = aten.select.int(w, 0, 0)
    return (aten.linear.default(aten.layer_norm.default(x, [4], row, b), w, b),)


SQUARE = ((4, 4), (4,), (2, 3, 4))
CASES: list[tuple[Call, tuple[tuple[int, ...], ...], bool]] = [
    (linear, ((5, 4), (5,), (2, 3, 4)), True),
    (linear_no_bias, SQUARE, True),
    (used_twice, SQUARE, True),
    (tied_through_a_view, SQUARE, True),
    (matmul_plain, SQUARE, True),
    (addmm, SQUARE, True),
    (addmm_transposed, ((5, 4), (5,), (2, 3, 4)), True),
    (bias_made_of_a_parameter, SQUARE, True),
    (addmm_of_a_made_bias, SQUARE, True),
    (conv, ((6, 3, 3, 2), (6,), (2, 3, 5, 4)), True),
    (conv_default_arguments, ((6, 3, 3, 2), (6,), (2, 3, 5, 4)), True),
    (conv_unbatched, ((6, 3, 3, 2), (6,), (2, 3, 5, 4)), False),
    (conv_transposed, ((3, 6, 2, 2), (6,), (2, 3, 5, 4)), True),
    (bmm, ((2, 4, 5), (1,), (2, 3, 4)), True),
    (parameter_first, SQUARE, False),
    (vector_weight, SQUARE, False),
    (vector_input, SQUARE, True),
    (embedding, SQUARE, True),
    (layer_norm, SQUARE, True),
]


def make(
    function: Call, shapes: tuple[tuple[int, ...], ...], split: bool
) -> tuple[SegmentRunner, list[Tensor]]:
    g = torch.Generator().manual_seed(0)
    w, b, x = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    state = {"w": torch.nn.Parameter(w), "b": torch.nn.Parameter(b)}
    code = SegmentCode(
        0,
        fx.symbolic_trace(function),
        (SegmentInput("parameter", "w"), SegmentInput("parameter", "b"), SegmentInput("value", "x", True)),
        (SegmentOutput("value", "y", True),),
    )
    return SegmentRunner(code, state, split_backward=split), [state["w"], state["b"], x]


@pytest.mark.parametrize(("function", "shapes", "covered"), CASES, ids=[c[0].__name__ for c in CASES])
def test_equals_a_plain_backward(function: Call, shapes: tuple[tuple[int, ...], ...], covered: bool) -> None:
    plain, (w, b, x) = make(function, shapes, split=False)
    halves, (w2, b2, _) = make(function, shapes, split=True)
    inputs = {}
    for runner, kind in ((plain, "whole"), (halves, "halves")):
        leaves = [as_leaf(x + m, True) for m in range(2)]
        # Two micro-batches in flight; of the split ones, the second goes back first and whole.
        outputs = [runner.forward(m, [leaf], [])[0] for m, leaf in enumerate(leaves)]
        gradients = [torch.cos(o.detach()) for o in outputs]
        runner.backward(1, [gradients[1]])
        if kind == "whole":
            runner.backward(0, [gradients[0]])
        else:
            before = None if w2.grad is None else w2.grad.clone()
            runner.backward_input(0, [gradients[0]])
            if covered and function not in (tied_through_a_view, layer_norm):
                assert before is not None or w2.grad is None
                if before is not None:
                    torch.testing.assert_close(w2.grad, before, rtol=0, atol=0)  # left for the other half
            runner.backward_weight(0)
        inputs[kind] = [leaf.grad for leaf in leaves]
    torch.testing.assert_close(inputs["halves"], inputs["whole"], rtol=1e-13, atol=1e-13)
    for mine, theirs in ((w2.grad, w.grad), (b2.grad, b.grad)):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_frozen_weights_get_no_gradient() -> None:
    runner, (w, b, x) = make(linear, ((5, 4), (5,), (2, 3, 4)), split=True)
    w.requires_grad_(False)
    leaf = as_leaf(x, True)
    out = runner.forward(0, [leaf], [])[0]
    runner.backward_input(0, [torch.ones_like(out)])
    assert leaf.grad is not None
    runner.backward_weight(0)
    assert w.grad is None
    torch.testing.assert_close(b.grad, torch.full((5,), 6.0, dtype=torch.float64))


def test_the_weight_half_keeps_only_what_it_needs() -> None:
    """Between the halves: the inputs and output gradients of the split ops, and nothing of the rest."""
    import gc
    import weakref

    runner, (_, _, x) = make(used_twice, SQUARE, split=True)
    leaf = as_leaf(x, True)
    out = runner.forward(0, [leaf], [])[0]
    grad = torch.ones_like(out)
    runner.backward_input(0, [grad])
    output = weakref.ref(out)
    del out
    gc.collect()
    assert output() is None
    assert len(runner._weight_work[0]) == 2
    runner.backward_weight(0)
    assert not runner._weight_work
