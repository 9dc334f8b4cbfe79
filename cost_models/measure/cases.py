"""The ops that calibrations measure: a CPU worker those of small models, a GPU those of large ones, which fill a card.

    linear bfloat16 4096x1024x4096          tokens x inner x outer
    attention float16 8x12x1024x64 causal flash
    gelu bfloat16 4194304

A case's name is its key in the calibration's file: what a GPU's file has is not measured again. Which sizes a model really
has lies between those of the lists, and is interpolated (``cost_models.op_profile``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cost_models.op_profile import ALIASES, MATH_ATTENTION

aten = torch.ops.aten

NumberFormat: TypeAlias = Literal["float32", "tf32", "bfloat16", "float16"]
NUMBERS: tuple[NumberFormat, ...] = ("bfloat16", "float16", "float32", "tf32")
"""The ways to multiply that are measured; ``tf32`` is float32 with torch.backends.cuda.matmul.allow_tf32."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MOST_MATH_TOKENS = 2048
"""The most tokens at which attention is measured without a fused kernel: it holds several samples x heads x tokens²."""


class PlannedOp(NamedTuple):
    """An op as a plan remembers it: ``aten.linear.default``, the shape of its result, its type, its FLOPs forward."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    forward_flops: float


@dataclass(frozen=True)
class OpCase:
    """One call to measure, ``call(*inputs, *weights)``; functions make both, so that a counter can make them fake."""

    name: str
    kind: str
    call: Callable[..., Tensor]
    inputs: Callable[[], Sequence[Tensor]]
    weights: Callable[[], Sequence[Tensor]] = tuple
    number: NumberFormat = "float32"
    share: float = 1.0
    """Arithmetic done over that which is counted: 1/2 of a GPU's attention with a causal mask."""
    backend: str | None = None

    def setting(self) -> AbstractContextManager[object]:
        """Return the context in which a GPU calls it: its attention backend, its way to multiply float32."""
        if self.backend is not None:
            return sdpa_kernel(BACKENDS[self.backend])
        return _tf32(self.number == "tf32") if self.number in ("float32", "tf32") else nullcontext()


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


# --------------------------------------------------------------------------------------------------
# Sizes


