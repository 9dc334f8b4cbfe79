"""Attention on shards where several heads of queries share one of keys and values, and a rank needs others than it has.

    8 heads of queries, 2 of keys, 4 ranks      rank    queries' heads    keys' heads
                                                0       0 1               0 0
                                                1       2 3               0 0
                                                2       4 5               1 1
                                                3       6 7               1 1

    role        a rank has                                     it does
    queries     some heads of queries, all of keys             copies those that its queries read
    tokens      some heads of queries, all of some tokens'     gets those that its queries read, of all tokens: an
                keys                                           all-to-all forward, another backward; and copies them
    columns     all heads, columns of the values               copies them all: the kernels that take values of another
                                                               width than keys take no shared heads

Each query's head gets a copy of its own: for backward a rank keeps its copies, and no kernel needs to know of shared heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from runtime.ops.peers import Peers

HEADS, TOKENS = -3, -2


def attention(
    op: Callable[..., Tensor],
    axes: Mapping[str, Peers],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
    **options: Any,
) -> Tensor:
    """Compute attention of ``query`` (…, h, l, e) to ``key`` (…, k, s, e) and ``value`` (…, k, s, v)."""
    count, ranks = query.shape[HEADS], axes.get("queries") or axes.get("tokens")
    place, size = (ranks.rank, ranks.size) if ranks is not None else (0, 1)
    group = count * size // key.shape[HEADS]
    wanted = Counter((place * count + i) // group for i in range(count))
    if "tokens" in axes:
        firsts, sent = heads_sent(count, size, key.shape[HEADS])
        key, value = (_exchanged(x, axes["tokens"], firsts, sent) for x in (key, value))
        wanted = Counter({head - firsts[place]: times for head, times in wanted.items()})
    return op(query, _copies(key, wanted), _copies(value, wanted), *rest, **options)


def attention_of_shape(
    op: Callable[..., Tensor],
    roles: Mapping[str, str],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
    **options: Any,
) -> Tensor:
    """Compute what has the shapes, types and arithmetic of ``attention`` on any rank."""
    wanted = Counter({0: query.shape[HEADS]})
    key, value = _copies(key, wanted), _copies(value, wanted)
    if "tokens" in roles:
        key, value = (x[..., :1, :].expand(*x.shape[:TOKENS], query.shape[TOKENS], -1) for x in (key, value))
    return op(query, key, value, *rest, **options)


def heads_sent(count: int, ranks: int, keys: int) -> tuple[list[int], int]:
    """Return the first of the heads of keys that each rank is sent, and their number: ``count`` of queries read them."""
    group = count * ranks // keys
    read = [(rank * count // group, (rank * count + count - 1) // group) for rank in range(ranks)]
    sent = max(last - first for first, last in read) + 1
    return [min(first, keys - sent) for first, _ in read], sent


def _exchanged(heads: Tensor, ranks: Peers, firsts: list[int], sent: int) -> Tensor:
    """Return ``sent`` heads of all tokens, for heads of this rank's tokens."""
    outgoing = torch.cat([heads.narrow(HEADS, first, sent) for first in firsts], HEADS)
    return _Exchange.apply(outgoing, ranks)  # type: ignore[no-any-return, no-untyped-call]


class _Exchange(torch.autograd.Function):
    """Cut heads, join tokens; backward the other way round."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, ranks: Peers) -> Tensor:
        ctx.ranks = ranks
        return ranks.exchange(heads, HEADS, TOKENS)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.ranks.exchange(gradients[0], TOKENS, HEADS), None


def _copies(heads: Tensor, wanted: Mapping[int, int]) -> Tensor:
    """Copy heads as often as ``wanted`` says; backward adds a head's copies up before anything else."""
    sizes = list(heads.shape)
    found = []
    for head, count in wanted.items():
        sizes[HEADS] = count
        found.append(heads.narrow(HEADS, head, 1).expand(sizes))
    return torch.cat(found, HEADS)
