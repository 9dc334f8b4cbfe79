"""Attention masks that are known before any data is: dropped where they hide nothing, named where they are causal.

Before                                                     After
    rows, columns = arange(512)[:, None], arange(512)          scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = (columns <= rows).expand(b, 1, 512, 512)
    scaled_dot_product_attention(q, k, v, mask)

A model that is traced builds masks which it leaves out when it runs by itself (transformers does), and with a mask CUDA has
no flash attention: an expanded one even falls back to products that write all scores to memory.

A mask is known if it comes from no input, and each sample's part of it neither depends on the sample's place in the batch
nor on the batch's size. That is proved by rules over few ops (``_kind``); its values are then those of a batch of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from passes.graph.nodes import argument, drop_dead_code, is_size

aten = torch.ops.aten

MOST_ELEMENTS = 1 << 26
"""The largest mask that is looked at: 8,192 tokens squared. The 64-bit sums that one is made of take half a GiB then."""


class Kind(Enum):
    """The way in which a value depends on the batch."""

    FIXED = "fixed"
    """Not at all."""
    SIZE = "size"
    """The number of samples."""
    NUMBERS = "numbers"
    """Each sample's number along dimension 0."""
    ALIKE = "alike"
    """A part for each sample along dimension 0, all alike whatever their number."""
    OPEN = "open"
    """Unknown, or by data."""


_ALONG_A_DIMENSION = (aten.diff.default, aten.cumsum.default, aten.slice.Tensor)
"""Ops that work along the dimension ``dim``."""
_COPIES = (aten.clone.default, aten.contiguous.default, aten.detach.default, aten.to.dtype)
_UNTAGGED = (aten.__and__.Tensor, aten.__or__.Tensor)
"""Pointwise ops that torch does not call so."""
_FILLED = (aten.ones.default, aten.zeros.default, aten.full.default)
_FILLED_LIKE = (aten.new_ones.default, aten.new_zeros.default, aten.new_full.default)


def simplify_masks(graph: fx.Graph) -> None:
    """Leave out what known masks say, in place."""
    kinds: dict[fx.Node, Kind] = {}
    for node in graph.nodes:
        kinds[node] = _kind(node, kinds)
    values: dict[fx.Node, Any] = {}
    meanings: dict[fx.Node, _Meaning] = {}  # many layers read one mask, and it may be large
    changed = False
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        mask = argument(node, "attn_mask")
        if not isinstance(mask, fx.Node) or kinds[mask] not in (Kind.FIXED, Kind.ALIKE):
            continue
        if _most_elements(mask, kinds) > MOST_ELEMENTS:
            continue
        if mask not in meanings:
            meanings[mask] = _meaning(_evaluate(mask, kinds, values))
        full = meanings[mask].full
        if full or _is_causal(meanings[mask], node):
            query, key, found = node.args[:3]
            dropout = argument(node, "dropout_p")
            rest = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "dropout_p", "is_causal")}
            node.args, node.kwargs = (query, key, found, None, dropout, not full), rest
            changed = True
    if changed:
        drop_dead_code(graph)


class _Meaning(NamedTuple):
    """``full``: the mask hides nothing. ``causal_tokens``: the side of a square whose rows see columns up to their own."""

    full: bool
    causal_tokens: int | None = None


def _meaning(value: Tensor) -> _Meaning:
    if bool(value.all()) if value.dtype == torch.bool else bool((value == 0).all()):
        return _Meaning(full=True)
    if value.dim() < 2 or value.shape[-2] != value.shape[-1]:
        return _Meaning(full=False)
    lower = torch.ones(value.shape[-2:], dtype=torch.bool).tril()
    wanted = lower if value.dtype == torch.bool else torch.zeros(()).where(lower, -torch.inf)
    return _Meaning(full=False, causal_tokens=value.shape[-1] if bool((value == wanted).all()) else None)


def _is_causal(meaning: _Meaning, attention: fx.Node) -> bool:
    """Tell whether the mask is what ``is_causal=True`` means: each query sees the keys up to its own place."""
    lengths = [attention.args[n].meta["val"].shape[-2] for n in (0, 1)]  # type: ignore[union-attr]
    return not any(map(is_size, lengths)) and all(size == meaning.causal_tokens for size in lengths)


# --------------------------------------------------------------------------------------------------


def _most_elements(mask: fx.Node, kinds: dict[fx.Node, Kind]) -> int:
    """Count the elements of the largest tensor that ``mask`` is made of, for one sample."""
    seen, waiting, most = {mask}, [mask], 0
    while waiting:
        node = waiting.pop()
        if isinstance(node.meta.get("val"), Tensor) and kinds[node] is not Kind.OPEN:
            sizes = [1 if is_size(size) else size for size in node.meta["val"].shape]
            most = max(most, int(torch.Size(sizes).numel()))
        before = [] if kinds[node] is Kind.SIZE else [n for n in node.all_input_nodes if n not in seen]
        seen.update(before)
        waiting += before
    return most


