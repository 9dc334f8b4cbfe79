"""A small model cut by hand into four segments, with everything that makes cutting hard.

    segment 0   h = embed(ids) + linear(x);  mask = ids > 3;  twice = ids · 2;  d = linear(h)
    segment 1   h1 = where(mask, tanh(linear(h)), h)
    segment 2   running' = 0.9 running + 0.1 mean(h1);  h2 = relu(h1 @ w2 + running) + h + twice
    segment 3   loss = mean((h2 @ embedᵀ − target)² + d without gradient) , scaled by `scale`, handed whole

``h`` is read on several ranks, ``mask`` is boolean, ``twice`` integer, ``embed`` is tied between segments 0
and 3, ``d`` is owed a gradient and gets none, ``running`` is a buffer, ``scale`` has no batch dimension.
Shapes: ids [batch], x [batch, 5], target [batch, 7], h [batch, 6].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from runtime.program.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    ComputeOrder,
    Forward,
    Program,
    Segment,
    SegmentCost,
    SegmentGraph,
    TiedGroup,
    Value,
)
from runtime.schedules import SCHEDULES
from runtime.segment.code import BatchSpec, SegmentCode, SegmentInput, SegmentOutput, TensorSpec
from tests.support.rank_programs import build_programs

aten = torch.ops.aten
B = sympy.Symbol("b", positive=True, integer=True)

SPECS = {
    "h": TensorSpec((B, 6), torch.float64),
    "mask": TensorSpec((B,), torch.bool),
    "twice": TensorSpec((B,), torch.int64),
    "d": TensorSpec((B, 6), torch.float64),
    "h1": TensorSpec((B, 6), torch.float64),
    "h2": TensorSpec((B, 6), torch.float64),
}
NEEDS_GRAD = {"h": True, "mask": False, "twice": False, "d": True, "h1": True, "h2": True}
CONSUMERS = {"h": (1, 2), "mask": (1,), "twice": (2,), "d": (3,), "h1": (2,), "h2": (3,)}
PRODUCERS = {"h": 0, "mask": 0, "twice": 0, "d": 0, "h1": 1, "h2": 2}
BATCH = BatchSpec({"ids": 0, "x": 0, "target": 0, "scale": None}, B, {B: ("x", 0)})
TIED = "embed"


def segment0(embed: Tensor, w0: Tensor, b0: Tensor, wd: Tensor, ids: Tensor, x: Tensor) -> Any:
    mask = aten.gt.Scalar(ids, 3)
    twice = aten.mul.Scalar(ids, 2)
    h = aten.add.Tensor(aten.embedding.default(embed, ids), aten.linear.default(x, w0, b0))
    d = aten.linear.default(h, wd)
    return h, mask, twice, d


def segment1(w1: Tensor, b1: Tensor, h: Tensor, mask: Tensor) -> Any:
    inner = aten.tanh.default(aten.linear.default(h, w1, b1))
    return (aten.where.self(aten.unsqueeze.default(mask, 1), inner, h),)


def segment2(w2: Tensor, running: Tensor, h: Tensor, h1: Tensor, twice: Tensor) -> Any:
    mean = aten.mean.dim(aten.detach.default(h1), [0])
    updated = aten.add.Tensor(aten.mul.Scalar(running, 0.9), aten.mul.Scalar(mean, 0.1))
    inner = aten.mul.Tensor(aten.matmul.default(h1, w2), running)
    h2 = aten.add.Tensor(aten.add.Tensor(aten.relu.default(inner), h), aten.unsqueeze.default(twice, 1))
    return h2, updated


def segment3(embed: Tensor, h2: Tensor, d: Tensor, target: Tensor, scale: Tensor) -> Any:
    logits = aten.matmul.default(h2, aten.t.default(embed))
    difference = aten.sub.Tensor(aten.matmul.default(logits, scale), target)
    square = aten.mean.default(aten.mul.Tensor(difference, difference))
    return (aten.add.Tensor(square, aten.mean.default(aten.detach.default(d))),)


FUNCTIONS: tuple[Callable[..., Any], ...] = (segment0, segment1, segment2, segment3)
INPUTS: tuple[tuple[tuple[str, str], ...], ...] = (
    (
        ("parameter", "embed"),
        ("parameter", "w0"),
        ("parameter", "b0"),
        ("parameter", "wd"),
        ("batch", "ids"),
        ("batch", "x"),
    ),
    (("parameter", "w1"), ("parameter", "b1"), ("value", "h"), ("value", "mask")),
    (("parameter", "w2"), ("buffer", "running"), ("value", "h"), ("value", "h1"), ("value", "twice")),
    (("parameter", "embed"), ("value", "h2"), ("value", "d"), ("batch", "target"), ("batch", "scale")),
)
OUTPUTS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("value", "h"), ("value", "mask"), ("value", "twice"), ("value", "d")),
    (("value", "h1"),),
    (("value", "h2"), ("buffer", "running")),
    (("loss", "loss"),),
)


def state(seed: int = 0) -> dict[str, Tensor]:
    """Parameters and buffers, float64."""
    g = torch.Generator().manual_seed(seed)

    def parameter(*shape: int) -> Tensor:
        return torch.nn.Parameter(torch.randn(*shape, generator=g, dtype=torch.float64) / 2)

    return {
        "embed": parameter(9, 6),
        "w0": parameter(6, 5),
        "b0": parameter(6),
        "wd": parameter(6, 6),
        "w1": parameter(6, 6),
        "b1": parameter(6),
        "w2": parameter(6, 6),
        "running": torch.ones(6, dtype=torch.float64),
    }


def batch(size: int, seed: int = 1) -> dict[str, Tensor]:
    """A batch of ``size`` samples."""
    g = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 9, (size,), generator=g),
        "x": torch.randn(size, 5, generator=g, dtype=torch.float64),
        "target": torch.randn(size, 7, generator=g, dtype=torch.float64),
        "scale": torch.randn(9, 7, generator=g, dtype=torch.float64),
    }


def codes() -> dict[int, SegmentCode]:
    """The four segments, traced."""
    return {index: _code(index) for index in range(len(FUNCTIONS))}


def _code(index: int) -> SegmentCode:
    inputs = tuple(
        SegmentInput(kind, name, kind == "value" and NEEDS_GRAD[name])  # type: ignore[arg-type]
        for kind, name in INPUTS[index]
    )
    outputs = tuple(
        SegmentOutput(kind, name, kind == "value" and NEEDS_GRAD[name])  # type: ignore[arg-type]
        for kind, name in OUTPUTS[index]
    )
    return SegmentCode(index, fx.symbolic_trace(FUNCTIONS[index]), inputs, outputs, SPECS)


def graph(ranks: tuple[int, ...]) -> SegmentGraph:
    """The segments placed on ``ranks`` (one per segment)."""
    cost = SegmentCost(1.0, 1.0, 1.0)
    return SegmentGraph(
        tuple(Segment(i, (r,), cost) for i, r in enumerate(ranks)),
        tuple(Value(v, PRODUCERS[v], CONSUMERS[v], 48, NEEDS_GRAD[v]) for v in SPECS),
        max(ranks) + 1,
    )


def order(kind: str, ranks: tuple[int, ...], microbatches: int) -> ComputeOrder:
    """``forward-backward`` (GPipe, any placement), ``halves`` (the same, split), or a schedule."""
    if kind not in ("forward-backward", "halves"):
        return SCHEDULES[kind].order(graph(ranks), microbatches)
    orders = []
    for rank in range(max(ranks) + 1):
        own = [s for s, r in enumerate(ranks) if r == rank]
        forwards = [Forward(s, m) for m in range(microbatches) for s in own]
        pairs = [(s, m) for m in range(microbatches) for s in reversed(own)]
        if kind == "halves":
            backwards: list[Any] = [BackwardInput(s, m) for s, m in pairs]
            backwards += [BackwardWeight(s, m) for s, m in pairs]
        else:
            backwards = [Backward(s, m) for s, m in pairs]
        orders.append((*forwards, *backwards))
    return tuple(orders)


def programs(kind: str, ranks: tuple[int, ...], microbatches: int) -> tuple[Program, ...]:
    """One program per rank; the tied embedding is summed where two ranks hold it."""
    holders = tuple(sorted({ranks[0], ranks[3]}))
    tied = [TiedGroup((TIED,), holders)] if len(holders) > 1 else []
    return build_programs(
        graph(ranks),
        order(kind, ranks, microbatches),
        microbatches,
        transfer_seconds=lambda a, b, n: 0.01,
        tied=tied,
    )


def reference(
    tensors: Mapping[str, Tensor], whole: Mapping[str, Tensor], microbatches: int
) -> tuple[Tensor, dict[str, Tensor | None], dict[str, Tensor]]:
    """Loss, accumulated gradients and buffers of the unpartitioned model."""
    tensors = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in tensors.items()}
    size = whole["x"].shape[0]
    total = torch.zeros((), dtype=torch.float64)
    for pieces in zip(*(whole[n].tensor_split(microbatches) for n in ("ids", "x", "target")), strict=True):
        known: dict[str, Any] = dict(zip(("ids", "x", "target"), pieces, strict=True), scale=whole["scale"])
        for function, inputs, outputs in zip(FUNCTIONS, INPUTS, OUTPUTS, strict=True):
            arguments = [tensors[n] if n in tensors else known[n] for _, n in inputs]
            for (kind, name), result in zip(outputs, function(*arguments), strict=True):
                if kind == "buffer":
                    tensors[name] = result.detach()
                else:
                    known[name] = result
        weighted = known["loss"] * (pieces[1].shape[0] / size)
        weighted.backward()
        total += weighted.detach()
    gradients = {n: t.grad for n, t in tensors.items() if t.requires_grad}
    return total, gradients, {"running": tensors["running"]}
