"""Sizes on one rank of a mesh: of the tensors that an op takes and makes, and of the numbers among its arguments.

    mesh of 2, x sharded along its batch         h = view(x, [4·b, 8])        h = view(x, [4·u, 8])

The batch's symbol b becomes ``unit``·u: u is the least that a rank may have in a micro-batch, and every local size is a
multiple of it, so nothing is ever divided at run time. In the local graph the same symbol stands for u.

Sizes with divisions and remainders by numbers are straight lines in u once the unit is a multiple of these:

    b - b % 2, with b = 2·u                      2·u          halves of it: b = 4·u
    (b + 1) // 2                                 u            halves of it: b = 4·u
    b // 3 + 1                                   u + 1        nothing ensures halves
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from cost_models.errors import InternalError
from cost_models.layout import Shard
from passes.graph.nodes import argument
from passes.shard.words import FeaturePlacement, Placements
from runtime.segment.code import Dim

aten = torch.ops.aten
Shape: TypeAlias = tuple[Dim, ...]


def ways(placements: Placements, dim: int, rank: int, mesh_shape: Sequence[int]) -> int:
    """Count the parts that a dimension of a tensor of ``rank`` dimensions is cut into."""
    return math.prod(
        size
        for placement, size in zip(placements, mesh_shape, strict=True)
        if isinstance(placement, Shard) and placement.dim % rank == dim
    )


def sizes_of(value: torch.Tensor) -> Shape:
    """Return the shape in numbers and expressions."""
    sizes: tuple[Any, ...] = tuple(value.shape)
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)


@dataclass(frozen=True)
class LocalSizes:
    """``symbol``: the batch's. ``known``: a SymInt for each symbol."""

    symbol: sympy.Symbol
    unit: int
    mesh_shape: tuple[int, ...]
    known: Mapping[sympy.Symbol, torch.SymInt]
    _local: dict[tuple[Shape, Placements], Shape] = field(default_factory=dict, repr=False)

    def scaled(self, size: Any) -> Dim:
        """Express a size of the whole graph in u."""
        if isinstance(size, int | float | bool):
            return size  # other numbers among arguments
        expression = size if isinstance(size, sympy.Basic) else size.node.expr
        expression = expression.subs(self.symbol, self.unit * self.symbol)
        return int(expression) if expression.is_Integer else expression

    def local(self, value: torch.Tensor, placements: Placements) -> Shape:
        """Return the shape of a rank's part."""
        key = (sizes_of(value), placements)
        if key not in self._local:
            self._local[key] = self._part(*key)
        return self._local[key]

    def _part(self, shape: Shape, placements: Placements) -> Shape:
        found: list[Dim] = []
        for dim, size in enumerate(shape):
            parts = ways(placements, dim, len(shape), self.mesh_shape)
            line = None if parts == 1 else _line(size, self.unit, self.symbol)
            whole = self.scaled(size) if line is None else line[0] * self.symbol + line[1]
            part = whole // parts if isinstance(whole, int) else whole / parts
            if isinstance(whole, int) and whole % parts:
                raise InternalError(
                    "shard a tensor", [f"dimension {dim} of {shape} does not divide by {parts}"]
                )
            found.append(part)
        return tuple(found)

    def number(self, size: Dim) -> int | torch.SymInt:
        """Turn a size into what fake tensors take."""
        if isinstance(size, int):
            return size
        value: int | torch.SymInt = sympy_interp(PythonReferenceAnalysis, dict(self.known), size)
        return value


def local_sizes(
    placement: FeaturePlacement,
    symbol: sympy.Symbol,
    tensors: Iterable[tuple[torch.Tensor, Placements]],
    known: Mapping[sympy.Symbol, torch.SymInt],
    unit: int = 1,
) -> LocalSizes:
    """Find sizes such that each of ``tensors`` can be sharded as it says: the least multiple of ``unit`` for that."""
    shape = placement.mesh.shape
    for sizes, placements in dict.fromkeys((sizes_of(value), placements) for value, placements in tensors):
        for dim, size in enumerate(sizes):
            parts = ways(placements, dim, len(sizes), shape)
            if parts == 1 or isinstance(size, int):
                continue
            needed = least_unit(size, parts, symbol)
            if needed is None:
                raise InternalError(
                    "shard a tensor", [f"dimension {dim}, of size {size}, may not divide by {parts}"]
                )
            unit = math.lcm(unit, needed)
    return LocalSizes(symbol, unit, shape, known)


