"""``flex_attention`` in forward: as ATen ops in a trace, and with a backward where its own kernels have none.

    flex_attention(q, k, v, block_mask=m)       ─►  scaled_dot_product_attention(q, k, v, attn_mask=m)
    flex_attention(q, k, v, score_mod=f, …)     ─►  softmax(where(m, f(q @ kᵀ · scale), -inf)) @ v

So a plan splits it as attention or as products, prices what it computes, and verifies it in float64. It computes all
blocks: those that the mask hides are not skipped.

torch's own kernels cannot be exported, and have no backward on CPUs. User code holds the function under any name, so what
is replaced is the higher-order op that it calls.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor


@contextlib.contextmanager
def flex_as_ops() -> Iterator[None]:
    """Let calls of ``flex_attention`` and ``create_block_mask`` leave ATen ops in a trace.

    Lists of blocks are for torch's kernels alone. Those by columns are left out: their making cannot be traced.
    """
    from torch._dynamo import _trace_wrapped_higher_order_op as indexing

    lists: dict[str, Any] = {
        "_vmap_for_bhqkv": _broadcast,
        "_transpose_ordered": lambda count, indices: (count, indices),
    }
    with (
        _calling(_as_ops),
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
    repeats = query.size(1) // key.size(1)
    if key.size(0) != query.size(0):
        key, value = (t.expand(query.size(0), -1, -1, -1) for t in (key, value))
    sizes = (query.size(0), query.size(1), query.size(2), key.size(2))
    indices = _spread([torch.arange(size, device=query.device) for size in sizes])
    mask = None if block_mask[-1] is module.noop_mask else block_mask[-1](*indices)
    precise = torch.promote_types(query.dtype, torch.float32)
    wide = key.repeat_interleave(repeats, 1) if repeats > 1 else key
    scores = (query.to(precise) @ wide.to(precise).transpose(-2, -1)) * scale
    if score_mod is not module._identity:
        scores = score_mod(scores, *indices)
    # A row that sees nothing gives zeros: its scores stay finite, or its gradient would be no number.
    blind = None if mask is None else ~mask.any(-1, keepdim=True)
    if mask is not None and blind is not None:
        scores = scores.masked_fill(~(mask | blind), -torch.inf)
    total, largest = scores.logsumexp(-1, keepdim=True), scores.amax(-1, keepdim=True)
    if score_mod is module._identity:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=repeats > 1
        )
    else:
        weights = torch.softmax(scores, -1)
        if blind is not None:
            weights = weights.masked_fill(blind, 0.0)
        out = weights.to(query.dtype) @ (value.repeat_interleave(repeats, 1) if repeats > 1 else value)
    if blind is not None:
        total, largest = (t.masked_fill(blind, -torch.inf) for t in (total, largest))
    return out, total.squeeze(-1) / math.log(2), largest.squeeze(-1) / math.log(2)


def _spread(indices: Sequence[Tensor]) -> list[Tensor]:
    """Return indices [b], [h], [l], [s] as [b, 1, 1, 1], [1, h, 1, 1], [1, 1, l, 1], [1, 1, 1, s].

    A function of scalar indices gets these: it runs once, and what reads no index keeps a size of 1 there.
    """
    return [each.view([-1 if at == dim else 1 for at in range(4)]) for dim, each in enumerate(indices)]


def _broadcast(
    function: Callable[..., Tensor], prefix: Sequence[object], *_: object
) -> Callable[..., Tensor]:
    """Take the place of torch's nested ``vmap`` over four indices, behind ``prefix`` tensors of all sizes."""

    def call(*given: Tensor) -> Tensor:
        scores, indices = given[: len(prefix)], given[len(prefix) :]
        return function(*scores, *_spread(indices)).expand([index.size(0) for index in indices])

    return call
