"""Dimensions of a graph's values that count samples and positions, and its products that go by columns or by rows.

Told from the graph, not from names: a weight matrix is a parameter of two or more dimensions that a product or convolution
reads, positions are the dimension after the samples' where tokens are embedded, normalized or multiplied.

    residual sum ─► norm ─► q, k, v ─► attention ─► output ─► residual sum ─► norm ─► up ─► gelu ─► down ─► residual sum
                            columns                 rows                             columns       rows
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from passes.graph.graph import OpGraph, tensor_specs
from passes.search.feature.graph import makes_values
from passes.shard.words import operands

aten = torch.ops.aten

PRODUCTS = frozenset(
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
NORMS = frozenset({aten.layer_norm.default, aten.rms_norm.default})

VIEWS = frozenset(
    {aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten.reshape.default}
)


class Shapes:
    """The dimensions of a graph's values that count samples, and those that count positions."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.symbol = graph.batch.batch_symbol
        self.parameters = {given.node for given in graph.inputs if given.kind == "parameter"}
        self.ops = [node for node in graph.ops if makes_values(node)]
        spans = [n for n in self.ops if n.target in (*PRODUCTS, *NORMS, aten.embedding.default)]
        shapes = [sizes_of(n) for n in spans]
        self.positions = {
            shape[1]
            for node, shape in zip(spans, shapes, strict=True)
            if len(shape) == 3 and self.samples(node) == (0,) and shape[1]
        }
        self.widths = {
            shape[-1]
            for node, shape in zip(spans, shapes, strict=True)
            if node.target not in PRODUCTS and len(shape) == 3
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
        shape = sizes_of(node)
        found = set(self.samples(node))
        if not found:
            return found
        width = len(shape) - 1 if len(shape) == 3 else None
        return found | {d for d in range(1, len(shape)) if shape[d] in self.positions and d != width}

    def weight(self, node: fx.Node) -> tuple[int, fx.Node] | None:
        """(operand, parameter) where an op reads a weight matrix, itself or a view of it."""
        if node.target not in PRODUCTS:
            return None
        for position, source in enumerate(operands(node)):
            origin = source
            while origin.op == "call_function" and len(operands(origin)) == 1 and origin.target in VIEWS:
                origin = operands(origin)[0]
            if origin.name in self.parameters and len(sizes_of(origin)) > 1:
                return position, origin
        return None


_MATRIX = frozenset({aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default})
"""Products that may go by columns and rows."""

_PASSES_ON = frozenset(
    {
        aten.add.Tensor,
        aten.add_.Tensor,
        aten.dropout.default,
        aten.to.dtype,
        aten.mul.Tensor,
        aten._to_copy.default,
    }
)


@dataclass(frozen=True)
class Products:
    """Names of ops. ``rows``: read what ``columns`` made, with nothing between that needs it whole. ``heads``: columns, of
    which no other product reads what they made: a vocabulary, classes. ``alone``: no product goes on by rows with what they
    make, such as a router's. ``inside``: between columns and rows."""

    columns: frozenset[str]
    rows: frozenset[str]
    heads: frozenset[str]
    alone: frozenset[str]
    inside: frozenset[str]


def products_of(shapes: Shapes) -> Products:
    """Every product of one weight matrix. Walks back end at norms and residual sums, so that all together are O(ops)."""
    weights = {node.name: found for node in shapes.ops if (found := shapes.weight(node))}
    columns: list[str] = []
    rows, inside, paired = set[str](), set[str](), set[str]()
    for node in shapes.ops:
        if node.name not in weights:
            continue
        sources = [s for i, s in enumerate(operands(node)) if i != weights[node.name][0]]
        met, between = _walk(shapes, sources, weights)
        if node.target not in _MATRIX:
            continue
        if pairs := met & set(columns):
            rows.add(node.name)
            inside |= between
            paired |= pairs
        else:
            columns.append(node.name)
    heads = frozenset(columns) - _before(shapes.graph.nodes[name] for name in weights)
    alone = frozenset(columns) - paired - heads
    return Products(frozenset(columns) - alone, frozenset(rows), heads, alone, frozenset(inside))


def _walk(
    shapes: Shapes, sources: Iterable[fx.Node], weights: Mapping[str, tuple[int, fx.Node]]
) -> tuple[set[str], set[str]]:
    """(products met, other ops passed) on the way back from ``sources``, as far as nothing is needed whole."""
    met, passed = set[str](), set[str]()
    waiting = list(sources)
    while waiting:
        node = waiting.pop()
        if node.op != "call_function" or node.name in passed:
            continue
        if node.name in weights:
            met.add(node.name)
        elif not _needs_whole(shapes, node):
            passed.add(node.name)
            waiting += node.all_input_nodes
    return met, passed


def _before(nodes: Iterable[fx.Node]) -> frozenset[str]:
    """All ops that ``nodes`` are computed from."""
    found = set[str]()
    waiting = [source for node in nodes for source in node.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and node.name not in found:
            found.add(node.name)
            waiting += node.all_input_nodes
    return frozenset(found)


def embedded(shapes: Shapes) -> frozenset[str]:
    """Embeddings, their sums, casts and dropout, up to the first op that does more with them."""
    found = set[str]()
    for node in shapes.ops:
        sources = [s for s in operands(node) if s.op == "call_function"]
        if node.target is aten.embedding.default or (
            node.target in _PASSES_ON and sources and all(s.name in found for s in sources)
        ):
            found.add(node.name)
    return frozenset(found)


def _needs_whole(shapes: Shapes, node: fx.Node) -> bool:
    """Norms, embeddings, and sums of two activations of up to three dimensions: where residuals join."""
    if node.target in (*NORMS, aten.embedding.default):
        return True
    if node.target not in (aten.add.Tensor, aten.add_.Tensor) or len(sizes_of(node)) > 3:
        return False
    sources = operands(node)
    return len(sources) == 2 and all(s.op == "call_function" and shapes.samples(s) for s in sources)


def sizes_of(node: fx.Node) -> tuple[int, ...]:
    """Sizes of the first value; 0 where a size depends on the batch."""
    return tuple(0 if isinstance(dim, sympy.Basic) else int(dim) for dim in tensor_specs(node)[0].shape)
