"""``flex_attention`` in forward: as ATen ops in a trace, and with a backward where its own kernels have none.

    flex_attention(q, k, v)                              ─►  scaled_dot_product_attention(q, k, v)
    flex_attention(q, k, v, score_mod=f, block_mask=m)   ─►  flex_traced(q, k, v, m, x, f(x), scale)
    … where f is trained, or the sizes are open          ─►  softmax(where(m, f(q @ kᵀ · scale), -inf)) @ v

``flex_traced`` stands for the call until masks and changes of scores are known to be programs over small tensors
(``passes.trace.normal.flex_fold``); x stands for the scores.

torch's own kernels cannot be exported, and have no backward on CPUs. User code holds the function under any name, so what
is replaced is the higher-order op that it calls.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from runtime.user_code import caller

# torch.library leaves its class untyped.
_LIBRARY = torch.library.Library("partitioner", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "flex_traced(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? score, Tensor? changed, "
    "float scale, bool enable_gqa) -> Tensor"
)


def _shaped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    score: Tensor | None,
    changed: Tensor | None,
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=enable_gqa)


_LIBRARY.impl("flex_traced", _shaped, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
FLEX_TRACED = torch.ops.partitioner.flex_traced.default


@contextlib.contextmanager
def flex_as_ops(notes: list[str]) -> Iterator[None]:
    """Let calls of ``flex_attention`` and ``create_block_mask`` leave ATen ops in a trace. Adds to ``notes``.

    Lists of blocks are for torch's kernels alone, and nothing of a trace reads them. Their making, which cannot be traced
    or fixes the number of samples, is left out.
    """
    from torch._dynamo import _trace_wrapped_higher_order_op as indexing

    masks = _Masks(notes)
    lists: dict[str, Any] = {
        "_vmap_for_bhqkv": masks.broadcast,
        "_convert_mask_to_block_mask": _no_blocks,
        "_transpose_ordered": lambda count, indices, *_: (count, indices),
    }
    with (
        _padding_kept(),
        _calling(partial(_as_ops, masks)),
        mock.patch.multiple(_module(), **lists),
        mock.patch.object(
            indexing, "TransformGetItemToIndex", contextlib.nullcontext
        ),  # for vmap's sake alone
    ):
        yield


@contextlib.contextmanager
def flex_with_backward() -> Iterator[None]:
    """Let calls of ``flex_attention`` run as torch defines it in plain ops, which have a backward on any device."""
    from torch._higher_order_ops.flex_attention import math_attention

    with _calling(math_attention):
        yield


@contextlib.contextmanager
def _padding_kept() -> Iterator[None]:
    """Let transformers give a mask of padding to ``create_block_mask`` whatever it hides: it looks whether that is nothing.

    It does so for flex_attention alone: other masks of a trace are kept unseen.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if not hasattr(masks, "fast_all"):
        yield
        return
    with mock.patch.object(masks, "fast_all", _unseen):
        yield


def _unseen(tensor: Tensor) -> bool:
    return False


