"""The ways in which the nodes of a graph depend on the batch: on what is in it, and on powers of its number of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloatTrueDiv, IntTrueDiv, ToFloat

from passes.graph.nodes import is_size, nodes_in, op_name, symbolic
from passes.trace.build import Converted
from runtime.segment.code import BatchSpec

aten = torch.ops.aten

SAME = {"alias", "clone", "contiguous", "detach", "positive", "to", "_to_copy"}
SHAPE = {"expand", "flatten", "reshape", "select", "squeeze", "unsqueeze", "view", "_unsafe_view"}
LINEAR = frozenset(SAME | SHAPE | {"neg", "add", "sub", "rsub", "stack", "cat", "mean", "sum", "lerp"})
"""Linear (or affine, with shares that sum to 1) in all of their floating-point inputs together."""

MADE_BY_SHAPE = frozenset(
    {
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
    }
)
"""Their results depend on their inputs' sizes only: ``loss = logits.new_zeros(())``."""


class Dependence:
    """The ways in which nodes depend on the batch.

    contents    nodes that depend on what is in the batch
    varying     these, and nodes that depend on its number of samples
    powers      the power of the number of samples that a value has as a factor; None if there is no such power
    """

    def __init__(self, traced: Converted, spec: BatchSpec) -> None:
        self.symbol = spec.batch_symbol
        self.nodes: Mapping[str, fx.Node] = {node.name: node for node in traced.module.graph.nodes}
        self.kinds = {i.node: (i.kind, i.name) for i in traced.inputs}
        self.contents, self.varying = set[fx.Node](), set[fx.Node]()
        self.powers: dict[fx.Node, int | None] = {}
        for node in self.nodes.values():
            self._add(node, spec)
            self.powers[node] = self._power(node)

    def counts_samples(self, node: fx.Node) -> bool:
        """Tell whether the tensor has an element (or more) per sample."""
        return any(self.symbol in sympy.sympify(size).free_symbols for size in sizes(node))

    def sample_dim(self, node: fx.Node) -> int | None:
        """Return the only dimension that the samples are in; None if there are more, or there is none."""
        dims = [d for d, size in enumerate(sizes(node)) if self.symbol in sympy.sympify(size).free_symbols]
        return dims[0] if len(dims) == 1 else None

    def _add(self, node: fx.Node, spec: BatchSpec) -> None:
        kind, name = self.kinds.get(node.name, ("", ""))
        value = node.meta.get("val")
        if is_size(value):
            if self.symbol in value.node.expr.free_symbols:
                self.varying.add(node)
        elif node.target in MADE_BY_SHAPE:
            if self.counts_samples(node):
                self.varying.add(node)
        elif node.op == "placeholder":
            if kind == "batch" and spec.batch_dims.get(name) is not None:
                self.contents.add(node)
                self.varying.add(node)
        else:
            for found in (self.contents, self.varying):
                if any(source in found for source in node.all_input_nodes):
                    found.add(node)

    def _power(self, node: fx.Node) -> int | None:
        value = node.meta.get("val")
        if is_size(value):
            return _power_of(value.node.expr, self.symbol)
        if not isinstance(node.target, torch._ops.OpOverload):
            sources = [self.powers[source] for source in node.all_input_nodes]
            return None if None in sources else 0
        given = list(map(self.powers.__getitem__, values(node)))
        if all(power == 0 for power in given):
            return 0
        name, first = op_name(node), given[0]  # some power is not 0, so there is one
        if None in given or first is None:
            return None
        if name == "mul":
            return sum(power for power in given if power is not None)
        if name in ("div", "true_divide") and not node.kwargs.get("rounding_mode"):
            above, below = ((self.powers[a] or 0) if isinstance(a, fx.Node) else 0 for a in node.args[:2])
            return above - below
        if name == "reciprocal":
            return -first
        return first if name in LINEAR and len(set(given)) == 1 else None


def ancestors(*nodes: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes, and everything that they are made of."""
    waiting, seen = list(nodes), set(nodes)
    while waiting:
        found = waiting.pop()
        yield found
        fresh = [s for s in found.all_input_nodes if s not in seen]
        seen.update(fresh)
        waiting += fresh


def values(node: fx.Node) -> list[fx.Node]:
    """List the inputs that the numbers of the result are made of: tensors, and sizes that are factors or summands."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return list(node.all_input_nodes)
    if op_name(node) == "arange":
        return []  # 0, 1, 2 … however many samples there are
    found = []
    for position, declared in enumerate(node.target._schema.arguments):
        given = node.kwargs.get(declared.name, node.args[position] if position < len(node.args) else None)
        takes_values = any(word in str(declared.type) for word in ("Tensor", "number", "Scalar", "float"))
        found += [source for source in nodes_in(given) if takes_values]
    return found


def _power_of(expression: Any, symbol: sympy.Symbol) -> int | None:
    """Return k where the expression is c · symbolᵏ; None where it is something else."""
    for made in (FloatTrueDiv, IntTrueDiv):
        expression = expression.replace(made, lambda above, below: above / below)
    expression = sympy.expand(expression.replace(ToFloat, lambda number: number))
    rest = expression.as_independent(symbol, as_Add=False)[1]
    base, power = rest.as_base_exp()
    if rest == 1:
        return 0
    return int(power) if base == symbol and power.is_Integer else None


def is_floating_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def sizes(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return tuple(map(symbolic, value.shape)) if isinstance(value, torch.Tensor) else ()


def elements(node: fx.Node) -> Any:
    """Number of elements: a number or an expression of the sizes."""
    return sympy.expand(sympy.prod(sizes(node)))
