"""Known patterns of sharding, for any model: what each fixes on one mesh axis. The search plans the rest around it.

data         every op by samples, parameters whole                                           (data parallel)
zero1        data, with gradients and optimizer state split                                  (ZeRO-1)
zero3        data, with parameters split too, gathered at every use                          (ZeRO-3, FSDP)
column_row   ops that read a weight matrix take a part of it, none by samples or positions   (Megatron's tensor parallel)
sequence     column_row, and what is between those products by positions                     (Megatron's sequence parallel)
vocabulary   embeddings by rows, the loss by classes; none by samples or positions

Told from the graph, not from names: a weight matrix is a parameter of two or more dimensions that a product or convolution
reads, positions are the dimension after the samples' where tokens are embedded, normalized or multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from cost_models.layout import Partial, Placement, Replicate, Shard
from passes.feature_graph import makes_values
from passes.feature_options import StoredChoice
from passes.graph import OpGraph, tensor_specs
from passes.shard_rules.indexing import VOCABULARY
from passes.shard_rules.losses import CLASSES
from passes.sharding import Choice, operands, short

aten = torch.ops.aten

PRESETS = ("data", "zero1", "zero3", "column_row", "sequence", "vocabulary")

Layouts = frozenset[Placement]


@dataclass(frozen=True)
class Rule:
    """What is allowed of a node on one axis; None and "": anything.

    ``outputs``: its first output; how a parameter is stored. ``state``: where its gradient and optimizer state are.
    ``operand``: (position, ...) an operand that must be taken in parts. ``local``: its local form.
    ``essential``: what the pattern is about, not what follows from it.
    """

    outputs: Layouts | None = None
    state: Layouts | None = None
    operand: int | None = None
    local: str = ""
    essential: bool = True

    def allows(self, choice: Choice) -> bool:
        """Of an op or a batch leaf."""
        if self.outputs is not None and choice.outputs[0] not in self.outputs:
            return False
        if self.operand is not None and not isinstance(choice.inputs[self.operand].placement, Shard):
            return False
        return not self.local or choice.local == self.local

    def allows_stored(self, way: StoredChoice) -> bool:
        """Of a parameter."""
        if self.outputs is not None and way.stored not in self.outputs:
            return False
        return self.state is None or way.state in self.state

    def __str__(self) -> str:
        parts = [_text(self.outputs), f"/{_text(self.state)}" if self.state is not None else ""]
        parts += [f"<{self.operand}" if self.operand is not None else "", self.local]
        return "".join(parts)


def refused_word(word: str) -> str:
    """Why ``word`` is no layout on one axis."""
    if word in PRESETS:
        return f"{word!r} is a pattern, and stands beside other patterns only"
    if word == "zero2":
        return '\'zero2\': gradients are kept whole until the step\'s end: "zero1" splits what is summed, "zero3" all'
    return f"{word!r} is not R, P, or S and a dimension, nor R/S and a dimension"


def rules_of(graph: OpGraph, preset: str) -> Mapping[str, Rule]:
    """Node -> what ``preset`` fixes of it on an axis; computed once per graph."""
    key = ("preset", preset)
    if key not in graph.memo:
        makers: dict[str, Callable[[_Shapes], Iterator[tuple[str, Rule]]]] = {
            "data": lambda shapes: _by_samples(shapes, _WHOLE),
            "zero1": lambda shapes: _by_samples(shapes, _SPLIT_STATE),
            "zero3": lambda shapes: _by_samples(shapes, _SPLIT),
            "column_row": _column_row,
            "sequence": _sequence,
            "vocabulary": _vocabulary,
        }
        graph.memo[key] = dict(makers[preset](_Shapes(graph)))
    found = graph.memo[key]
    assert isinstance(found, dict)
    return found


_ANY_PART: Layouts = frozenset(Shard(d) for d in range(8))
_REPLICATED: Layouts = frozenset({Replicate()})
_WHOLE = Rule(_REPLICATED, _REPLICATED, essential=False)
_SPLIT_STATE = Rule(_REPLICATED, _ANY_PART)
_SPLIT = Rule(_ANY_PART)

_PRODUCTS = frozenset(
    {
        aten.linear.default,
        aten.addmm.default,
        aten.mm.default,
        aten.matmul.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.conv1d.default,
        aten.conv2d.default,
        aten.conv3d.default,
        aten.conv_transpose1d.default,
        aten.conv_transpose2d.input,
        aten.convolution.default,
        aten.einsum.default,
    }
)
_NORMS = frozenset({aten.layer_norm.default, aten.rms_norm.default})
_MOVES_DIMS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.transpose.int,
        aten.permute.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.scaled_dot_product_attention.default,
    }
)


class _Shapes:
    """Which dimensions of a graph's values count samples, and which positions."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.symbol = graph.batch.batch_symbol
        self.parameters = {given.node for given in graph.inputs if given.kind == "parameter"}
        self.ops = [node for node in graph.ops if makes_values(node)]
        spans = [n for n in self.ops if n.target in (*_PRODUCTS, *_NORMS, aten.embedding.default)]
        shapes = [_sizes(n) for n in spans]
        self.positions = {
            shape[1]
            for node, shape in zip(spans, shapes, strict=True)
            if len(shape) == 3 and self.samples(node) == (0,) and shape[1]
        }
        self.widths = {
            shape[-1]
            for node, shape in zip(spans, shapes, strict=True)
            if node.target not in _PRODUCTS and len(shape) == 3
        }

    def samples(self, node: fx.Node) -> tuple[int, ...]:
        """Dimensions of a node's first value that count samples."""
        shape = tensor_specs(node)[0].shape
        return tuple(
            dim
            for dim, size in enumerate(shape)
            if isinstance(size, sympy.Basic) and self.symbol in size.free_symbols
        )

    def rows(self, node: fx.Node) -> set[int]:
        """Dimensions that count samples or positions."""
        shape = _sizes(node)
        found = set(self.samples(node))
        if not found:
            return found
        width = len(shape) - 1 if len(shape) == 3 else None
        return found | {d for d in range(1, len(shape)) if shape[d] in self.positions and d != width}

    def weight(self, node: fx.Node) -> tuple[int, fx.Node] | None:
        """(operand, parameter) where an op reads a weight matrix, itself or a view of it."""
        if node.target not in _PRODUCTS:
            return None
        for position, source in enumerate(operands(node)):
            origin = source
            while origin.op == "call_function" and len(operands(origin)) == 1 and origin.target in _VIEWS:
                origin = operands(origin)[0]
            if origin.name in self.parameters and len(_sizes(origin)) > 1:
                return position, origin
        return None


