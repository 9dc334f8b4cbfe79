"""The ops that a GPU's calibration measures: those of transformers and convolutional networks, at sizes that fill a card.

    linear bfloat16 4096x1024x4096          tokens x inner x outer
    attention float16 8x12x1024x64 causal flash
    gelu bfloat16 4194304

A case's name is its key in the calibration's file: what is there is not measured again.
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

from cost_models.op_cases import ALIASES, OpCase

aten = torch.ops.aten

Number: TypeAlias = Literal["float32", "tf32", "bfloat16", "float16"]
NUMBERS: tuple[Number, ...] = ("bfloat16", "float16", "float32", "tf32")
"""The ways to multiply that are measured; ``tf32`` is float32 with torch.backends.cuda.matmul.allow_tf32."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PRODUCTS = (
    (512, 1024, 1024),
    (4096, 768, 3072),
    (4096, 1024, 1024),
    (8192, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 4096, 11008),
    (8192, 768, 50304),
    (8192, 768, 50257),  # GPT-2's vocabulary as it is: rows that are not aligned
)
"""(tokens, inner, outer) of linear layers: GPT-2's, BERT's and Llama's."""
BATCHED = ((96, 512, 64), (32, 2048, 128))
"""(matrices, rows, inner) of products of batches of matrices: rows x inner times inner x rows."""
ATTENTION = ((8, 12, 1024, 64), (2, 32, 2048, 128), (1, 32, 8192, 128))
"""(samples, heads, tokens, width)."""
MOST_MATH_TOKENS = 2048
"""The most tokens at which attention is measured without a fused kernel: it holds several samples x heads x tokens²."""
ELEMENTS = (2**16, 2**22, 2**26)
IMAGES = ((64, 3, 64, 224, 7, 2), (64, 64, 64, 56, 3, 1), (64, 256, 64, 56, 1, 1), (64, 512, 512, 7, 3, 1))
"""(samples, channels, wider, side, window, stride): ResNet-50's."""


