"""Canonical sizes: every integer in the graph is computed from the shapes of batch inputs alone.

Before                                    After
    h = linear(x, w)                          size = sym_size(x, 0)
    size = sym_size(h, 0)                     double = size * 2
    y = reshape(h, [size * 2, -1])            y = reshape(h, [double, -1])

Every segment has the batch inputs' shapes at hand (or their symbols' numbers), so no integer is ever sent between
segments. Sizes that depend on the *data* (``nonzero``, ``.item()``) have no such form: an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from cost_models.errors import InternalError, ModelError
from passes.graph.nodes import copy_graph, drop_dead_code, is_size, new_module, where

aten = torch.ops.aten


def are_canonical(graph: fx.Graph, batch_inputs: Sequence[str]) -> bool:
    """Tell whether every integer is read off batch inputs alone. (Those that depend on data are not judged.)"""
    known = set(batch_inputs)
    return all(
        source.name in known or is_size(source.meta.get("val"))
        for node in graph.nodes
        if is_size(node.meta.get("val")) and not _data_dependent(node.meta["val"])
        for source in node.all_input_nodes
    )


def canonical_sizes(gm: fx.GraphModule, batch_inputs: Sequence[str]) -> fx.GraphModule:
    """Make a new module whose sizes depend only on ``sym_size`` of the placeholders named in ``batch_inputs``."""
    _refuse_data_dependent(gm.graph)
    graph = copy_graph(gm.graph)
    sizes = [node for node in graph.nodes if node.op == "call_function" and is_size(node.meta.get("val"))]
    if sizes:
        placeholders = graph.find_nodes(op="placeholder")
        with graph.inserting_after(placeholders[-1]):
            anchor = graph.call_function(torch.sym_not, (False,))  # marks the place; erased below
        builder = SizeBuilder(graph, anchor, _origins(placeholders, batch_inputs))
        for node in sizes:
            node.replace_all_uses_with(builder.build(node.meta["val"].node.expr, node))
            graph.erase_node(node)
        graph.erase_node(anchor)
        drop_dead_code(graph)
    return new_module(gm, graph)


def _origins(placeholders: Sequence[fx.Node], batch_inputs: Sequence[str]) -> dict[Any, tuple[fx.Node, int]]:
    """Find where each symbol's number can be read: the first batch input with a dimension of exactly that size."""
    wanted = set(batch_inputs)
    found: dict[Any, tuple[fx.Node, int]] = {}
    for node in placeholders:
        if node.name not in wanted or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found.setdefault(size.node.expr, (node, dim))
    return found


class _Nodes(PythonReferenceAnalysis):
    """Arithmetic that emits nodes where torch's own asks its operands with ``if``, or for methods that no proxy has."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def to_dtype(x: Any, dtype: torch.dtype) -> Any:
        return _call(torch.sym_float, x)

    @staticmethod
    def trunc_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _call(torch.sym_int, x)

    @staticmethod
    def floor_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _call(math.floor, x)

    @staticmethod
    def ceil_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _call(math.ceil, x)

    @staticmethod
    def round_to_int(a: Any, dtype: torch.dtype) -> Any:
        return _call(round, a)


def _call(function: Callable[[Any], Any], x: Any) -> Any:
    return (
        x.tracer.create_proxy("call_function", function, (x,), {}) if isinstance(x, fx.Proxy) else function(x)
    )


class SizeBuilder:
    """Emits the nodes of size expressions, each expression once."""

    def __init__(self, graph: fx.Graph, anchor: fx.Node, origins: Mapping[Any, tuple[fx.Node, int]]) -> None:
        self.graph, self.anchor, self.origins = graph, anchor, origins
        self.tracer = fx.proxy.GraphAppendingTracer(graph)
        self.built: dict[Any, Any] = {}
        self.symbols: dict[Any, fx.Proxy] = {}

    def build(self, expression: Any, like: fx.Node) -> Any:
        """Make the node of the expression, or return its number if it has no symbols."""
        if expression not in self.built:
            with self.graph.inserting_before(self.anchor):
                before = self.anchor.prev
                for symbol in sorted(expression.free_symbols, key=str):
                    self._read(symbol, like)
                result = self._interpreted(expression, like)
                self.give_values(before, like)
            self.built[expression] = result.node if isinstance(result, fx.Proxy) else result
        return self.built[expression]

    def _interpreted(self, expression: Any, like: fx.Node) -> Any:
        try:
            return sympy_interp(_Nodes, self.symbols, expression)
        except (fx.proxy.TraceError, TypeError, AttributeError, NotImplementedError) as error:
            raise ModelError(
                "a size of the model is computed in a way that a plan cannot write down",
                [f"{expression} at {where(like)}"],
                ["compute sizes in integers: n // 2, (n + 1) // 2, n * 3 // 2 instead of int(n * 1.5)"],
            ) from error

    def _read(self, symbol: Any, like: fx.Node) -> None:
        if symbol in self.symbols:
            return
        if symbol not in self.origins:
            raise InternalError(
                "a dynamic size cannot be read from any batch input",
                [f"size {symbol} of {where(like)}", f"batch inputs give {sorted(map(str, self.origins))}"],
            )
        source, dim = self.origins[symbol]
        self.symbols[symbol] = fx.Proxy(
            self.graph.call_function(aten.sym_size.int, (source, dim)), self.tracer
        )

    def give_values(self, before: fx.Node, like: fx.Node) -> None:
        """Set values and origin of the nodes that were just made. A shape carries where its own line is, ops do not."""
        node = before.next
        while node is not self.anchor:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta.update({k: v for k, v in like.meta.items() if k not in ("val", "tensor_meta")})
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
            node = node.next


def _refuse_data_dependent(graph: fx.Graph) -> None:
    """Raise for every op whose result has a size that depends on data."""
    problems: list[str] = []
    seen: set[Any] = set()
    for node in graph.nodes:
        symbols = _data_dependent(node.meta.get("val"))
        if symbols - seen:
            seen |= symbols
            problems.append(where(node))
    if problems:
        raise ModelError(
            "the model has sizes that depend on data, so no plan can know what they cost",
            problems,
            [
                "replace boolean indexing and nonzero() by torch.where or masked arithmetic",
                "replace .item() / .tolist() by tensor operations",
            ],
        )


def _data_dependent(value: Any) -> set[Any]:
    items = value if isinstance(value, list | tuple) else (value,)
    found: set[Any] = set()
    for item in items:
        if is_size(item) or (
            isinstance(item, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in item.shape)
        ):
            found |= free_unbacked_symbols(item)
    return found
