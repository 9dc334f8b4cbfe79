"""Scaled dot-product attention: the memory traffic of each backend, and the tensors that it saves for backward.

A trace made on a laptop must predict a GPU, and the backend that the trace's own machine would pick is not the one that
the target picks (``math`` saves tensors of size s·s, the fused ones do not). So attention is not measured: this table says
what each backend saves, and ``choose_backend`` which one the target uses. Source: the autograd formulas of
``torch`` 2.13 (``derivatives.yaml``) and its backend selection (``sdp_utils``); the unit tests compare the table with
both.

Shapes: query [b, h, s, d]; key, value [b, k, t, d] (k = h unless the heads are grouped); mask [.., s, t]; out [b, h, s, d].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from cost_models.errors import UsageError

Saved = Literal["query", "key", "value", "mask", "out"]


@dataclass(frozen=True)
class AttentionCall:
    """One attention op, with every size a number."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    mask: tuple[int, ...] | None = None
    mask_dtype: torch.dtype | None = None
    mask_requires_grad: bool = False
    dropout: float = 0.0
    causal: bool = False
    """True if each query sees the keys up to its own place alone: fused kernels leave out what lies behind."""
    visible: float | None = None
    """The share of blocks that a mask of flex_attention does not hide; None for attention by any other name."""
    changes_scores: bool = False
    """True for flex_attention whose scores a function changes: without a kernel it is products."""
    listed_bytes: int = 0
    """Bytes of the lists of blocks that flex_attention's kernel is given copies of, and keeps."""
    copies_heads: bool = False
    """True if key and value are copies that are made inside the op (``runtime.ops.attention``)."""

    @property
    def rows(self) -> int:
        """Query rows over batch and heads: b·h·s."""
        return math.prod(self.query[:-1])

    @property
    def logsumexp_itemsize(self) -> int:
        """The softmax statistics are kept in 32 bits for narrower types, in 64 for float64."""
        return max(4, self.dtype.itemsize)


@dataclass(frozen=True)
class AttentionBackend:
    """The storages that a backend keeps for backward besides query, key, value and out."""

    name: str
    device_kind: Literal["cuda", "cpu", "any"]
    row_padding: int = 1
    """Query rows whose log-sum-exp is stored are padded to a multiple of this."""
    scalar_bytes: tuple[int, ...] = ()
    """Storages that hold the random generator's seed and offset."""
    head_alignment: int = 1
    """Heads of another width are copied into padded ones, which are kept instead of the operands."""
    mask_alignment: int = 1
    """Masks with another number of columns are copied into padded ones."""
    allows_mask: bool = True
    allows_dropout: bool = True
    copies_gradients: bool = False
    """Gradients of heads that several queries share are made once per query's head, and summed behind the kernel (as
    FlashAttention-2 does)."""


BACKENDS: Mapping[str, AttentionBackend] = MappingProxyType(
    {
        backend.name: backend
        for backend in (
            AttentionBackend("math", "any"),
            AttentionBackend("cpu-flash", "cpu", allows_dropout=False),
            AttentionBackend(
                "flash",
                "cuda",
                scalar_bytes=(16, 8),
                head_alignment=8,
                allows_mask=False,
                copies_gradients=True,
            ),
            AttentionBackend("efficient", "cuda", row_padding=32, scalar_bytes=(8, 8), mask_alignment=8),
            AttentionBackend("cudnn", "cuda", scalar_bytes=(8, 8)),
            AttentionBackend("flex", "cuda", allows_dropout=False),
        )
    }
)
"""The fused backends. ``math`` is none but a chain of ops: what it saves is counted by tracing the chain."""

MAX_FLASH_HEAD_DIM = 256
HALF_TYPES = (torch.float16, torch.bfloat16)
MIN_FLEX_HEAD_DIM = 16
"""Narrower heads have no kernel in torch._inductor."""


def choose_backend(call: AttentionCall, device_kind: str, requested: str | None = None) -> str:
    """Choose the backend that runs ``call`` on a device of this kind: the requested one if it can, else the usual one.

    The choice follows ``torch.nn.functional.scaled_dot_product_attention``: on CUDA flash, then efficient, then math
    (cudnn only when asked for); on CPU its flash, then math. Of flex_attention: torch's kernel where it has one ("flex"),
    else what its dense form is made of.
    """
    if requested is not None and requested not in BACKENDS:
        raise UsageError(
            f"use attention backend {requested!r}",
            because=["there is no table of what it saves"],
            suggestions=[f"choose one of: {', '.join(BACKENDS)}"],
        )
    if call.visible is not None:
        if fits_flex(device_kind, call.dtype, call.query[-1], call.value[-1]):
            return "flex"
        requested = "math" if call.changes_scores else None
    order = ("flash", "efficient") if device_kind == "cuda" else ("cpu-flash",)
    candidates = (requested, *order) if requested is not None else order
    return next((name for name in candidates if name == "math" or supports(name, call)), "math")


