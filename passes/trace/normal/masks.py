"""Attention masks that are known before any data is: dropped where they hide nothing, named where they are causal.

Before                                                     After
    rows, columns = arange(512)[:, None], arange(512)          scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = (columns <= rows).expand(b, 1, 512, 512)
    scaled_dot_product_attention(q, k, v, mask)

A model that is traced builds masks which it leaves out when it runs by itself (transformers does), and with a mask CUDA has
no flash attention: an expanded one even falls back to products that write all scores to memory.

A mask is known if it comes from no input, and each sample's part of it neither depends on the sample's place in the batch
nor on the batch's size. That is proved by rules over few ops (``_kind``); its values are then those of a batch of one.

Values are made a band of rows at a time: what is small as a whole, of large ones the rows that are needed, where the rules
of sharding say that the op makes them of rows (``passes.shard.rules``). So many tokens squared are never there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from cost_models.layout import Shard
from passes.graph.nodes import argument, drop_dead_code, is_size, replaced
from passes.shard.rules import choices
from passes.shard.sizes import SIZE_ARGUMENTS
from passes.shard.words import Choice, operands
from passes.trace.normal.flex import FLEX_TRACED

aten = torch.ops.aten

MOST_ELEMENTS = 1 << 26
"""The largest tensor that is made on the way: 8,192 tokens squared. In 64 bits it takes half a GiB."""
BAND_ELEMENTS = 1 << 20
"""Elements of a band, to stay in caches from op to op: with 2^18 to 2^22, 16,384 tokens took equally long."""


class BatchDependence(Enum):
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
    kinds: dict[fx.Node, BatchDependence] = {}
    for node in graph.nodes:
        kinds[node] = _kind(node, kinds)
    known = _SampleValues(kinds)
    meanings: dict[fx.Node, _Meaning] = {}  # many layers read one mask, and it may be large
    changed = False
    attentions = (
        node
        for target in (aten.scaled_dot_product_attention.default, FLEX_TRACED)
        for node in graph.find_nodes(op="call_function", target=target)
    )
    for node in attentions:
        mask = argument(node, "attn_mask")
        if not isinstance(mask, fx.Node) or kinds[mask] not in (BatchDependence.FIXED, BatchDependence.ALIKE):
            continue
        if mask not in meanings:
            meanings[mask] = _meaning(known, mask)
        full = meanings[mask].full
        if node.target is FLEX_TRACED and argument(node, "score") is not None:
            if full:
                node.update_arg(3, None)
                changed = True
        elif full or _is_causal(meanings[mask], node):
            dropout = argument(node, "dropout_p", 0.0)
            rest = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "dropout_p", "is_causal")}
            if node.target is FLEX_TRACED:
                rest = {name: argument(node, name) for name in ("scale", "enable_gqa")}
                node.target = aten.scaled_dot_product_attention.default
            node.args, node.kwargs = (*node.args[:3], None, dropout, not full), rest
            changed = True
    if changed:
        drop_dead_code(graph)


class _Meaning(NamedTuple):
    """``full``: the mask hides nothing. ``causal_tokens``: the side of a square whose rows see columns up to their own."""

    full: bool
    causal_tokens: int | None = None


def _meaning(known: _SampleValues, mask: fx.Node) -> _Meaning:
    """Look at the mask band by band, until it neither hides nothing nor is causal."""
    rank = _rank(mask)
    sizes = _sizes(mask)
    rows, columns = (1, *sizes)[-2:]
    full, causal = True, rank > 1 and rows == columns
    step = max(1, BAND_ELEMENTS * rows // max(1, known.most_elements(mask)))
    for first in range(0, rows, step):
        places = range(first, min(first + step, rows))
        value = known.band(mask, places) if rank > 1 and rows > 1 else known.whole(mask)
        if value is None:
            return _Meaning(full=False)
        shown = value if value.dtype == torch.bool else value == 0
        full = full and bool(shown.all())
        if causal:
            lower = torch.arange(columns) <= torch.arange(places.start, places.stop)[:, None]
            wanted = lower if value.dtype == torch.bool else torch.zeros(()).where(lower, -torch.inf)
            causal = bool((value == wanted).all())
        if not full and not causal:
            break
    return _Meaning(full, columns if causal and not full else None)


def _is_causal(meaning: _Meaning, attention: fx.Node) -> bool:
    """Tell whether the mask is what ``is_causal=True`` means: each query sees the keys up to its own place."""
    lengths = [attention.args[n].meta["val"].shape[-2] for n in (0, 1)]  # type: ignore[union-attr]
    return not any(map(is_size, lengths)) and all(size == meaning.causal_tokens for size in lengths)


# --------------------------------------------------------------------------------------------------


def _sizes(node: fx.Node) -> list[int]:
    """Return the shape for one sample."""
    return [1 if is_size(size) else int(size) for size in node.meta["val"].shape]


@dataclass(frozen=True, eq=False)
class _SampleValues:
    """The values of nodes for one sample: whole ones, for all masks, and those of the band that is looked at."""

    kinds: dict[fx.Node, BatchDependence]
    _whole: dict[fx.Node, Any] = field(default_factory=dict)
    _band: dict[tuple[fx.Node, int, range], Tensor | None] = field(default_factory=dict)
    _most: dict[fx.Node, int] = field(default_factory=dict)
    _rules: dict[tuple[fx.Node, int], Choice | None] = field(default_factory=dict)

    def most_elements(self, mask: fx.Node) -> int:
        """Count the elements of the largest tensor that ``mask`` is made of."""
        if mask in self._most:
            return self._most[mask]
        seen, waiting, most = {mask}, [mask], 0
        while waiting:
            node = waiting.pop()
            if isinstance(node.meta.get("val"), Tensor) and self.kinds[node] is not BatchDependence.OPEN:
                most = max(most, math.prod(_sizes(node)))
            before = (
                []
                if self.kinds[node] is BatchDependence.SIZE
                else [n for n in node.all_input_nodes if n not in seen]
            )
            seen.update(before)
            waiting += before
        self._most[mask] = most
        return most

    def whole(self, node: fx.Node) -> Any:
        """Compute what ``node`` is; None for what is too large."""
        return self._evaluate(node) if self.most_elements(node) <= MOST_ELEMENTS else None

    def _evaluate(self, node: fx.Node) -> Any:
        if node not in self._whole:
            if self.kinds[node] is BatchDependence.SIZE:
                self._whole[node] = 1
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), self._evaluate)
                self._whole[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self._whole[node]

    def band(self, mask: fx.Node, places: range) -> Tensor | None:
        """Compute the rows of ``mask`` at ``places``; None if no rule tells how without what is too large."""
        self._band.clear()
        return self._rows(mask, _rank(mask) - 2, places)

    def _rows(self, node: fx.Node, dim: int, places: range) -> Tensor | None:
        key = node, dim, places
        if key not in self._band:
            self._band[key] = self._made(node, dim, places)
        return self._band[key]

    def _made(self, node: fx.Node, dim: int, places: range) -> Tensor | None:
        if self.most_elements(node) <= BAND_ELEMENTS:
            value: Tensor = self._evaluate(node)
            return value.narrow(dim, places.start, len(places))
        if node.target in (aten.tril.default, aten.triu.default) and dim == _rank(node) - 2:
            x = self._rows(node.args[0], dim, places)  # type: ignore[arg-type]
            return None if x is None else node.target(x, argument(node, "diagonal") + places.start)
        choice = self._choice(node, dim)
        if choice is None:
            found = self.whole(node)
            return None if found is None else found.narrow(dim, places.start, len(places))
        parts: list[Tensor | None] = []
        for source, need in zip(operands(node), choice.inputs, strict=True):
            cut = need.placement
            parts.append(
                self._rows(source, cut.dim, places) if isinstance(cut, Shard) else self.whole(source)
            )
        if any(part is None for part in parts):
            return None
        return self._called(node, [part for part in parts if part is not None], dim, len(places))

    def _choice(self, node: fx.Node, dim: int) -> Choice | None:
        """Return the rule by which the op makes a part along ``dim`` of parts, alone."""
        if (node, dim) not in self._rules:
            found = (c for c in choices(node) if c.outputs == (Shard(dim),) and not c.local and not c.divides)
            self._rules[node, dim] = next(found, None)
        return self._rules[node, dim]

    def _called(self, node: fx.Node, parts: list[Tensor], dim: int, count: int) -> Tensor:
        """Run the op on parts of its operands, with sizes for ``count`` elements along ``dim`` of the result."""
        args, kwargs = tuple(node.args), dict(node.kwargs)
        if node.target in SIZE_ARGUMENTS:
            name, new_sizes = SIZE_ARGUMENTS[node.target]
            sizes = _sizes(node)
            sizes[dim] = count
            taken = [tuple(part.shape) for part in parts]
            args, kwargs = replaced(node, args, kwargs, name, new_sizes(node, taken, tuple(sizes)))
        supply = iter(parts)

        def given(source: fx.Node) -> Any:
            return next(supply) if isinstance(source.meta.get("val"), Tensor) else self._evaluate(source)

        args, kwargs = fx.map_arg((args, kwargs), given)
        result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
        return result


def _kind(node: fx.Node, kinds: dict[fx.Node, BatchDependence]) -> BatchDependence:
    """Say how the node's result depends on the batch, given how its operands do."""
    if node.op != "call_function":
        return BatchDependence.OPEN
    if node.target is aten.sym_size.int:
        of_leaf = isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder"
        return BatchDependence.SIZE if of_leaf and node.args[1] == 0 else BatchDependence.OPEN
    target, read = node.target, [kinds[source] for source in node.all_input_nodes]
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), Tensor):
        return BatchDependence.OPEN
    if (
        BatchDependence.OPEN in read
        or target._schema.is_mutable
        or torch.Tag.nondeterministic_seeded in target.tags
    ):
        return BatchDependence.OPEN
    if all(kind is BatchDependence.FIXED for kind in read):
        return BatchDependence.FIXED
    if target is aten.arange.default or (target is aten.arange.start and node.args[0] == 0):
        return BatchDependence.NUMBERS
    if target is aten.expand.default:
        return _sized(node.args[1], kinds, kinds[node.args[0]])  # type: ignore[index]
    if target in _FILLED or target in _FILLED_LIKE:
        place = int(target in _FILLED_LIKE)
        filled = any(isinstance(value, fx.Node) for value in node.args[place + 1 :])
        return BatchDependence.OPEN if filled else _sized(node.args[place], kinds)
    if target is aten.index.Tensor:
        return _indexed(node, kinds)
    first = kinds[node.args[0]] if node.args and isinstance(node.args[0], fx.Node) else BatchDependence.OPEN
    if target is aten.unsqueeze.default:
        behind = int(node.args[1]) % _rank(node) >= 1  # type: ignore[arg-type]
        return first if behind else BatchDependence.OPEN
    if target in _COPIES:
        return first
    if BatchDependence.SIZE in read or BatchDependence.NUMBERS in read:
        return BatchDependence.OPEN
    if target in _ALONG_A_DIMENSION:
        dim = argument(node, "dim")
        fits = all(_rank(source) == _rank(node) for source in node.all_input_nodes)
        return BatchDependence.ALIKE if fits and int(dim) % _rank(node) >= 1 else BatchDependence.OPEN
    if torch.Tag.pointwise in target.tags or target in _UNTAGGED:
        fits = all(_spreads(source, kinds[source], _rank(node)) for source in node.all_input_nodes)
        return BatchDependence.ALIKE if fits else BatchDependence.OPEN
    return BatchDependence.OPEN