_VIEWS = frozenset({aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default})


def _by_samples(shapes: _Shapes, parameters: Rule) -> Iterator[tuple[str, Rule]]:
    whole = parameters.outputs == parameters.state == _REPLICATED
    for given in shapes.graph.inputs:
        if given.kind == "parameter":
            yield given.node, parameters
        dim = shapes.graph.batch.batch_dims.get(given.name) if given.kind == "batch" else None
        if dim is not None:
            yield given.node, Rule(frozenset({Shard(dim)}), essential=whole)
    for node in shapes.ops:
        if dims := shapes.samples(node):
            yield node.name, Rule(frozenset(Shard(d) for d in dims), essential=False)


def _no_rows(shapes: _Shapes) -> Iterator[tuple[str, Rule]]:
    """Leaves arrive whole, no op by samples or positions."""
    for given in shapes.graph.inputs:
        if given.kind == "batch":
            yield given.node, Rule(_REPLICATED, essential=False)
    for node in shapes.ops:
        if rows := shapes.rows(node):
            dims = frozenset(Shard(d) for d in range(len(_sizes(node))) if d not in rows)
            yield node.name, Rule(_REPLICATED | {Partial()} | dims, essential=False)


def _column_row(shapes: _Shapes) -> Iterator[tuple[str, Rule]]:
    yield from _no_rows(shapes)
    for node in shapes.ops:
        if found := shapes.weight(node):
            position, parameter = found
            yield node.name, Rule(operand=position)
            yield parameter.name, Rule(_ANY_PART, essential=False)


def _sequence(shapes: _Shapes) -> Iterator[tuple[str, Rule]]:
    for name, rule in _column_row(shapes):
        yield name, Rule(rule.outputs, rule.state, rule.operand, essential=False)
    for node in shapes.ops:
        shape = _sizes(node)
        if (
            len(shape) == 3
            and shapes.samples(node) == (0,)
            and shape[1] in shapes.positions
            and shape[2] in (*shapes.widths, 1)
            and node.target not in _PRODUCTS | _MOVES_DIMS
        ):
            yield node.name, Rule(frozenset({Shard(1)}))


def _vocabulary(shapes: _Shapes) -> Iterator[tuple[str, Rule]]:
    yield from _no_rows(shapes)
    for node in shapes.ops:
        if node.target is aten.embedding.default:
            yield node.name, Rule(local=VOCABULARY)
            if (table := operands(node)[0]).name in shapes.parameters:
                yield table.name, Rule(frozenset({Shard(0)}), essential=False)
        elif node.target is aten.cross_entropy_loss.default:
            yield node.name, Rule(local=CLASSES)
            product = operands(node)[0]
            while product.target not in _PRODUCTS and len(operands(product)) == 1:
                product = operands(product)[0]
            if found := shapes.weight(product):
                made = Shard(1 if "conv" in str(product.target) else len(_sizes(product)) - 1)
                yield product.name, Rule(frozenset({made}), operand=found[0], essential=False)
                yield found[1].name, Rule(_ANY_PART, essential=False)


def _sizes(node: fx.Node) -> tuple[int, ...]:
    """Of the first value; 0 where a size depends on the batch."""
    return tuple(0 if isinstance(dim, sympy.Basic) else int(dim) for dim in tensor_specs(node)[0].shape)


def _text(layouts: Layouts | None) -> str:
    return "*" if layouts is None else "+".join(sorted(map(short, layouts)))
