"""The ops that a calibration measures: common kinds, at sizes from overhead-bound to memory-bound.

A case is one call of one ATen op. Shapes are those of small transformers and convolutional networks; which sizes a model
really has lies in between, and is interpolated (``cost_models.op_profile``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

ALIASES = {
    "clone": "contiguous",
    "reshape": "contiguous",
    "flatten": "contiguous",
    "_to_copy": "contiguous",
    "to": "contiguous",
    "sub": "add",
    "rsub": "add",
    "div": "mul",
    "neg": "mul",
    "relu_": "relu",
    "add_": "add",
    "bmm": "matmul",
    "mm": "matmul",
    "addmm": "linear",
    "conv1d": "conv2d",
    "convolution": "conv2d",
    "log_softmax": "softmax",
    "sum": "mean",
    "rms_norm": "layer_norm",
    "sigmoid": "tanh",
    "exp": "tanh",
    "cos": "tanh",
    "sin": "tanh",
    "masked_fill": "where",
    "stack": "cat",
}
"""Kinds that are charged as another one that does the same work."""

MATH_ATTENTION = "math_attention"
"""The kind of attention that is not one kernel, but products and a softmax (the backend "math")."""

ARITHMETIC = frozenset(
    {"linear", "matmul", "conv2d", "conv_transpose2d", "scaled_dot_product_attention", MATH_ATTENTION}
)
"""Kinds with a ``CostLine``; the others have a ``CostCurve``."""


def kind_of(target: Any) -> str:
    """Name the kind that an op is charged as: ``aten.gelu.default`` → ``gelu``."""
    name = target._schema.name.rpartition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""
    return ALIASES.get(name, name)


@dataclass(frozen=True)
class OpCase:
    """One call to measure, ``call(*inputs, *weights)``; functions make both, so that a counter can make them fake."""

    kind: str
    call: Callable[..., Tensor]
    inputs: Callable[[], Sequence[Tensor]]
    weights: Callable[[], Sequence[Tensor]] = tuple


def op_cases() -> tuple[OpCase, ...]:
    """List all cases, in a fixed order: every process that measures lists the same ones."""
    return (*_elementwise(), *_rowwise(), *_lookups(), *_products(), *_attention(), *_images())


def _normal(*shapes: tuple[int, ...]) -> Callable[[], Sequence[Tensor]]:
    """Return a function that makes random tensors of these shapes."""
    return lambda: [torch.randn(shape) for shape in shapes]


def _scale(width: int) -> Callable[[], Sequence[Tensor]]:
    """Return a function that makes the weights of a normalization."""
    return lambda: (torch.ones(width), torch.zeros(width))


_ELEMENTS = (256, 2**14, 2**17, 2**20, 3 * 2**20)


def _elementwise() -> Iterator[OpCase]:
    for count in _ELEMENTS:
        rows, width = count // 64, 64

        def heads(rows: int = rows) -> Sequence[Tensor]:
            return (torch.randn(4, rows // 4, 64).transpose(0, 1),)

        one, two = _normal((rows, width)), _normal((rows, width), (rows, width))
        yield OpCase("add", aten.add.Tensor, two)
        yield OpCase("mul", aten.mul.Tensor, two)
        yield OpCase("relu", aten.relu.default, one)
        yield OpCase("gelu", aten.gelu.default, one)
        yield OpCase("silu", aten.silu.default, one)
        yield OpCase("tanh", aten.tanh.default, one)
        yield OpCase("pow", lambda x: aten.pow.Tensor_Scalar(x, 2), one)
        yield OpCase("dropout", lambda x: aten.dropout.default(x, 0.1, True), one)
        yield OpCase("cat", lambda a, b: aten.cat.default([a, b], -1), two)
        yield OpCase(
            "contiguous", lambda x: aten.clone.default(x, memory_format=torch.contiguous_format), heads
        )
    yield OpCase("view", lambda x: aten.view.default(x, [64, 4]), _normal((4, 64)))


def _rowwise() -> Iterator[OpCase]:
    for count in _ELEMENTS:
        rows, width = max(1, count // 256), 256

        def logits(rows: int = rows, width: int = width) -> Sequence[Tensor]:
            return torch.randn(rows, width), torch.zeros(rows, dtype=torch.long)

        one = _normal((rows, width))
        yield OpCase("softmax", lambda x: aten.softmax.int(x, -1), one)
        yield OpCase("mean", lambda x: aten.mean.dim(x, [-1], True), one)
        yield OpCase(
            "layer_norm",
            lambda x, w, b, width=width: aten.layer_norm.default(x, [width], w, b, 1e-5),
            one,
            _scale(width),
        )
        yield OpCase("cross_entropy_loss", aten.cross_entropy_loss.default, logits)


def _lookups() -> Iterator[OpCase]:
    for rows, vocabulary, width in ((32, 64, 32), (256, 256, 64), (512, 2048, 128), (1024, 8192, 256)):

        def ids(rows: int = rows, vocabulary: int = vocabulary) -> Sequence[Tensor]:
            return (torch.arange(rows) * 7 % vocabulary,)

        table = _normal((vocabulary, width))
        yield OpCase("embedding", lambda ids, table: aten.embedding.default(table, ids), ids, table)


def _products() -> Iterator[OpCase]:
    shapes = (
        (8, 32, 32),
        (64, 64, 64),
        (64, 128, 512),
        (256, 64, 256),
        (256, 256, 256),
        (128, 512, 2048),
        (512, 256, 1024),
        (512, 768, 768),
        (1024, 1024, 256),
    )
    for tokens, inner, outer in shapes:
        affine = _normal((outer, inner), (outer,))
        yield OpCase("linear", aten.linear.default, _normal((tokens, inner)), affine)
    for batch, rows, inner in ((4, 8, 8), (8, 64, 32), (16, 128, 64), (8, 256, 128)):
        yield OpCase("matmul", aten.matmul.default, _normal((batch, rows, inner), (batch, inner, rows)))


_attend = aten.scaled_dot_product_attention.default


def _attention() -> Iterator[OpCase]:
    for batch, heads, tokens, width in ((1, 2, 16, 16), (2, 4, 64, 32), (4, 4, 128, 64), (2, 8, 256, 64)):

        def qkv(
            batch: int = batch, heads: int = heads, tokens: int = tokens, width: int = width
        ) -> Sequence[Tensor]:
            one = torch.randn(3, batch, tokens, heads, width)
            return [part.transpose(1, 2) for part in one.unbind()]

        yield OpCase("scaled_dot_product_attention", lambda q, k, v: _attend(q, k, v, None, 0.0, True), qkv)
        # With dropout, processors have no kernel of one piece: scores are written, and read again.
        yield OpCase(MATH_ATTENTION, lambda q, k, v: _attend(q, k, v, None, 0.1, True), qkv)


def _images() -> Iterator[OpCase]:
    shapes = (
        (1, 4, 4, 8),
        (2, 8, 16, 64),
        (2, 16, 16, 64),
        (2, 32, 64, 32),
        (4, 64, 64, 32),
        (4, 128, 128, 16),
    )
    for batch, channels, wider, side in shapes:
        images = _normal((batch, channels, side, side))
        window = _normal((wider, channels, 3, 3), (wider,))
        yield OpCase("conv2d", lambda x, w, b: aten.conv2d.default(x, w, b, [1, 1], [1, 1]), images, window)
        yield OpCase(
            "conv_transpose2d",
            lambda x, w, b: aten.conv_transpose2d.input(x, w, b, [2, 2]),
            images,
            _normal((channels, wider, 2, 2), (wider,)),
        )
    for batch, channels, side in ((1, 4, 8), (2, 16, 32), (4, 32, 64), (8, 32, 128)):
        maps, scale = _normal((batch, channels, side, side)), _scale(channels)
        yield OpCase("group_norm", lambda x, w, b: aten.group_norm.default(x, 4, w, b), maps, scale)
        yield OpCase(
            "batch_norm",
            lambda x, w, b: aten.batch_norm.default(x, w, b, None, None, True, 0.1, 1e-5, False),
            maps,
            scale,
        )
        yield OpCase("max_pool2d", lambda x: aten.max_pool2d.default(x, [2, 2], [2, 2]), maps)
