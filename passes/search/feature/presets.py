"""Known patterns of sharding, for any model: what each fixes on one mesh axis. The search plans the rest around it.

data         every op by samples, parameters whole                                           (data parallel)
zero1        data, with gradients and optimizer state split                                  (ZeRO-1)
zero3        data, with parameters split too, gathered at every use                          (ZeRO-3, FSDP)
column_row   products by columns, then by rows of their weights; none by samples, positions  (Megatron's tensor parallel)
sequence     column_row; norms, dropout, residual sums by positions                          (Megatron's sequence parallel)
vocabulary   embeddings by rows, the loss by classes; none by samples or positions

Told from the graph, not from names (``passes.search.feature.products``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

import torch

from cost_models.layout import Partial, Placement, Replicate, Shard
from passes.graph.graph import OpGraph, once_per_graph
from passes.search.feature.options import StoredChoice
from passes.search.feature.products import PRODUCTS, Products, Shapes, embedded, products_of, sizes_of
from passes.shard.rules.indexing import BAG_VOCABULARY, VOCABULARY
from passes.shard.rules.losses import CLASSES
from passes.shard.words import Choice, operands, short
from runtime.ops.bags import EMBEDDING_BAG
from runtime.ops.flex import ATTENTION

aten = torch.ops.aten

PRESETS = ("data", "zero1", "zero3", "column_row", "sequence", "vocabulary")

AxisPlacements = frozenset[Placement]


@dataclass(frozen=True)
class AxisRule:
    """The ways that are allowed of a node on one axis; None and "": anything.

    ``outputs``: its first output; how a parameter is stored. ``state``: where its gradient and optimizer state are.
    ``operand``: (position, ...) an operand that must be taken in parts. ``local``: its local form.
    ``essential``: what the pattern is about, not what follows from it. ``otherwise``: what is allowed where
    nothing of this is.
    """

    outputs: AxisPlacements | None = None
    state: AxisPlacements | None = None
    operand: int | None = None
    local: str = ""
    essential: bool = True
    otherwise: AxisRule | None = None

    def allows(self, choice: Choice) -> bool:
        """Tell whether a choice of an op or a batch leaf is allowed."""
        if self.outputs is not None and choice.outputs[0] not in self.outputs:
            return False
        if self.operand is not None and not isinstance(choice.inputs[self.operand].placement, Shard):
            return False
        return not self.local or choice.local == self.local

    def allows_stored(self, way: StoredChoice) -> bool:
        """Tell whether a way to store a parameter is allowed."""
        if self.outputs is not None and way.stored not in self.outputs:
            return False
        return self.state is None or way.state in self.state

    def __str__(self) -> str:
        parts = [_text(self.outputs), f"/{_text(self.state)}" if self.state is not None else ""]
        parts += [f"<{self.operand}" if self.operand is not None else "", self.local]
        parts += [f"|{self.otherwise}" if self.otherwise is not None else ""]
        return "".join(parts)


def refused_word(word: str) -> str:
    """Say why ``word`` is no layout on one axis."""
    if word in PRESETS:
        return f"{word!r} is a pattern, and stands beside other patterns only"
    if word == "zero2":
        return '\'zero2\': gradients are kept whole until the step\'s end: "zero1" splits what is summed, "zero3" all'
    near = "".join(f" (did you mean {preset!r}?)" for preset in get_close_matches(word, PRESETS, n=1))
    return f"{word!r} is not R, P, or S and a dimension, nor R/S and a dimension{near}"


@once_per_graph
def rules_of(graph: OpGraph, preset: str) -> Mapping[str, AxisRule]:
    """Node -> what ``preset`` fixes of it on an axis; computed once per graph."""
    makers: dict[str, Callable[[Shapes], Iterator[tuple[str, AxisRule]]]] = {
        "data": lambda shapes: _by_samples(shapes, _WHOLE),
        "zero1": lambda shapes: _by_samples(shapes, _SPLIT_STATE),
        "zero3": lambda shapes: _by_samples(shapes, _SPLIT),
        "column_row": _column_row,
        "sequence": _sequence,
        "vocabulary": _vocabulary,
    }
    return dict(makers[preset](Shapes(graph)))


_BY_ROWS: Mapping[object, str] = {aten.embedding.default: VOCABULARY, EMBEDDING_BAG: BAG_VOCABULARY}
_ANY_PART: AxisPlacements = frozenset(Shard(d) for d in range(8))
_REPLICATED: AxisPlacements = frozenset({Replicate()})
_NOT_SAMPLES: AxisPlacements = frozenset({Replicate(), *(Shard(d) for d in range(1, 8))})
_WHOLE = AxisRule(_REPLICATED, _REPLICATED, essential=False)
_SPLIT_STATE = AxisRule(_REPLICATED, _ANY_PART)
_SPLIT = AxisRule(_ANY_PART)

_MOVES_DIMS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.transpose.int,
        aten.permute.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        *ATTENTION,
    }
)


def _by_samples(shapes: Shapes, parameters: AxisRule) -> Iterator[tuple[str, AxisRule]]:
    whole = parameters.outputs == parameters.state == _REPLICATED
    for given in shapes.graph.inputs:
        if given.kind == "parameter":
            yield given.node, parameters
        dim = shapes.graph.batch.batch_dims.get(given.name) if given.kind == "batch" else None
        if dim is not None:
            yield given.node, AxisRule(frozenset({Shard(dim)}), essential=whole)
    for node in shapes.ops:
        if dims := shapes.samples(node):
            yield node.name, AxisRule(frozenset(Shard(d) for d in dims), essential=False)


def _no_rows(shapes: Shapes, inside: Collection[str] = ()) -> Iterator[tuple[str, AxisRule]]:
    """Leaves arrive whole, no op by samples or positions. ``inside`` blocks not by samples only, where positions may be on
    the way from parts of a product of q, k and v together to heads; attention by heads."""
    for given in shapes.graph.inputs:
        if given.kind == "batch":
            yield given.node, AxisRule(_REPLICATED, essential=False)
    for node in shapes.ops:
        if not (rows := shapes.rows(node)):
            continue
        if node.name in inside and node.target in ATTENTION:
            yield (
                node.name,
                AxisRule(frozenset({Shard(1)}), essential=False, otherwise=AxisRule(_NOT_SAMPLES)),
            )
            continue
        kept = shapes.samples(node) if node.name in inside else rows
        dims = frozenset(Shard(d) for d in range(len(sizes_of(node))) if d not in kept)
        yield node.name, AxisRule(_REPLICATED | {Partial()} | dims, essential=False)


def _column_row(shapes: Shapes) -> Iterator[tuple[str, AxisRule]]:
    products = products_of(shapes)
    yield from _no_rows(shapes, products.inside)
    yield from _products(shapes, products)


def _products(shapes: Shapes, products: Products) -> Iterator[tuple[str, AxisRule]]:
    """Yield the rules where weights are read: by columns, then by rows; convolutions and products of many matrices one way
    or the other."""
    for node in shapes.ops:
        if node.name in products.alone or not (found := shapes.weight(node)):
            continue
        position, parameter = found
        in_parts = AxisRule(operand=position)
        last: AxisPlacements = frozenset({Shard(len(sizes_of(node)) - 1)})
        if node.name in products.heads:
            yield node.name, replace(in_parts, outputs=last, otherwise=AxisRule(_REPLICATED))
            continue
        if node.name in products.rows:
            yield node.name, replace(in_parts, outputs=frozenset({Partial()}), otherwise=in_parts)
        elif node.name in products.columns:
            yield node.name, replace(in_parts, outputs=last, otherwise=in_parts)
        else:
            yield node.name, in_parts
        yield parameter.name, AxisRule(_ANY_PART, essential=False)


def _sequence(shapes: Shapes) -> Iterator[tuple[str, AxisRule]]:
    """Embeddings and their sums are free: by positions, the gradients of whole tables would have to be summed."""
    products = products_of(shapes)
    start = embedded(shapes)
    for name, rule in (*_no_rows(shapes, products.inside), *_products(shapes, products)):
        if name not in products.alone | start:
            yield name, replace(rule, essential=False)
    for node in shapes.ops:
        shape = sizes_of(node)
        if (
            len(shape) == 3
            and shapes.samples(node) == (0,)
            and shape[1] in shapes.positions
            and shape[2] in (*shapes.widths, 1)
            and node.target not in PRODUCTS | _MOVES_DIMS
            and node.name not in products.inside | start
        ):
            yield node.name, AxisRule(frozenset({Shard(1)}))


def _vocabulary(shapes: Shapes) -> Iterator[tuple[str, AxisRule]]:
    yield from _no_rows(shapes)
    for node in shapes.ops:
        if node.target in _BY_ROWS:
            yield node.name, AxisRule(local=_BY_ROWS[node.target])
            if (table := operands(node)[0]).name in shapes.parameters:
                yield table.name, AxisRule(frozenset({Shard(0)}), essential=False)
        elif node.target is aten.cross_entropy_loss.default:
            yield node.name, AxisRule(local=CLASSES)
            product = operands(node)[0]
            while product.target not in PRODUCTS and len(operands(product)) == 1:
                product = operands(product)[0]
            if found := shapes.weight(product):
                made = Shard(1 if "conv" in str(product.target) else len(sizes_of(product)) - 1)
                yield product.name, AxisRule(frozenset({made}), operand=found[0], essential=False)
                yield found[1].name, AxisRule(_ANY_PART, essential=False)


def _text(layouts: AxisPlacements | None) -> str:
    return "*" if layouts is None else "+".join(sorted(map(short, layouts)))
