"""flex_attention as one op: a mask and a change of scores as programs, the blocks that are not hidden as lists.

    flex_blocks(operands, mask, l, s)  ─►  blocks          once per mask, whoever reads it
    flex_attention(q, k, v, blocks, operands, mask, score, scale)

    query [b, h, l, e]   key [b, g, s, e]   value [b, g, s, v]   operands [b|1, h|1, l|1, s|1]   result [b, h, l, v]
    g divides h. ``mask`` and ``score``: steps over the operands (``runtime.ops.flex_program``), of which those of ``score``
    find the scores behind the operands. A query that sees no key gets zeros.

On CUDA torch's own kernel runs, compiled: it skips hidden blocks, and neither mask nor scores are ever in memory. It is
given functions of one pair, and lists of blocks. Everywhere else, and in types or sizes that it does not know, the dense
form runs: attention with a mask, or products where scores are changed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._triton import has_triton

from cost_models.attention import fits_flex
from runtime.ops.flex_program import evaluate, parse

BLOCK = 128
"""Rows and columns of a block: what torch's ``create_block_mask`` takes if it is told nothing else."""
_PAIRS_AT_ONCE = 1 << 24
"""Pairs of query and key whose mask is made at once: 128 MiB in 64 bits, per sample and head that it depends on."""
_MOST_BANDS = 128
"""Bands of rows of a long mask, of some ten kernels each, that are also traced and priced: of 131,072 tokens 1 GiB each."""

# torch.library leaves its class untyped.
_LIBRARY = torch.library.Library("partitioner", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "flex_blocks(Tensor[] operands, str[] mask, int rows, int columns) -> Tensor"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "flex_attention(Tensor query, Tensor key, Tensor value, Tensor? blocks, Tensor[] operands, str[] mask, str[] score, "
    "float scale, bool enable_gqa=False, *, float visible=1.0) -> Tensor"
)


def block_kinds(operands: Sequence[Tensor], mask: Sequence[str], rows: int, columns: int) -> Tensor:
    """Tell of each block whether the mask hides all of it (0), some (1) or nothing (2): [b|1, h|1, rows, columns / 128].

    What is behind the last row or column counts as hidden.
    """
    steps, found = parse(tuple(mask)), []
    count = max(1, _PAIRS_AT_ONCE // (BLOCK * columns), math.ceil(rows / BLOCK / _MOST_BANDS)) * BLOCK
    for first in range(0, rows, count):
        last = min(first + count, rows)
        band = [t.narrow(-2, first, last - first) if t.dim() > 1 and t.shape[-2] > 1 else t for t in operands]
        shown = evaluate(steps, band)
        lead = (*[1] * (4 - shown.dim()), *shown.shape[:-2])
        behind = (0, -columns % BLOCK, 0, (first - last) % BLOCK)
        shown = F.pad(shown.expand(*lead, last - first, columns), behind)
        blocks = math.ceil((last - first) / BLOCK), BLOCK, math.ceil(columns / BLOCK), BLOCK
        seen = shown.reshape(*lead, *blocks).sum((-3, -1))
        found.append((seen > 0).to(torch.int8) + (seen == BLOCK * BLOCK))
    return torch.cat(found, -2)


def _blocks(operands: Sequence[Tensor], mask: Sequence[str], rows: int, columns: int) -> Tensor:
    """List the blocks that are seen in part, then those that are seen whole, by rows and by columns: int32 [b|1, h|1, n].

    By rows: how many there are in each row of blocks, and the order of all its blocks, they first.
    """
    kinds = block_kinds(operands, mask, rows, columns)
    parts = []
    for kind, turned in itertools.product((1, 2), (False, True)):
        chosen = (kinds.transpose(-2, -1) if turned else kinds) == kind
        parts.append(chosen.sum(-1).int())
        parts.append(torch.argsort(chosen.int(), dim=-1, descending=True, stable=True).int().flatten(2))
    return torch.cat(parts, -1)


def list_sizes(rows: int, columns: int) -> list[tuple[int, ...]]:
    """Return the shapes of the lists that ``flex_blocks`` puts one after the other, without samples and heads."""
    r, c = math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)
    return [(r,), (r, c), (c,), (c, r)] * 2


