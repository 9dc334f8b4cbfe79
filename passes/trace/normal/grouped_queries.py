"""Keys and values of grouped queries: not copied once for every head of queries where the kernel needs no copies.

Before                                                     After
    k [b, 8, s, d] ─ unsqueeze(2)                            scaled_dot_product_attention(q, k, v, is_causal=True,
      ─ expand(b, 8, 4, s, d) ─ reshape(b, 32, s, d)                                      enable_gqa=True)
    scaled_dot_product_attention(q, k, v, is_causal=True)

Copies are kept for backward: for 8,192 tokens of Llama-8B 134 MB a layer, where keys and values have 34. Live models leave
them out too where they see no mask; a trace sees the mask that ``masks`` drops.

Heads stay copied where a device that can run the op has no fused kernel for shared ones, and would write all scores to
memory: with a mask, with unlike widths, in 32 bits (CUDA), in float16 (cards before sm_80, which know no bfloat16). And
with dropout: ranks that draw numbers of their own cannot pick heads of keys too (``passes.shard.rules.attention``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from cost_models.attention import AttentionCall, supports
from passes.graph.nodes import argument, call, drop_dead_code, fake_mode_of, symbolic
from runtime.segment.code import Dim

aten = torch.ops.aten

_HEADS = 1
"""The dimension of heads in what attention takes: [b, h, s, d]."""
_ORDERS = (aten.transpose.int, aten.permute.default, aten.swapaxes.default, aten.movedim.int)
_AS_BEFORE = (aten.clone.default, aten.contiguous.default, aten.to.dtype)
_REPEATS = (aten.expand.default, aten.broadcast_to.default, aten.repeat.default)
_MERGES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.flatten.using_ints)


def share_heads(graph: fx.Graph) -> None:
    """Let attention read heads of keys and values as they are before they are copied for groups of queries, in place."""
    changed = False
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        if not _has_kernel(node):
            continue
        query, key, value = node.args[:3]
        keys, values = _copied(key), _copied(value)
        if keys is None or values is None or keys.times != values.times:
            continue
        with graph.inserting_before(node):
            shared = [found.without_copies(graph) for found in (keys, values)]
        if all(source.meta["val"].stride(-1) == 1 for source in shared):  # as fused kernels want it
            node.args = (query, *shared, *node.args[3:])
            node.kwargs = {**node.kwargs, "enable_gqa": True}
        changed = True
    if changed:
        drop_dead_code(graph)


def _has_kernel(node: fx.Node) -> bool:
    """Tell whether every device that computes in the op's type has a fused kernel for it with shared heads."""
    query, key, value = (source.meta["val"] for source in node.args[:3])  # type: ignore[union-attr]
    if argument(node, "attn_mask") is not None or argument(node, "dropout_p") != 0.0:
        return False
    square = symbolic(query.shape[-2]) == symbolic(key.shape[-2])
    if query.dtype != torch.bfloat16 or (argument(node, "is_causal") and not square):
        return False
    q, k, v = (tuple(map(symbolic, t.shape)) for t in (query, key, value))
    return supports("flash", AttentionCall(q, k, v, query.dtype))


class _Copied(NamedTuple):
    """Heads that are copied, ``times`` each, side by side, and then put in another order.

    ``source``: the heads; in 5 dimensions, with ``extra`` the one of copies, of size 1. ``way``: the ops behind the copies.
    """

    source: fx.Node
    extra: int | None
    dim: int
    times: int
    way: tuple[fx.Node, ...] = ()

    def without_copies(self, graph: fx.Graph) -> fx.Node:
        """Take the heads the same way, at the graph's insertion point."""
        mode, made = fake_mode_of(graph), self.source
        if self.extra is not None:
            made = call(graph, mode, aten.squeeze.dims, (made, [self.extra]), like=made)
        for step in self.way:
            made = call(graph, mode, step.target, (made, *step.args[1:]), step.kwargs, like=step)
        return made


def _copied(node: fx.Node) -> _Copied | None:
    """Find the copies that ``node`` is made of, if they are of heads and nobody else reads them."""
    way: list[fx.Node] = []
    while node.target in (*_ORDERS, *_AS_BEFORE) and len(node.users) == 1:
        way.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    found = _repetition(node) if len(node.users) == 1 and node.meta["val"].dim() == 4 else None
    if found is None:
        return None
    dim, probe = found.dim, torch.empty((2, 3, 4, 5), device="meta")
    for step in way:
        if step.target in _ORDERS:
            dim = step.target(probe, *step.args[1:], **step.kwargs).shape.index(probe.shape[dim])
    return found._replace(way=tuple(way)) if dim == _HEADS else None


def _repetition(node: fx.Node) -> _Copied | None:
    """Read a node as copies: ``repeat_interleave``, or a repeated dimension of size 1 that joins the one before it."""
    if node.target is aten.repeat_interleave.self_int:
        source, times = node.args[:2]
        dim = argument(node, "dim")
        return None if dim is None else _Copied(source, None, dim % 4, times)  # type: ignore[arg-type]
    copied = node.args[0] if node.target in _MERGES else None
    while isinstance(copied, fx.Node) and copied.target in _AS_BEFORE[:2] and len(copied.users) == 1:
        copied = copied.args[0]
    if not isinstance(copied, fx.Node) or copied.target not in _REPEATS or len(copied.users) != 1:
        return None
    source = copied.args[0]
    before, after, merged = (_shape(n) for n in (source, copied, node))  # type: ignore[arg-type]
    unlike = [d for d, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
    if len(before) != 5 or len(after) != 5 or len(unlike) != 1:
        return None
    (extra,) = unlike
    joined = (*after[: extra - 1], after[extra - 1] * after[extra], *after[extra + 1 :]) if extra else ()
    if before[extra] != 1 or joined != merged or not isinstance(after[extra], int):
        return None
    if source.target is aten.unsqueeze.default and source.args[1] % 5 == extra:  # type: ignore[union-attr,operator]
        return _Copied(source.args[0], None, extra - 1, after[extra])  # type: ignore[union-attr,arg-type]
    return _Copied(source, extra, extra - 1, after[extra])  # type: ignore[arg-type]


def _shape(node: fx.Node) -> tuple[Dim, ...]:
    return tuple(map(symbolic, node.meta["val"].shape))