def _evaluate(node: fx.Node, kinds: dict[fx.Node, Kind], values: dict[fx.Node, Any]) -> Any:
    """Compute what ``node`` is for one sample."""
    if node not in values:
        if kinds[node] is Kind.SIZE:
            values[node] = 1
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _evaluate(n, kinds, values))
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]


def _kind(node: fx.Node, kinds: dict[fx.Node, Kind]) -> Kind:
    """Say how the node's result depends on the batch, given how what it reads does."""
    if node.op != "call_function":
        return Kind.OPEN
    if node.target is aten.sym_size.int:
        of_leaf = isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder"
        return Kind.SIZE if of_leaf and node.args[1] == 0 else Kind.OPEN
    target, read = node.target, [kinds[source] for source in node.all_input_nodes]
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), Tensor):
        return Kind.OPEN
    if Kind.OPEN in read or target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return Kind.OPEN
    if all(kind is Kind.FIXED for kind in read):
        return Kind.FIXED
    if target is aten.arange.default:
        return Kind.NUMBERS
    if target is aten.expand.default:
        return _sized(node.args[1], kinds, kinds[node.args[0]])  # type: ignore[index]
    if target in _FILLED or target in _FILLED_LIKE:
        place = int(target in _FILLED_LIKE)
        filled = any(isinstance(value, fx.Node) for value in node.args[place + 1 :])
        return Kind.OPEN if filled else _sized(node.args[place], kinds)
    if target is aten.index.Tensor:
        return _indexed(node, kinds)
    first = kinds[node.args[0]] if node.args and isinstance(node.args[0], fx.Node) else Kind.OPEN
    if target is aten.unsqueeze.default:
        behind = int(node.args[1]) % _rank(node) >= 1  # type: ignore[arg-type]
        return first if behind else Kind.OPEN
    if target in _COPIES:
        return first
    if Kind.SIZE in read or Kind.NUMBERS in read:
        return Kind.OPEN
    if target in _ALONG_A_DIMENSION:
        dim = argument(node, "dim")
        fits = all(_rank(source) == _rank(node) for source in node.all_input_nodes)
        return Kind.ALIKE if fits and int(dim) % _rank(node) >= 1 else Kind.OPEN
    if torch.Tag.pointwise in target.tags or target in _UNTAGGED:
        fits = all(_spreads(source, kinds[source], _rank(node)) for source in node.all_input_nodes)
        return Kind.ALIKE if fits else Kind.OPEN
    return Kind.OPEN


def _rank(node: fx.Node) -> int:
    return int(node.meta["val"].dim())


def _spreads(source: fx.Node, kind: Kind, rank: int) -> bool:
    """Tell whether dimension 0 of a pointwise result with ``rank`` dimensions is the one of ``source``, or not in it."""
    if kind is Kind.ALIKE:
        return _rank(source) == rank
    return _rank(source) < rank or source.meta["val"].shape[0] == 1


def _sized(sizes: Any, kinds: dict[fx.Node, Kind], source: Kind = Kind.FIXED) -> Kind:
    """Say how a tensor of ``sizes``, which repeats something of kind ``source`` or one number, depends on the batch."""
    first, others = (sizes[0], sizes[1:]) if sizes else (None, ())
    if any(isinstance(size, fx.Node) for size in others):
        return Kind.OPEN
    if isinstance(first, fx.Node):
        alike = kinds[first] is Kind.SIZE and source in (Kind.FIXED, Kind.ALIKE)
        return Kind.ALIKE if alike else Kind.OPEN
    if source is Kind.FIXED:
        return Kind.FIXED
    return Kind.ALIKE if source is Kind.ALIKE and first == -1 else Kind.OPEN


def _indexed(node: fx.Node, kinds: dict[fx.Node, Kind]) -> Kind:
    """Say how ``source[numbers, columns]`` depends on the batch: each sample reads of its own part alone."""
    source, indices = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(indices, Sequence)
    first, *others = indices
    if kinds[source] is not Kind.ALIKE or not isinstance(first, fx.Node) or kinds[first] is not Kind.NUMBERS:
        return Kind.OPEN
    columns = [n for n in others if isinstance(n, fx.Node) and kinds[n] is Kind.FIXED]
    rank = _rank(first)
    fits = len(columns) == len(others) and all(_spreads(n, Kind.FIXED, rank) for n in columns)
    return Kind.ALIKE if fits else Kind.OPEN
