"""A compiled segment computes what it computes uncompiled, whatever in it is a call into Python."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx, nn

from cost_models.errors import UsageError
from runtime.segment.code import BatchSpec, SegmentCode, SegmentInput, SegmentOutput, TensorSpec
from runtime.segment.compiled import compile_options
from runtime.segment.runner import SegmentRunner, as_leaf, warm_up

aten = torch.ops.aten
WIDTH = 4


def two_layers(h: Tensor, w1: Tensor, w2: Tensor, count: Tensor) -> Any:
    a = aten.linear.default(h, w1)
    skip = aten.tanh.default(a)
    b = aten.relu.default(aten.linear.default(skip, w2))
    return skip, aten.sum.default(aten.mul.Tensor(b, b)), aten.add.Scalar(count, 1)


MODULE = fx.symbolic_trace(two_layers)
BATCH = sympy.Symbol("B")
CODE = SegmentCode(
    0,
    MODULE,
    (
        SegmentInput("value", "h", True),
        SegmentInput("parameter", "w1"),
        SegmentInput("parameter", "w2"),
        SegmentInput("buffer", "count"),
    ),
    (
        SegmentOutput("value", "skip", True),
        SegmentOutput("loss", "loss"),
        SegmentOutput("buffer", "count"),
    ),
    values={
        "h": TensorSpec((BATCH, WIDTH), torch.float32),
        "skip": TensorSpec((BATCH, WIDTH), torch.float32),
    },
)
COMPUTES = tuple(node.name for node in MODULE.graph.nodes if node.op == "call_function")[:5]
"""Everything but the buffer's update."""


class Backend:
    """Runs graphs as they are and counts the operations in them."""

    def __init__(self) -> None:
        self.operations: list[int] = []

    def __call__(self, module: fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.operations.append(sum(node.op == "call_function" for node in module.graph.nodes))
        return module.forward


def run(
    code: SegmentCode, *, split: bool = False, early: bool = False, compile: dict[str, Any] | None = None
) -> list[Any]:
    """Forward and backward of micro-batches of 3, 2 and 2 samples, two in flight; everything that comes out."""
    torch.manual_seed(0)
    state: dict[str, Tensor] = {n: nn.Parameter(torch.randn(WIDTH, WIDTH)) for n in ("w1", "w2")}
    state["count"] = torch.zeros(())
    emitted: list[Tensor] = []
    runner = SegmentRunner(
        code,
        state,
        split_backward=split,
        early=(0,) if early else (),
        emit=(lambda _, tensor: emitted.append(tensor.detach().clone())) if early else None,
        compile=compile,
    )
    inputs = [as_leaf(torch.randn(size, WIDTH), True) for size in (3, 2, 2)]
    results: list[Any] = []

    def backward(m: int) -> None:
        seeds = [torch.ones_like(results[m][0]), torch.ones(())]
        if split:
            runner.backward_input(m, seeds)
            assert state["w2"].grad is None or m > 0, "weight gradients are computed later"
            runner.backward_weight(m)
        else:
            runner.backward(m, seeds)

    for m in range(3):
        results.append(runner.forward(m, [inputs[m]], []))
        if m > 0:
            backward(m - 1)
    backward(2)
    runner.write_buffers()
    gradients = [leaf.grad for leaf in inputs] + [state["w1"].grad, state["w2"].grad]
    with torch.no_grad():
        evaluated = runner.forward(3, [inputs[0]], [], keep=False)
    return [*(t.detach() for out in results for t in out), *gradients, state["count"], *evaluated, *emitted]


@pytest.mark.parametrize(
    ("split", "early", "recompute"),
    [(False, False, False), (True, False, False), (False, True, True), (True, True, True)],
)
def test_it_computes_the_same_and_compiles_what_is_between_calls(
    split: bool, early: bool, recompute: bool
) -> None:
    torch.compiler.reset()
    code = replace(CODE, recomputed=(COMPUTES,)) if recompute else CODE
    expected = run(code, split=split, early=early)
    found = run(code, split=split, early=early, compile={"backend": "aot_eager"})
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("options", "largest"),
    [({}, 7), ({"early": True}, 5), ({"recompute": True}, 5), ({"split": True}, 4)],
)
def test_what_is_between_calls_into_python_is_compiled(options: dict[str, bool], largest: int) -> None:
    torch.compiler.reset()
    code = replace(CODE, recomputed=(COMPUTES[:5],)) if options.pop("recompute", False) else CODE
    backend = Backend()
    run(code, **options, compile={"backend": backend})
    assert max(backend.operations) == largest


def test_a_warm_up_compiles_and_leaves_no_trace() -> None:
    torch.compiler.reset()
    state: dict[str, Tensor] = {n: nn.Parameter(torch.randn(WIDTH, WIDTH)) for n in ("w1", "w2")}
    state["count"] = torch.full((), 5.0)
    backend = Backend()
    runner = SegmentRunner(CODE, state, compile={"backend": backend})
    generator = torch.get_rng_state()
    warm_up([runner], state, BatchSpec({}, BATCH, {}), {}, (3, 2, 2), torch.device("cpu"))
    graphs = len(backend.operations)
    assert graphs >= 1
    assert torch.equal(torch.get_rng_state(), generator)
    assert state["count"].item() == 5.0
    assert all(tensor.grad is None for tensor in state.values())
    for size in (3, 2, 7):
        runner.forward(0, [as_leaf(torch.ones(size, WIDTH), True)], [])
    assert len(backend.operations) == graphs, "nothing is left to compile, for any size"


def normed(h: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> Any:
    return (
        aten.sum.default(aten.batch_norm.default(h * w, None, None, mean, var, True, 0.1, 1e-5, False) ** 3),
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_batch_norms_write_their_statistics_once_a_micro_batch(recompute: bool) -> None:
    torch.compiler.reset()
    module = fx.symbolic_trace(normed)
    names = tuple(node.name for node in module.graph.nodes if node.op == "call_function")
    kinds: list[tuple[Any, str]] = [("value", "h"), ("parameter", "w"), ("buffer", "mean"), ("buffer", "var")]
    code = SegmentCode(
        0,
        module,
        tuple(SegmentInput(kind, name, kind == "value") for kind, name in kinds),
        (SegmentOutput("loss", "loss"),),
        values={"h": TensorSpec((BATCH, WIDTH), torch.float32)},
        recomputed=(names,) if recompute else (),
    )
    found = []
    for compile in (None, {"backend": "aot_eager"}):
        torch.manual_seed(0)
        state: dict[str, Tensor] = {"w": nn.Parameter(torch.randn(WIDTH))}
        state.update(mean=torch.zeros(WIDTH), var=torch.ones(WIDTH))
        runner = SegmentRunner(code, state, compile=compile)
        if compile:
            warm_up([runner], state, BatchSpec({}, BATCH, {}), {}, (3,), torch.device("cpu"))
        for m in range(2):
            runner.forward(m, [as_leaf(torch.randn(3 + m, WIDTH), True)], [])
        for m in range(2):
            runner.backward(m, [torch.ones(())])
        runner.write_buffers()
        assert state["w"].grad is not None
        found.append([state["mean"], state["var"], state["w"].grad])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-6)


def test_options_that_cannot_be_had_are_refused() -> None:
    assert compile_options(False) is None
    assert compile_options(True) == {}
    assert compile_options({"dynamic": True}) == {"dynamic": True}
    for graphs in ({"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}):
        with pytest.raises(UsageError, match="CUDA graphs"):
            compile_options(graphs)
    with pytest.raises(UsageError) as caught:
        compile_options({"fullgraph": True, "speed": 11})
    assert len(caught.value.because) == 2
