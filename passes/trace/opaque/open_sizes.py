"""The open sizes of a part's inputs as the variables of its op, and its results' sizes as polynomials of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import sympy
import torch
from torch import Tensor, nn

from passes.graph.nodes import symbolic
from passes.graph.signatures import concrete
from passes.trace.opaque.code import checked_argument
from passes.trace.opaque.sizes import Observed, Point, UnfitError, fit, points
from runtime.ops.opaque import OpaqueResult, OpaqueSize, SizeVariable


@dataclass(frozen=True)
class OpenSizes:
    """The symbols in the inputs' sizes, in groups that are equal: where each is read, and its number in the example."""

    groups: tuple[tuple[sympy.Symbol, ...], ...]
    read: Mapping[sympy.Symbol, SizeVariable]
    numbers: Mapping[sympy.Symbol, int]

    @property
    def base(self) -> Point:
        return tuple(self.numbers[first] for first, *_ in self.groups)

    @property
    def variables(self) -> tuple[SizeVariable, ...]:
        return tuple(self.read[first] for first, *_ in self.groups)

    @property
    def joined(self) -> OpenSizes:
        """The same with symbols of one number taken for one: every leaf of a batch has a symbol of its own at first."""
        by_number: dict[int, list[sympy.Symbol]] = {}
        for group in self.groups:
            by_number.setdefault(self.numbers[group[0]], []).extend(group)
        return OpenSizes(tuple(map(tuple, by_number.values())), self.read, self.numbers)

    def join(self, given: Sequence[Tensor]) -> None:
        """Tell the trace which symbols are one."""
        for first, *others in self.groups:
            for other in others:
                one, two = self._size(given, first), self._size(given, other)
                torch._check(one == two)  # type: ignore[no-untyped-call]

    def shapes(self, given: Sequence[Tensor], point: Point) -> list[list[int]]:
        """Return the inputs' shapes at a point."""
        sizes = self._at(point)
        return [[concrete(symbolic(d), sizes) for d in tensor.shape] for tensor in given]

    def polynomial(self, number: Any) -> OpaqueSize:
        """Return a size of the inputs, or a number that follows from them, as a polynomial of the variables."""
        expression = sympy.sympify(symbolic(number))
        if not expression.free_symbols <= self.read.keys():
            raise UnfitError(
                f"it is given the number {expression}, which the sizes of its tensors do not tell"
            )
        return fit({point: int(expression.subs(self._at(point))) for point in points(self.base)}, self.base)

    def _at(self, point: Point) -> dict[sympy.Symbol, int]:
        return {s: number for group, number in zip(self.groups, point, strict=True) for s in group}

    def _size(self, given: Sequence[Tensor], symbol: sympy.Symbol) -> Any:
        at = self.read[symbol]
        return given[at.tensor].shape[at.dim] // at.divisor


def open_sizes(inputs: Sequence[Tensor]) -> OpenSizes:
    """Find, for each symbol in the inputs' sizes, a size that is a multiple of it alone."""
    found: dict[sympy.Symbol, SizeVariable] = {}
    numbers: dict[sympy.Symbol, int] = {}
    wanted: set[Any] = set()
    for index, tensor in enumerate(inputs):
        for dim, size in enumerate(tensor.shape):
            expression = symbolic(size)
            if not isinstance(expression, sympy.Basic):
                continue
            wanted |= expression.free_symbols
            factor, symbol = expression.as_coeff_Mul()
            if isinstance(symbol, sympy.Symbol) and (symbol not in found or factor < found[symbol].divisor):
                found[symbol] = SizeVariable(index, dim, int(factor))
                numbers[symbol] = int(cast("Any", size).node.hint) // int(factor)
    missing = wanted - found.keys()
    if missing:
        raise UnfitError(
            f"the sizes of its inputs are combined: {', '.join(map(str, missing))} stands nowhere alone"
        )
    return OpenSizes(tuple((symbol,) for symbol in found), found, numbers)


def described(
    runs: Mapping[Point, Observed], given: Sequence[Tensor], inputs: int
) -> tuple[list[OpaqueResult], Observed]:
    """Describe what the part returns for all sizes; raises UnfitError if the runs do not agree on it."""
    (base, first), *others = runs.items()
    for _, other in others:
        if (other.structure, other.dtypes, [len(s) for s in other.shapes]) != (
            first.structure,
            first.dtypes,
            [len(s) for s in first.shapes],
        ):
            raise UnfitError("what it returns changes with the size of the batch")
    if any(
        isinstance(given[i], nn.Parameter) or given[i].requires_grad for i in first.written if i >= inputs
    ):
        raise UnfitError("it writes a parameter")
    results = [
        OpaqueResult(
            tuple(fit({p: run.shapes[i][d] for p, run in runs.items()}, base) for d in range(len(shape))),
            dtype,
        )
        for i, (shape, dtype) in enumerate(zip(first.shapes, first.dtypes, strict=True))
    ]
    changed: list[Any] = []
    for i, other in enumerate(first.others):
        values = {p: run.others[i] for p, run in runs.items()}
        if all(value == other for value in values.values()):
            changed.append(checked_argument(other))
        elif all(type(value) is int for value in values.values()):
            changed.append(fit(values, base))
        else:
            raise UnfitError(f"it returns a {type(other).__name__} that changes with the batch size")
    written = sorted({index for run in runs.values() for index in run.written})
    random = any(run.random for run in runs.values())
    draws = any(run.draws_backward for run in runs.values())
    own = any(run.own_backward for run in runs.values())
    grads = tuple(map(any, zip(*(run.differentiable for run in runs.values()), strict=True)))
    seen = replace(
        first,
        differentiable=grads,
        others=tuple(changed),
        written=tuple(written),
        random=random,
        own_backward=own,
        draws_backward=draws,
    )
    return results, seen
