"""The fingerprint of a traced model: equal for equal computations, in every process and on every machine.

It covers the operations in order with their arguments, the shapes (with canonical symbols), dtypes,
parameter names, the contents of constants, and how micro-batches' losses are combined; not the batch size of
the example, what its masks show, weights, devices, or names of nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import sympy
import torch
from torch import fx

from passes.graph.graph import StateSpec
from passes.trace.build import Converted
from runtime.ops.opaque import Opaque

_NO_RESULT = ("device", "visible")
"""Arguments on which no number that is computed depends."""


def fingerprint(
    traced: Converted,
    state: Mapping[str, StateSpec],
    symbols: Iterable[sympy.Symbol],
    training: bool,
    loss_reduction: str,
) -> str:
    """Compute a SHA-256 in hexadecimal. ``symbols``: the graph's size symbols, in an order that the batch determines."""
    text = _Text(symbols)
    digest = hashlib.sha256(f"training={training} loss={loss_reduction}\n".encode())
    for _, spec in sorted(state.items()):
        digest.update(f"{spec.name}{spec.shape}{spec.dtype}{spec.requires_grad}{spec.persistent}\n".encode())
    stands_for = {i.node: f"{i.kind}:{i.name}" for i in traced.inputs}
    position: dict[str, int] = {}
    for index, node in enumerate(traced.module.graph.nodes):
        text.index[node] = position[node.name] = index
        if node.op == "output":
            continue
        target = node.target.text if isinstance(node.target, Opaque) else str(node.target)
        what = stands_for.get(node.name, target)
        arguments = [text.of(a) for a in node.args]
        arguments += [f"{k}={text.of(v)}" for k, v in sorted(node.kwargs.items()) if k not in _NO_RESULT]
        digest.update(f"{node.op} {what}({','.join(arguments)})->{text.of(node.meta.get('val'))}\n".encode())
    for output in traced.outputs:
        digest.update(f"{output.kind}:{output.name}={position[output.node]}\n".encode())
    for name, constant in sorted(traced.constants.items()):
        flat = constant.cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(f"{name}{tuple(constant.shape)}{constant.dtype}".encode() + flat.numpy().tobytes())
    return digest.hexdigest()


class _Text:
    """Arguments and values as text without object ids, node names or the exporter's symbol names."""

    def __init__(self, symbols: Iterable[sympy.Symbol]) -> None:
        self.index: dict[fx.Node, int] = {}
        self._canonical: dict[sympy.Basic, sympy.Symbol] = {
            s: sympy.Symbol(f"size{i}", integer=True, positive=True) for i, s in enumerate(symbols)
        }
        self._expressions: dict[sympy.Expr, str] = {}

    def of(self, value: object) -> str:
        handlers: list[tuple[type | tuple[type, ...], Callable[..., str]]] = [
            (fx.Node, lambda v: f"%{self.index[v]}"),
            (torch.Tensor, lambda v: f"{v.dtype}[{','.join(map(self.of, v.shape))}]"),
            ((torch.SymInt, torch.SymFloat, torch.SymBool), lambda v: self._expression(v.node.expr)),
            ((list, tuple), lambda v: f"({','.join(map(self.of, v))})"),
            (slice, lambda v: self.of((v.start, v.stop, v.step))),
            (dict, lambda v: self.of(sorted((str(k), self.of(item)) for k, item in v.items()))),
        ]
        for kind, text in handlers:
            if isinstance(value, kind):
                return text(value)
        return repr(value) if isinstance(value, str | int | float | complex | None) else str(value)

    def _expression(self, expression: sympy.Expr) -> str:
        if expression not in self._expressions:
            self._expressions[expression] = str(expression.xreplace(self._canonical))
        return self._expressions[expression]
