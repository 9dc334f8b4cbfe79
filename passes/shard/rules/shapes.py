"""Operands of an op by argument name, and shapes in plain numbers: what rules ask for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import fx

from passes.graph.nodes import argument
from passes.shard.words import operands

FIRST_STAND_IN = 1_000_003
"""Stands for an open size. A large prime: products of sizes are equal iff their expressions are."""


def operand_names(node: fx.Node) -> tuple[str, ...]:
    """Return the schema's name of each of ``operands(node)``; the tensors of a list all have the list's name."""
    schema = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    given: list[tuple[str, Any]] = [
        (schema[i].name if i < len(schema) else str(i), value) for i, value in enumerate(node.args)
    ]
    return tuple(name for name, value in [*given, *node.kwargs.items()] for _ in _tensors(value))


def _tensors(value: object) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def shape(value: torch.Tensor) -> tuple[int, ...]:
    """Return the sizes; open ones as large primes, the same for the same symbol."""
    return tuple(size(s) for s in value.shape)


def size(value: int | torch.SymInt) -> int:
    """Return one size in plain numbers."""
    return _stand_in(value.node.expr) if isinstance(value, torch.SymInt) else int(value)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of the tensor that ``node`` produces."""
    return shape(node.meta["val"])


def operands_shapes(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Return the shape of each operand."""
    return tuple(shape_of(source) for source in operands(node))


def operand(node: fx.Node, name: str) -> fx.Node | None:
    """Return the tensor given for an argument, if any is."""
    value = argument(node, name)
    return value if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor) else None


def plain(value: Any) -> Any:
    """Return an argument with sizes (nodes) in plain numbers."""
    if isinstance(value, fx.Node):
        known = value.meta.get("val")
        return size(known) if isinstance(known, int | torch.SymInt) else value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


@lru_cache(maxsize=4096)
def _stand_in(expression: sympy.Expr) -> int:
    return int(expression.subs({symbol: _prime(symbol) for symbol in expression.free_symbols}))


@lru_cache(maxsize=256)
def _prime(symbol: sympy.Symbol) -> int:
    # The name's characters count, so that the number does not depend on which symbol was met first.
    return int(
        sympy.nextprime(FIRST_STAND_IN + sum(ord(c) * 131**i for i, c in enumerate(str(symbol))) % 10**6)
    )