def _rank(node: fx.Node) -> int:
    return int(node.meta["val"].dim())


def _spreads(source: fx.Node, kind: BatchDependence, rank: int) -> bool:
    """Tell whether dimension 0 of a pointwise result with ``rank`` dimensions is the one of ``source``, or not in it."""
    if kind is BatchDependence.ALIKE:
        return _rank(source) == rank
    return _rank(source) < rank or source.meta["val"].shape[0] == 1


def _sized(
    sizes: Any, kinds: dict[fx.Node, BatchDependence], source: BatchDependence = BatchDependence.FIXED
) -> BatchDependence:
    """Say how a tensor of ``sizes``, which repeats something of kind ``source`` or one number, depends on the batch."""
    first, others = (sizes[0], sizes[1:]) if sizes else (None, ())
    if any(isinstance(size, fx.Node) for size in others):
        return BatchDependence.OPEN
    if isinstance(first, fx.Node):
        alike = kinds[first] is BatchDependence.SIZE and source in (
            BatchDependence.FIXED,
            BatchDependence.ALIKE,
        )
        return BatchDependence.ALIKE if alike else BatchDependence.OPEN
    if source is BatchDependence.FIXED:
        return BatchDependence.FIXED
    return BatchDependence.ALIKE if source is BatchDependence.ALIKE and first == -1 else BatchDependence.OPEN


def _indexed(node: fx.Node, kinds: dict[fx.Node, BatchDependence]) -> BatchDependence:
    """Say how ``source[numbers, columns]`` depends on the batch: each sample reads of its own part alone."""
    source, indices = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(indices, Sequence)
    first, *others = indices
    if (
        kinds[source] is not BatchDependence.ALIKE
        or not isinstance(first, fx.Node)
        or kinds[first] is not BatchDependence.NUMBERS
    ):
        return BatchDependence.OPEN
    columns = [n for n in others if isinstance(n, fx.Node) and kinds[n] is BatchDependence.FIXED]
    rank = _rank(first)
    fits = len(columns) == len(others) and all(_spreads(n, BatchDependence.FIXED, rank) for n in columns)
    return BatchDependence.ALIKE if fits else BatchDependence.OPEN