def least_unit(size: Dim, parts: int, symbol: sympy.Symbol) -> int | None:
    """Find what the batch's symbol must be a multiple of for ``size`` to divide by ``parts``; None: nothing ensures it."""
    if isinstance(size, int):
        return 1 if size % parts == 0 else None
    count, rest = sympy.expand(size).as_coeff_Mul()
    if symbol in rest.free_symbols and (rest / symbol).is_polynomial(symbol):
        return parts // math.gcd(int(count), parts)
    if int(count) % parts == 0:
        return 1
    period = _period(size, symbol) or 1
    line = _line(size, period, symbol)
    if line is None or line[1] % parts:
        return None
    return period * (parts // math.gcd(line[0], parts))


@cache
def splits_into(size: Dim, parts: int, symbol: sympy.Symbol, samples: int) -> bool:
    """Tell whether ``parts`` ranks may share ``size``, of a micro-batch of ``samples`` and of all multiples of it."""
    needed = least_unit(size, parts, symbol)
    return needed is not None and samples % needed == 0


def _line(size: Dim, unit: int, symbol: sympy.Symbol) -> tuple[int, int] | None:
    """Write ``size`` as a·u + c, the symbol being ``unit``·u; None if it is no such line."""
    if isinstance(size, int) or size.free_symbols != {symbol}:
        return None
    period = _period(size, symbol)
    if period is None or unit % period:
        return None
    first, second = (int(size.subs(symbol, unit * u)) for u in (1, 2))
    return second - first, 2 * first - second


def _period(size: sympy.Expr, symbol: sympy.Symbol) -> int | None:
    """Find a number of whose multiples ``size`` is linear in the symbol; None if none is known."""
    if symbol not in size.free_symbols:
        return 1 if size.is_Integer else None
    if size == symbol:
        return 1
    if isinstance(size, sympy.Mul):
        open_factors = [factor for factor in size.args if not factor.is_Integer]
        return _period(open_factors[0], symbol) if len(open_factors) == 1 else None
    if isinstance(size, sympy.Add):
        periods = [_period(term, symbol) for term in size.args]
        return None if None in periods else math.lcm(*(p for p in periods if p is not None))
    if isinstance(size, FloorDiv | Mod | PythonMod) and size.args[1].is_Integer:
        inner = _period(size.args[0], symbol)
        return None if inner is None else inner * abs(int(size.args[1]))
    return None


# ----------------------------------------------------------------------------------------------------------
# Sizes among the arguments of ops.

NewSizes: TypeAlias = Callable[[fx.Node, Sequence[Shape], Shape], list[Dim]]
"""(op, local shapes of its operands, local shape of its output) -> the sizes it is given."""


def _output(node: fx.Node, taken: Sequence[Shape], made: Shape) -> list[Dim]:
    return list(made)


def _unflattened(node: fx.Node, taken: Sequence[Shape], made: Shape) -> list[Dim]:
    dim = argument(node, "dim") % len(taken[0])
    return list(made[dim : dim + len(argument(node, "sizes"))])


def _repeats(node: fx.Node, taken: Sequence[Shape], made: Shape) -> list[Dim]:
    """Count a rank's repetitions: only new dimensions and those of size 1 are sharded, by repeating them fewer times."""
    old: list[Dim] = [*(1 for _ in range(len(made) - len(taken[0]))), *taken[0]]
    return [_times(after, before) for before, after in zip(old, made, strict=True)]


def _times(after: Dim, before: Dim) -> Dim:
    if before == 0:
        return 1  # repeated as often as you like, it stays empty
    times = sympy.sympify(after) / sympy.sympify(before)
    return int(times) if times.is_Integer else times


SIZE_ARGUMENTS: Mapping[object, tuple[str, NewSizes]] = {
    **dict.fromkeys(
        (
            aten.view.default,
            aten._unsafe_view.default,
            aten.expand.default,
            aten.broadcast_to.default,
            aten.zeros.default,
            aten.ones.default,
            aten.full.default,
            aten.empty.memory_format,
            aten.new_zeros.default,
            aten.new_ones.default,
            aten.new_full.default,
            aten.new_empty.default,
            aten.rand.default,
            aten.randn.default,
        ),
        ("size", _output),
    ),
    aten.reshape.default: ("shape", _output),
    aten.unflatten.int: ("sizes", _unflattened),
    aten.repeat.default: ("repeats", _repeats),
    aten.tile.default: ("dims", _repeats),
}
"""The argument that holds sizes of the op's output. Rules keep whole what other ops' numbers speak about."""

COUNTS = ("groups", "num_groups")
"""Arguments that count what a sharded dimension consists of (``Choice.divides``)."""