def _lists(blocks: Tensor, rows: int, columns: int) -> list[Tensor]:
    shapes = list_sizes(rows, columns)
    parts = torch.split(blocks, [math.prod(shape) for shape in shapes], -1)
    lead = blocks.shape[:2]
    return [part.reshape(*lead, *shape) for part, shape in zip(parts, shapes, strict=True)]


def block_mask(blocks: Tensor, shown: Callable[..., Tensor], rows: int, columns: int) -> Any:
    """Return torch's BlockMask of these lists."""
    from torch.nn.attention.flex_attention import BlockMask

    partly = ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices")
    names = (*partly, *(f"full_{name}" for name in partly))
    lists = dict(zip(names, _lists(blocks, rows, columns), strict=True))
    return BlockMask((rows, columns), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=shown, **lists)  # type: ignore[arg-type]


def at_one(steps: Sequence[str], operands: Sequence[Tensor]) -> Callable[..., Tensor]:
    """Return the function of (score and) the numbers of sample, head, query and key that torch's kernel asks for."""
    parsed = parse(tuple(steps))

    def call(*given: Tensor) -> Tensor:
        scores, places = given[:-4], given[-4:]
        values = []
        for operand in operands:
            own = places[4 - operand.dim() :]
            index = tuple(
                place if size > 1 else torch.zeros_like(place)
                for place, size in zip(own, operand.shape, strict=True)
            )
            values.append(operand[index] if index else operand)
        return evaluate(parsed, [*values, *scores])

    return call


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor | None,
    operands: Sequence[Tensor],
    mask: Sequence[str],
    score: Sequence[str],
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    """Let torch's compiled kernel compute."""
    rows, columns = query.shape[-2], key.shape[-2]
    shown = None if blocks is None else block_mask(blocks, at_one(mask, operands), rows, columns)
    changed = at_one(score, operands) if score else None
    out: Tensor = _compiled()(
        query, key, value, score_mod=changed, block_mask=shown, scale=scale, enable_gqa=enable_gqa
    )
    return out


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    operands: Sequence[Tensor],
    mask: Sequence[str],
    score: Sequence[str],
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    """Compute with the whole mask: attention, or products where scores are changed."""
    wide = query.dtype == torch.float64
    shown = evaluate(parse(tuple(mask)), operands, wide=wide) if mask else None
    if not score:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=shown, scale=scale, enable_gqa=enable_gqa
        )
    precise = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa and query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // max(1, key.shape[1])
        key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    scores = (query.to(precise) @ key.to(precise).transpose(-2, -1)) * scale
    scores = evaluate(parse(tuple(score)), [*operands, scores], wide=wide)
    if shown is None:
        return torch.softmax(scores, -1).to(query.dtype) @ value
    # A row that sees nothing gives zeros: its scores stay finite, or its gradient would be no number.
    blind = ~shown.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~(shown | blind), -torch.inf), -1)
    return weights.masked_fill(blind, 0.0).to(query.dtype) @ value


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor | None,
    operands: Sequence[Tensor],
    mask: Sequence[str],
    score: Sequence[str],
    scale: float,
    enable_gqa: bool = False,
    *,
    visible: float = 1.0,
) -> Tensor:
    """Compute as the device can. ``visible``: the share of blocks that are not hidden, for who prices the op."""
    if fits_flex(query.device.type, query.dtype, query.shape[-1], value.shape[-1]) and has_triton():
        return by_kernel(query, key, value, blocks, operands, mask, score, scale, enable_gqa)
    return dense(query, key, value, operands, mask, score, scale, enable_gqa)


_LIBRARY.impl("flex_blocks", _blocks, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("flex_attention", _attention, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
FLEX_BLOCKS = torch.ops.partitioner.flex_blocks.default
FLEX_ATTENTION = torch.ops.partitioner.flex_attention.default
ATTENTION = frozenset({torch.ops.aten.scaled_dot_product_attention.default, FLEX_ATTENTION})
"""The ops that compute attention as one."""