def fits_flex(device_kind: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> bool:
    """Tell whether torch has a kernel of flex_attention with a backward for this."""
    wide_enough = min(head_dim, value_dim) >= MIN_FLEX_HEAD_DIM
    return device_kind == "cuda" and dtype in (*HALF_TYPES, torch.float32) and wide_enough


def supports(name: str, call: AttentionCall) -> bool:
    """Tell whether the backend accepts the call."""
    backend = BACKENDS[name]
    if name == "flex":
        return call.visible is not None
    if name == "math":
        return True
    if call.mask is not None and (
        not backend.allows_mask or (call.mask_requires_grad and name == "cpu-flash")
    ):
        return False
    if call.dropout > 0 and not backend.allows_dropout:
        return False
    same_head_dim = call.query[-1] == call.value[-1]
    if len(call.query) != 4 or (not same_head_dim and name != "efficient"):
        return False
    if name in ("flash", "cudnn"):
        return call.dtype in HALF_TYPES and call.query[-1] <= MAX_FLASH_HEAD_DIM
    if name == "efficient":
        return call.dtype in (*HALF_TYPES, torch.float32) and call.query[1] == call.key[1]
    return call.dtype in (*HALF_TYPES, torch.float32, torch.float64)


def saved_tensors(name: str, call: AttentionCall) -> tuple[Saved | int, ...]:
    """List what autograd keeps for a fused backend: operands by name, and the bytes of each storage of the op's own.

    ``logsumexp`` [b, h, s rounded up] and the random generator's state are the op's own, and so is a boolean mask's
    floating-point copy.
    """
    backend = BACKENDS[name]
    kept: list[Saved | int] = ["query", "key", "value", "out"]
    if call.copies_heads:
        kept[1:3] = [_bytes(shape, call) for shape in (call.key, call.value)]
    if call.query[-1] % backend.head_alignment:
        padded = (_padded(shape, backend.head_alignment) for shape in (call.query, call.key, call.value))
        kept[:3] = [_bytes(shape, call) for shape in padded]
    rows = -(-call.query[-2] // backend.row_padding) * backend.row_padding
    kept.append(math.prod(call.query[:-2]) * rows * call.logsumexp_itemsize)
    kept.extend(backend.scalar_bytes)
    if name == "flex":
        return (*kept, *([call.listed_bytes] if call.listed_bytes else []))
    if call.mask is not None:
        copied = call.mask_dtype == torch.bool or call.mask[-1] % backend.mask_alignment
        copy_bytes = math.prod(_padded(call.mask, backend.mask_alignment)) * call.dtype.itemsize
        kept.append(copy_bytes if copied else "mask")
    return tuple(kept)


def output_storage_bytes(name: str, call: AttentionCall) -> int:
    """Return the bytes of the storage behind the output: more than the output's own where heads are padded."""
    out = (*call.query[:-1], call.value[-1])
    return math.prod(_padded(out, BACKENDS[name].head_alignment)) * call.dtype.itemsize


def backward_peak_bytes(name: str, call: AttentionCall) -> int:
    """Return the bytes that a fused backward holds at once: three gradients and, on CUDA, what it adds them up in or from.

    The flash and efficient kernels keep the query's gradient in 32 bits until it is whole, and a number for each query row
    (``dq_accum`` and ``softmax_d`` of FlashAttention-2, ``gQ`` and ``delta`` of the memory-efficient kernel).
    """
    gradients = sum(_bytes(shape, call) for shape in (call.query, call.key, call.value))
    if BACKENDS[name].device_kind != "cuda":
        return gradients
    if name == "flex":  # a block of queries' gradient is made whole by its own kernel
        return gradients + 4 * call.rows
    return gradients + copied_gradient_bytes(name, call) + 4 * (math.prod(call.query) + call.rows)


def copied_gradient_bytes(name: str, call: AttentionCall) -> int:
    """Return the bytes of gradients of keys and values that a fused backward makes per head of queries."""
    if not BACKENDS[name].copies_gradients or call.key[1] == call.query[1]:
        return 0
    return sum(_bytes((s[0], call.query[1], *s[2:]), call) for s in (call.key, call.value))


def _bytes(shape: tuple[int, ...], call: AttentionCall) -> int:
    return math.prod(shape) * call.dtype.itemsize


def _padded(shape: tuple[int, ...], alignment: int) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // alignment) * alignment)


def transferred_bytes(call: AttentionCall) -> tuple[int, int]:
    """Return the (forward, backward) bytes that a fused kernel reads and writes; it keeps the s·t scores on chip.

    Forward reads query, key, value and mask, writes out and statistics. Backward reads those and the gradient of
    out, and writes three gradients (and twice the query's accumulator). Heads that are copied inside the op are copied
    besides, and so are their gradients.
    """
    query, key, value = (_bytes(shape, call) for shape in (call.query, call.key, call.value))
    out = math.prod((*call.query[:-1], call.value[-1])) * call.dtype.itemsize
    statistics = call.rows * call.logsumexp_itemsize
    mask = math.prod(call.mask) * call.dtype.itemsize if call.mask is not None else 0
    if call.visible is not None:  # flex_attention has lists in its place: read, copied, and the copies read
        mask = 3 * call.listed_bytes
    forward = query + key + value + mask + out + statistics
    backward = forward + out + query + key + value
    copies = 2 * (key + value) if call.copies_heads else 0
    return forward + copies, backward + copies