class PlannedOp(NamedTuple):
    """An op as a plan remembers it: ``aten.linear.default``, the shape of its result, its type, its FLOPs forward."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    forward_flops: float


@dataclass(frozen=True)
class DeviceCase:
    """One op to measure. ``share``: arithmetic done over that which is counted, 1/2 of attention with a causal mask."""

    name: str
    op: OpCase
    number: Number
    share: float = 1.0
    backend: str | None = None

    def setting(self) -> AbstractContextManager[object]:
        """Return the context in which it is called: its attention backend, its way to multiply float32."""
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


def dtype_of(number: Number) -> torch.dtype:
    """Return the type of the tensors."""
    found: torch.dtype = getattr(torch, "float32" if number == "tf32" else number)
    return found


def device_cases(numbers: Iterable[Number] = NUMBERS, *, short: bool = False) -> list[DeviceCase]:
    """List the cases of a whole calibration. ``short``: a third of them, for a minute instead of several."""
    cases: list[DeviceCase] = []
    for number in numbers:
        for shape in PRODUCTS[1:6:2] if short else PRODUCTS:
            cases.append(_linear(number, *shape))
        if not short:
            cases += [_batched(number, *shape) for shape in BATCHED]
        cases += [_conv(number, *shape) for shape in (IMAGES[1:2] if short else IMAGES)]
        if number == "tf32":
            continue
        for attention in ATTENTION[:1] if short else ATTENTION:
            cases += _attentions(number, attention)
        if number == "float16":  # what only moves bytes takes as long as in bfloat16
            continue
        for count in ELEMENTS[1:] if short else ELEMENTS:
            cases += [_pointwise(kind, number, (count // 1024, 1024)) for kind in _POINTWISE]
        cases += [_rowwise(kind, number, (8192, width)) for kind in _ROWWISE for width in (768, 4096)]
        cases += [_loss(number, 4096, 50304), _lookup(number, 8192, 50304, 768)]
    return cases


def cases_of(ops: Iterable[PlannedOp], numbers: Iterable[Number]) -> list[DeviceCase]:
    """List cases for the ops of a plan, each shape once: products and attention by their FLOPs, others by their results."""
    found: dict[str, DeviceCase] = {}
    known = set(numbers)
    for op in ops:
        number = op.dtype if op.dtype in known else None
        for case in () if number is None else _cases_of(op, number):
            found.setdefault(case.name, case)
    return list(found.values())


def _cases_of(op: PlannedOp, number: Number) -> Iterator[DeviceCase]:
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
    elif kind in _POINTWISE:
        yield _pointwise(kind, number, (size // op.shape[-1], op.shape[-1]))
    elif kind in _ROWWISE and kind != "mean":  # the rows that a mean was taken of are not in its result
        yield _rowwise(kind, number, (size // op.shape[-1], op.shape[-1]))


# --------------------------------------------------------------------------------------------------


def _random(number: Number, *shapes: tuple[int, ...]) -> Callable[[], Sequence[Tensor]]:
    return lambda: [torch.randn(shape, dtype=dtype_of(number)) for shape in shapes]


def _by(*sizes: int) -> str:
    return "x".join(map(str, sizes))


def _linear(number: Number, tokens: int, inner: int, outer: int) -> DeviceCase:
    op = OpCase(
        "linear", aten.linear.default, _random(number, (tokens, inner)), _random(number, (outer, inner))
    )
    return DeviceCase(f"linear {number} {_by(tokens, inner, outer)}", op, number)


def _batched(number: Number, matrices: int, rows: int, inner: int) -> DeviceCase:
    return _product(number, matrices, rows, inner, rows)


def _product(number: Number, matrices: int, rows: int, inner: int, width: int) -> DeviceCase:
    operands = _random(number, (matrices, rows, inner), (matrices, inner, width))
    name = f"matmul {number} {_by(matrices, rows, inner, width)}"
    return DeviceCase(name, OpCase("matmul", aten.matmul.default, operands), number)


def _attentions(number: Number, shape: tuple[int, int, int, int]) -> Iterator[DeviceCase]:
    for backend in BACKENDS:
        if backend != "math" or shape[2] <= MOST_MATH_TOKENS:
            yield from (_attention(number, shape, backend, causal) for causal in (True, False))


def _attention(number: Number, shape: tuple[int, int, int, int], backend: str, causal: bool) -> DeviceCase:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = aten.scaled_dot_product_attention.default(q, k, v, None, 0.0, causal)
        return found

    op = OpCase("scaled_dot_product_attention", call, _random(number, shape, shape, shape))
    name = f"attention {number} {_by(*shape)} {'causal' if causal else 'full'} {backend}"
    return DeviceCase(name, op, number, 0.5 if causal and backend != "math" else 1.0, backend)


def _conv(
    number: Number, samples: int, channels: int, wider: int, side: int, window: int, stride: int
) -> DeviceCase:
    op = OpCase(
        "conv2d",
        lambda x, w: aten.conv2d.default(x, w, None, [stride, stride], [window // 2, window // 2]),
        _random(number, (samples, channels, side, side)),
        _random(number, (wider, channels, window, window)),
    )
    return DeviceCase(f"conv2d {number} {_by(samples, channels, wider, side, window, stride)}", op, number)


_POINTWISE: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "add": (2, aten.add.Tensor),
    "mul": (2, aten.mul.Tensor),
    "contiguous": (1, aten.clone.default),
    "relu": (1, aten.relu.default),
    "gelu": (1, aten.gelu.default),
    "silu": (1, aten.silu.default),
    "dropout": (1, lambda x: aten.dropout.default(x, 0.1, True)),
}
"""Operands and call of each kind."""


def _pointwise(kind: str, number: Number, shape: tuple[int, int]) -> DeviceCase:
    operands, call = _POINTWISE[kind]
    op = OpCase(kind, call, _random(number, *[shape] * operands))
    return DeviceCase(f"{kind} {number} {math.prod(shape)}", op, number)


_ROWWISE: dict[str, Callable[..., Tensor]] = {
    "softmax": lambda x: aten.softmax.int(x, -1),
    "mean": lambda x: aten.mean.dim(x, [-1], True),
    "layer_norm": lambda x, w, b: aten.layer_norm.default(x, [w.shape[0]], w, b, 1e-5),
}


def _rowwise(kind: str, number: Number, shape: tuple[int, int]) -> DeviceCase:
    weights = _random(number, (shape[1],), (shape[1],)) if kind == "layer_norm" else tuple
    op = OpCase(kind, _ROWWISE[kind], _random(number, shape), weights)
    return DeviceCase(f"{kind} {number} {_by(*shape)}", op, number)


def _loss(number: Number, rows: int, classes: int) -> DeviceCase:
    def operands() -> Sequence[Tensor]:
        return torch.randn(rows, classes, dtype=dtype_of(number)), torch.zeros(rows, dtype=torch.long)

    op = OpCase("cross_entropy_loss", aten.cross_entropy_loss.default, operands)
    return DeviceCase(f"cross_entropy_loss {number} {_by(rows, classes)}", op, number)


def _lookup(number: Number, rows: int, words: int, width: int) -> DeviceCase:
    op = OpCase(
        "embedding",
        lambda ids, table: aten.embedding.default(table, ids),
        lambda: (torch.arange(rows) * 7 % words,),
        _random(number, (words, width)),
    )
    return DeviceCase(f"embedding {number} {_by(rows, words, width)}", op, number)