WORKER_ELEMENTS = (256, 2**14, 2**17, 2**20, 3 * 2**20)
WORKER_POINTWISE = ("add", "mul", "relu", "gelu", "silu", "tanh", "pow", "dropout", "cat")
WORKER_PRODUCTS = (
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
"""(tokens, inner, outer) of linear layers."""
WORKER_BATCHED = ((4, 8, 8), (8, 64, 32), (16, 128, 64), (8, 256, 128))
"""(matrices, rows, inner) of products of batches of matrices: rows x inner times inner x rows."""
WORKER_ATTENTION = ((1, 2, 16, 16), (2, 4, 64, 32), (4, 4, 128, 64), (2, 8, 256, 64))
"""(samples, heads, tokens, width)."""
WORKER_LOOKUPS = ((32, 64, 32), (256, 256, 64), (512, 2048, 128), (1024, 8192, 256))
"""(rows, words, width)."""
WORKER_IMAGES = (
    (1, 4, 4, 8),
    (2, 8, 16, 64),
    (2, 16, 16, 64),
    (2, 32, 64, 32),
    (4, 64, 64, 32),
    (4, 128, 128, 16),
)
"""(samples, channels, wider, side)."""
WORKER_MAPS = ((1, 4, 8), (2, 16, 32), (4, 32, 64), (8, 32, 128))
"""(samples, channels, side) of what is normalized or pooled."""

GPU_POINTWISE = ("add", "mul", "contiguous", "relu", "gelu", "silu", "dropout")
GPU_ROWWISE = ("softmax", "mean", "layer_norm")
GPU_PRODUCTS = (
    (512, 1024, 1024),
    (4096, 768, 3072),
    (4096, 1024, 1024),
    (8192, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 4096, 11008),
    (8192, 768, 50304),
    (8192, 768, 50257),  # GPT-2's vocabulary as it is: rows that are not aligned
)
"""GPT-2's, BERT's and Llama's linear layers."""
GPU_BATCHED = ((96, 512, 64), (32, 2048, 128))
GPU_ATTENTION = ((8, 12, 1024, 64), (2, 32, 2048, 128), (1, 32, 8192, 128))
GPU_ELEMENTS = (2**16, 2**22, 2**26)
GPU_IMAGES = (
    (64, 3, 64, 224, 7, 2),
    (64, 64, 64, 56, 3, 1),
    (64, 256, 64, 56, 1, 1),
    (64, 512, 512, 7, 3, 1),
)
"""(samples, channels, wider, side, window, stride): ResNet-50's."""


def worker_cases() -> list[OpCase]:
    """List the cases of a CPU worker, in a fixed order: every process that measures lists the same ones."""
    cases: list[OpCase] = []
    for count in WORKER_ELEMENTS:
        cases += [_pointwise(kind, "float32", (count // 64, 64)) for kind in WORKER_POINTWISE]
        cases.append(_transposed(count))
        cases += [_rowwise(kind, "float32", (max(1, count // 256), 256)) for kind in GPU_ROWWISE]
        cases.append(_loss("float32", max(1, count // 256), 256))
    cases.append(OpCase("view", "view", lambda x: aten.view.default(x, [64, 4]), _random("float32", (4, 64))))
    cases += [_lookup("float32", *shape) for shape in WORKER_LOOKUPS]
    cases += [_linear("float32", *shape, bias=True) for shape in WORKER_PRODUCTS]
    cases += [_product("float32", count, rows, inner, rows) for count, rows, inner in WORKER_BATCHED]
    for attention in WORKER_ATTENTION:
        cases += [_worker_attention(attention, dropout) for dropout in (0.0, 0.1)]
    for images in WORKER_IMAGES:
        cases += [_conv("float32", *images, 3, 1, bias=True), _conv_transpose(*images)]
    for maps in WORKER_MAPS:
        cases += _of_maps(*maps)
    return cases


def device_cases(numbers: Iterable[NumberFormat] = NUMBERS, *, short: bool = False) -> list[OpCase]:
    """List the cases of a GPU. ``short``: a third of them, for a minute instead of several."""
    cases: list[OpCase] = []
    for number in numbers:
        for shape in GPU_PRODUCTS[1:6:2] if short else GPU_PRODUCTS:
            cases.append(_linear(number, *shape))
        if not short:
            cases += [_product(number, count, rows, inner, rows) for count, rows, inner in GPU_BATCHED]
        cases += [_conv(number, *shape) for shape in (GPU_IMAGES[1:2] if short else GPU_IMAGES)]
        if number == "tf32":
            continue
        for attention in GPU_ATTENTION[:1] if short else GPU_ATTENTION:
            cases += _attentions(number, attention)
        if number == "float16":  # what only moves bytes takes as long as in bfloat16
            continue
        for count in GPU_ELEMENTS[1:] if short else GPU_ELEMENTS:
            cases += [_pointwise(kind, number, (count // 1024, 1024)) for kind in GPU_POINTWISE]
        cases += [_rowwise(kind, number, (8192, width)) for kind in GPU_ROWWISE for width in (768, 4096)]
        cases += [_loss(number, 4096, 50304), _lookup(number, 8192, 50304, 768)]
    return cases


def cases_of(ops: Iterable[PlannedOp], numbers: Iterable[NumberFormat]) -> list[OpCase]:
    """List cases for the ops of a plan, each shape once: products and attention by their FLOPs, others by their results."""
    cases: dict[str, OpCase] = {}
    known = set(numbers)
    for op in ops:
        number = op.dtype if op.dtype in known else None
        for case in () if number is None else _cases_of(op, number):
            cases.setdefault(case.name, case)
    return list(cases.values())


def _cases_of(op: PlannedOp, number: NumberFormat) -> Iterator[OpCase]:
    name = op.op.split(".")[1] if op.op.count(".") >= 2 else op.op
    kind, size = ALIASES.get(name, name), math.prod(op.shape)
    if not size or not op.shape:
        return
    inner = round(op.forward_flops / (2 * size))
    if kind == "linear" and inner and len(op.shape) >= 2:
        yield _linear(number, size // op.shape[-1], inner, op.shape[-1])
    elif kind == "matmul" and inner and len(op.shape) >= 2:
        yield _product(number, math.prod(op.shape[:-2]), op.shape[-2], inner, op.shape[-1])
    elif kind == "scaled_dot_product_attention" and len(op.shape) == 4:
        yield from _attentions(number, (op.shape[0], op.shape[1], op.shape[2], op.shape[3]))
    elif kind in GPU_POINTWISE:
        yield _pointwise(kind, number, (size // op.shape[-1], op.shape[-1]))
    elif kind in GPU_ROWWISE and kind != "mean":  # the rows that a mean was taken of are not in its result
        yield _rowwise(kind, number, (size // op.shape[-1], op.shape[-1]))


# --------------------------------------------------------------------------------------------------
# One case each


def dtype_of(number: NumberFormat) -> torch.dtype:
    """Return the type of the tensors."""
    dtype: torch.dtype = getattr(torch, "float32" if number == "tf32" else number)
    return dtype


def _random(number: NumberFormat, *shapes: tuple[int, ...]) -> Callable[[], Sequence[Tensor]]:
    """Return a function that makes random tensors of these shapes."""
    return lambda: [torch.randn(shape, dtype=dtype_of(number)) for shape in shapes]


def _by(*sizes: int) -> str:
    return "x".join(map(str, sizes))


def _linear(number: NumberFormat, tokens: int, inner: int, outer: int, *, bias: bool = False) -> OpCase:
    weights = _random(number, (outer, inner), *[(outer,)] * bias)
    name = f"linear {number} {_by(tokens, inner, outer)}" + " bias" * bias
    return OpCase(name, "linear", aten.linear.default, _random(number, (tokens, inner)), weights, number)


def _product(number: NumberFormat, matrices: int, rows: int, inner: int, width: int) -> OpCase:
    operands = _random(number, (matrices, rows, inner), (matrices, inner, width))
    name = f"matmul {number} {_by(matrices, rows, inner, width)}"
    return OpCase(name, "matmul", aten.matmul.default, operands, number=number)


_attend = aten.scaled_dot_product_attention.default


def _attentions(number: NumberFormat, shape: tuple[int, int, int, int]) -> Iterator[OpCase]:
    """Yield each backend's, with a causal mask and without a mask."""
    for backend in BACKENDS:
        if backend == "math" and shape[2] > MOST_MATH_TOKENS:
            continue
        for causal in (True, False):
            yield OpCase(
                f"attention {number} {_by(*shape)} {'causal' if causal else 'full'} {backend}",
                "scaled_dot_product_attention",
                lambda q, k, v, causal=causal: _attend(q, k, v, None, 0.0, causal),
                _random(number, shape, shape, shape),
                number=number,
                share=0.5 if causal and backend != "math" else 1.0,
                backend=backend,
            )


def _worker_attention(shape: tuple[int, int, int, int], dropout: float) -> OpCase:
    """Attend as a model does, whose heads are views of one tensor.

    With dropout, processors have no kernel of one piece: scores are written, and read again.
    """
    samples, heads, tokens, width = shape

    def operands() -> Sequence[Tensor]:
        heads_last = torch.randn(3, samples, tokens, heads, width)
        return [part.transpose(1, 2) for part in heads_last.unbind()]

    kind = MATH_ATTENTION if dropout else "scaled_dot_product_attention"
    return OpCase(
        f"{kind} float32 {_by(*shape)}", kind, lambda q, k, v: _attend(q, k, v, None, dropout, True), operands
    )


def _conv(
    number: NumberFormat,
    samples: int,
    channels: int,
    wider: int,
    side: int,
    window: int,
    stride: int,
    *,
    bias: bool = False,
) -> OpCase:
    return OpCase(
        f"conv2d {number} {_by(samples, channels, wider, side, window, stride)}" + " bias" * bias,
        "conv2d",
        lambda x, w, b=None: aten.conv2d.default(x, w, b, [stride, stride], [window // 2, window // 2]),
        _random(number, (samples, channels, side, side)),
        _random(number, (wider, channels, window, window), *[(wider,)] * bias),
        number,
    )


def _conv_transpose(samples: int, channels: int, wider: int, side: int) -> OpCase:
    return OpCase(
        f"conv_transpose2d float32 {_by(samples, channels, wider, side)}",
        "conv_transpose2d",
        lambda x, w, b: aten.conv_transpose2d.input(x, w, b, [2, 2]),
        _random("float32", (samples, channels, side, side)),
        _random("float32", (channels, wider, 2, 2), (wider,)),
    )


def _of_maps(samples: int, channels: int, side: int) -> Iterator[OpCase]:
    size, maps = _by(samples, channels, side), _random("float32", (samples, channels, side, side))
    scale = _random("float32", (channels,), (channels,))
    calls: dict[str, Callable[..., Tensor]] = {
        "group_norm": lambda x, w, b: aten.group_norm.default(x, 4, w, b),
        "batch_norm": lambda x, w, b: aten.batch_norm.default(x, w, b, None, None, True, 0.1, 1e-5, False),
        "max_pool2d": lambda x: aten.max_pool2d.default(x, [2, 2], [2, 2]),
    }
    for kind, call in calls.items():
        yield OpCase(f"{kind} float32 {size}", kind, call, maps, scale if kind.endswith("norm") else tuple)


_POINTWISE: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "add": (2, aten.add.Tensor),
    "mul": (2, aten.mul.Tensor),
    "contiguous": (1, aten.clone.default),
    "relu": (1, aten.relu.default),
    "gelu": (1, aten.gelu.default),
    "silu": (1, aten.silu.default),
    "tanh": (1, aten.tanh.default),
    "pow": (1, lambda x: aten.pow.Tensor_Scalar(x, 2)),
    "dropout": (1, lambda x: aten.dropout.default(x, 0.1, True)),
    "cat": (2, lambda a, b: aten.cat.default([a, b], -1)),
}
"""Operands and call of each kind."""


def _pointwise(kind: str, number: NumberFormat, shape: tuple[int, int]) -> OpCase:
    operands, call = _POINTWISE[kind]
    name = f"{kind} {number} {math.prod(shape)}"
    return OpCase(name, kind, call, _random(number, *[shape] * operands), number=number)


def _transposed(count: int) -> OpCase:
    """Copy heads that stand in another order in memory."""
    return OpCase(
        f"contiguous float32 {count} transposed",
        "contiguous",
        lambda x: aten.clone.default(x, memory_format=torch.contiguous_format),
        lambda: (torch.randn(4, count // 256, 64).transpose(0, 1),),
    )


_ROWWISE: dict[str, Callable[..., Tensor]] = {
    "softmax": lambda x: aten.softmax.int(x, -1),
    "mean": lambda x: aten.mean.dim(x, [-1], True),
    "layer_norm": lambda x, w, b: aten.layer_norm.default(x, [w.shape[0]], w, b, 1e-5),
}


def _rowwise(kind: str, number: NumberFormat, shape: tuple[int, int]) -> OpCase:
    weights = _random(number, (shape[1],), (shape[1],)) if kind == "layer_norm" else tuple
    return OpCase(
        f"{kind} {number} {_by(*shape)}", kind, _ROWWISE[kind], _random(number, shape), weights, number
    )


def _loss(number: NumberFormat, rows: int, classes: int) -> OpCase:
    def operands() -> Sequence[Tensor]:
        return torch.randn(rows, classes, dtype=dtype_of(number)), torch.zeros(rows, dtype=torch.long)

    name = f"cross_entropy_loss {number} {_by(rows, classes)}"
    return OpCase(name, "cross_entropy_loss", aten.cross_entropy_loss.default, operands, number=number)


def _lookup(number: NumberFormat, rows: int, words: int, width: int) -> OpCase:
    return OpCase(
        f"embedding {number} {_by(rows, words, width)}",
        "embedding",
        lambda ids, table: aten.embedding.default(table, ids),
        lambda: (torch.arange(rows) * 7 % words,),
        _random(number, (words, width)),
        number,
    )