def _calling(attention: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    return mock.patch.multiple(
        _module(),
        flex_attention_hop=attention,
        _validate_device=lambda *_: None,
        _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True,  # torch's own switch: the op is called as it is, not compiled
    )


def _module() -> ModuleType:
    import torch.nn.attention.flex_attention as module

    return module


def _as_ops(
    masks: _Masks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention and, of its scores, the logarithm of the sum of exponentials and the maximum, in base 2.

    ``query`` [b, h, l, e], ``key`` [b or 1, g, s, e], ``value`` [b or 1, g, s, v]; g divides h.
    """
    module = _module()
    if torch.is_autocast_enabled(query.device.type):
        wanted = torch.get_autocast_dtype(query.device.type)
        query, key, value = (t.to(wanted) for t in (query, key, value))
    repeats = query.size(1) // key.size(1)
    if key.size(0) != query.size(0):
        key, value = (t.expand(query.size(0), -1, -1, -1) for t in (key, value))
    sizes = (query.size(0), query.size(1), query.size(2), key.size(2))
    indices = _spread([torch.arange(size, device=query.device) for size in sizes])
    mask = None if block_mask[-1] is module.noop_mask else masks.of(block_mask[-1], indices)
    precise = torch.promote_types(query.dtype, torch.float32)
    wide = key.repeat_interleave(repeats, 1) if repeats > 1 else key
    plain = (query.to(precise) @ wide.to(precise).transpose(-2, -1)) * scale
    scores = plain if score_mod is module._identity else score_mod(plain, *indices)
    # A row that sees nothing gives zeros: its scores stay finite, or its gradient would be no number.
    blind = None if mask is None else ~mask.any(-1, keepdim=True)
    if mask is not None and blind is not None:
        hidden = scores.masked_fill(~(mask | blind), -torch.inf)
    else:
        hidden = scores
    total, largest = hidden.logsumexp(-1, keepdim=True), hidden.amax(-1, keepdim=True)
    probe = changed = None
    if scores is not plain:  # transformers gives a function that may leave them as they are
        probe = plain.detach()
        changed = score_mod(probe, *indices)
    if changed is not None and changed.requires_grad:
        masks.notes.append(
            f"the score function of flex_attention in {caller()} reads what is trained: products on every device, which "
            f"keep {sizes[1]} x {sizes[2]} x {sizes[3]} scores of each sample, and hidden blocks too"
        )
    if changed is not None and (changed.requires_grad or not _fixed(*sizes[2:])):
        weights = torch.softmax(hidden, -1)
        if blind is not None:
            weights = weights.masked_fill(blind, 0.0)
        out = weights.to(query.dtype) @ (value.repeat_interleave(repeats, 1) if repeats > 1 else value)
    elif (mask is None and changed is None) or not _fixed(*sizes[2:]):
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=repeats > 1
        )
    else:
        out = FLEX_TRACED(query, key, value, mask, probe, changed, scale, repeats > 1)
    if blind is not None:
        total, largest = (t.masked_fill(blind, -torch.inf) for t in (total, largest))
    return out, total.squeeze(-1) / math.log(2), largest.squeeze(-1) / math.log(2)


def _fixed(*sizes: int | torch.SymInt) -> bool:
    return all(isinstance(size, int) and size > 1 for size in sizes)


def _no_blocks(mask: Tensor, **sizes: Any) -> tuple[Tensor, Tensor]:
    """Return the kinds of blocks where none is listed: none seen in part, none seen whole."""
    sides = zip(mask.shape[-2:], (sizes["Q_BLOCK_SIZE"], sizes["KV_BLOCK_SIZE"]), strict=True)
    none = torch.zeros(
        1, 1, *(-(-size // block) for size, block in sides), dtype=torch.int8, device=mask.device
    )
    return none, none


def _spread(indices: Sequence[Tensor]) -> list[Tensor]:
    """Return indices [b], [h], [l], [s] as [b, 1, 1, 1], [1, h, 1, 1], [1, 1, l, 1], [1, 1, 1, s].

    A function of scalar indices gets these: it runs once, and what reads no index keeps a size of 1 there.
    """
    places = range(len(indices))
    return [
        index[tuple(slice(None) if at == dim else None for at in places)] for dim, index in enumerate(indices)
    ]


@dataclass(frozen=True)
class _Masks:
    """Masks as they were made where ``create_block_mask`` was called: once, for all layers that read them."""

    notes: list[str]
    _made: dict[int, tuple[Callable[..., Tensor], object, Tensor]] = field(default_factory=dict)
    """The function itself, the trace that it was called in, and the mask, by the function's identity."""

    def of(self, function: Callable[..., Tensor], indices: Sequence[Tensor]) -> Tensor:
        """Return the mask of all pairs: the one made before, unless that was for fewer samples or heads than it reads."""
        mask = function(*indices)
        _, mode, before = self._made.get(id(function), (function, None, mask))
        return before if mode is get_proxy_mode() and before.shape == mask.shape else mask

    def broadcast(
        self, function: Callable[..., Tensor], prefix: Sequence[object], *_: object
    ) -> Callable[..., Tensor]:
        """Take the place of torch's nested ``vmap`` over four indices, behind ``prefix`` tensors of all sizes."""

        def call(*given: Tensor) -> Tensor:
            scores, indices = given[: len(prefix)], given[len(prefix) :]
            made = function(*scores, *_spread(indices))
            if not prefix:
                self._made[id(function)] = function, get_proxy_mode(), made
            return made.expand([index.size(0) for index in indices])

        return call
