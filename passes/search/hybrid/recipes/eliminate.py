"""The exact minimum of a feature-wise problem for many prices of memory at once, by eliminating one unit after another.

    minimize    Σ_units (seconds[option] + price · bytes[option]) + Σ_wires Σ_distinct needs (seconds + price · copies)
                − Σ_wires Σ_readers hidden

A unit that is eliminated leaves, for every combination of options of the units that it shares wires with, the least that it
and its wires cost: min-sum elimination (Bertele & Brioschi, "Nonserial Dynamic Programming", 1972). What it takes is the
size of the largest such table: small for a block of a model on one mesh axis, too much for several free axes. Units that
are kept to the end span the answer: one minimum for each combination of their options.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import FloatArray
from passes.search.feature.bound import WireTable
from passes.search.feature.graph import Wire
from passes.search.feature.problem import FeatureProblem

AT_ONCE = 1 << 14
"""Entries of a table that are added up at once, by hand: 128 KiB stay in a processor's cache. Of larger tables, those of
one option of the unit that goes."""
MOST_ENTRIES = 1 << 24
"""Entries of one table, prices counted: 128 MiB of float64. Blocks of transformers on one axis need 2·10⁵ a price."""
KEPT_KINDS = ("parameter", "batch", "state")
"""Units whose bytes are there all the time, and whose seconds count once per step."""


@dataclass(frozen=True)
class Amounts:
    """The amounts that choices of options take. Arrays of any one shape."""

    seconds: FloatArray
    """Per step, of everything that runs once per micro-batch."""
    once_seconds: FloatArray
    """Per step, of everything that runs once in it: gradient sums, updates, gathers after the update."""
    state_bytes: FloatArray
    """Held all the time: parameters, gradients, optimizer state, buffers, the batch."""
    held_bytes: FloatArray
    """Held per micro-batch in flight."""
    buffer_bytes: FloatArray
    """The largest buffer of any bridge, and the most that the backward of an op works in."""


@dataclass(frozen=True)
class _FactorCosts:
    """Costs over the options of ``units``: shape [options of each unit, prices or 1]."""

    units: tuple[int, ...]
    cost: FloatArray

    def over(self, units: tuple[int, ...]) -> FloatArray:
        """Return a view with an axis for each of ``units``, of length 1 where it does not matter, and one for prices."""
        order = sorted(range(len(self.units)), key=lambda i: units.index(self.units[i]))
        cost = self.cost.transpose(*order, -1)
        length = {self.units[i]: self.cost.shape[i] for i in order}
        return cost.reshape(*(length.get(unit, 1) for unit in units), cost.shape[-1])


@dataclass(frozen=True)
class _EliminatedUnit:
    """One unit that was eliminated, and those whose options decide about its own.

    ``parts`` [options of the unit, options of each of ``units``, prices] add up to what these cost together.
    """

    unit: int
    units: tuple[int, ...]
    parts: tuple[FloatArray, ...]

    @classmethod
    def of(cls, unit: int, units: tuple[int, ...], factors: Sequence[_FactorCosts]) -> _EliminatedUnit:
        """Add up the first of ``factors``, as many as do not make too large a table: the order decides about ties."""
        first, *rest = (f.over((unit, *units)) for f in factors)
        parts = [first]
        for cost in rest:
            if len(parts) == 1 and np.broadcast(first, cost).size <= AT_ONCE:
                first = parts[0] = first + cost
            else:
                parts.append(cost)
        return cls(unit, units, tuple(parts))

    def least(self) -> FloatArray:
        """Return the least over the unit's options."""
        if len(self.parts) == 1:
            least: FloatArray = self.parts[0].min(axis=0)
            return least
        found: FloatArray = np.asarray(sum(part[0] for part in self.parts))
        own = np.empty_like(found)
        for option in range(1, len(self.parts[0])):
            first, second, *rest = (part[option] for part in self.parts)
            np.add(first, second, out=own)
            for part in rest:
                np.add(own, part, out=own)
            np.minimum(found, own, out=found)
        return found

    def best(self, chosen: NDArray[np.intp], prices: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the unit's cheapest option beside those that are ``chosen`` of others."""
        total: FloatArray | float = 0.0
        for part in self.parts:
            at = [
                chosen[unit] if size > 1 else 0
                for unit, size in zip(self.units, part.shape[1:-1], strict=True)
            ]
            total = total + part[(slice(None), *at, prices if part.shape[-1] > 1 else np.zeros_like(prices))]
        found: NDArray[np.intp] = np.asarray(total).argmin(axis=0)
        return found


class TooWideError(Exception):
    """The tables of an elimination would have more than ``MOST_ENTRIES``."""


@dataclass(frozen=True, eq=False)
class Elimination:
    """The minima of one problem. ``least``: [prices, options of each kept unit]."""

    problem: FeatureProblem
    tables: Sequence[WireTable]
    kept: tuple[int, ...]
    least: FloatArray
    steps: tuple[_EliminatedUnit, ...]

    def decode(self) -> NDArray[np.intp]:
        """[units, prices, options of each kept unit] the option of every unit in each minimum."""
        shape = self.least.shape
        chosen = np.zeros((len(self.problem.units), *shape), dtype=np.intp)
        grid = np.indices(shape)
        for axis, unit in enumerate(self.kept, start=1):
            chosen[unit] = grid[axis]
        for step in reversed(self.steps):
            chosen[step.unit] = step.best(chosen, grid[0])
        return chosen

    def amounts(self, chosen: NDArray[np.intp]) -> Amounts:
        """Return what choices [units, …] take."""
        shape = chosen.shape[1:]
        seconds, once, state, held, buffers, working = (np.zeros(shape) for _ in range(6))
        for unit, numbers, option in zip(self.problem.space.units, self.problem.units, chosen, strict=True):
            if unit.kind in KEPT_KINDS:
                once += numbers.seconds[option]
                state += numbers.bytes[option]
            else:
                seconds += numbers.seconds[option]
                held += numbers.bytes[option]
                working = np.maximum(working, numbers.working_bytes[option])
        for wire, known in zip(self.problem.space.wires, self.tables, strict=True):
            takes = _takes_seconds(known), known.table.copies.any(), known.table.buffers.any()
            if not any(takes):
                continue
            row, columns = _codes(self.problem, wire, known)
            at = row[chosen[wire.producer]]
            needs = [need[chosen[u]] for need, (u, _) in zip(columns, wire.readers, strict=True)]
            if takes[0]:
                seconds += _seconds(known, at, needs)
            if takes[1]:
                held += _over_needs(known.table.copies, at, needs)
            if takes[2]:
                buffers = np.maximum(buffers, _over_needs(known.table.buffers, at, needs))
        return Amounts(seconds, once, state, held, buffers + working + self.problem.floor_bytes)


def eliminate(
    problem: FeatureProblem,
    tables: Sequence[WireTable],
    state_prices: FloatArray,
    held_prices: FloatArray,
    kept: Sequence[int],
    *,
    parameters: bool = True,
) -> Elimination:
    """Find the minima of ``problem`` at prices of memory, for every combination of options of the units ``kept``.

    ``state_prices``, ``held_prices``: [prices] seconds per byte of what is there all the time, and of what a micro-batch
    holds. ``parameters``: whether wires from parameters count. Raises ``TooWideError`` where the tables would be too large.
    """
    count, units = [len(unit.seconds) for unit in problem.units], problem.space.units
    factors = [
        *_of_units(problem, state_prices, held_prices),
        *(
            _of_wire(problem, w, known, held_prices)
            for w, known in enumerate(tables)
            if (parameters or units[problem.space.wires[w].producer].kind != "parameter")
            and (_takes_seconds(known) or known.table.copies.any())
        ),
    ]
    factors = [f for f in factors if f.cost.any()]
    steps: list[_EliminatedUnit] = []
    for unit, scope in _order(tuple(f.units for f in factors), tuple(count), tuple(kept)):
        size = len(state_prices) * math.prod(count[u] for u in scope) * count[unit]
        if size > MOST_ENTRIES:
            raise TooWideError(f"{size} entries")
        steps.append(
            _EliminatedUnit.of(
                unit, scope, [f for f in factors if unit in f.units] or [_nothing(unit, count)]
            )
        )
        factors = [f for f in factors if unit not in f.units]
        factors.append(_FactorCosts(scope, steps[-1].least()))
    least = sum(f.over(tuple(kept)) for f in factors)
    least = np.broadcast_to(np.asarray(least), (*(count[u] for u in kept), len(state_prices)))
    return Elimination(problem, tables, tuple(kept), np.moveaxis(least, -1, 0).copy(), tuple(steps))


def _nothing(unit: int, count: Sequence[int]) -> _FactorCosts:
    return _FactorCosts((unit,), np.zeros((count[unit], 1)))


@lru_cache(maxsize=256)
def _order(
    scopes: tuple[tuple[int, ...], ...], count: tuple[int, ...], kept: tuple[int, ...]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the units in the order of their elimination, each with those of the table that it leaves.

    The one whose table is smallest comes next, of equal ones the first. ``scopes``: the units of each table.
    """
    found = []
    beside: list[set[int]] = [{unit} for unit in range(len(count))]
    for scope in scopes:
        for unit in scope:
            beside[unit].update(scope)
    size = {u: math.prod(count[v] for v in beside[u]) for u in range(len(count)) if u not in kept}
    while size:
        unit = min(size, key=lambda u: (size[u], u))
        del size[unit]
        others = beside[unit] - {unit}
        found.append((unit, tuple(sorted(others))))
        for other in others:
            beside[other] = (beside[other] | others) - {unit}
            if other in size:
                size[other] = math.prod(count[v] for v in beside[other])
    return tuple(found)


def _of_units(
    problem: FeatureProblem, state_prices: FloatArray, held_prices: FloatArray
) -> Iterator[_FactorCosts]:
    for unit, numbers in zip(problem.space.units, problem.units, strict=True):
        price = state_prices if unit.kind in KEPT_KINDS else held_prices
        yield _FactorCosts((unit.index,), numbers.seconds[:, None] + numbers.bytes[:, None] * price)


def wire_seconds(problem: FeatureProblem, wire: int, known: WireTable) -> tuple[tuple[int, ...], FloatArray]:
    """Return the units that share a wire, rising, and its seconds over their options."""
    at, needs, units = _along(problem, wire, known)
    return units, _seconds(known, at, needs)


def _of_wire(problem: FeatureProblem, wire: int, known: WireTable, held_prices: FloatArray) -> _FactorCosts:
    at, needs, units = _along(problem, wire, known)
    seconds = _seconds(known, at, needs)[..., None]
    if not known.table.copies.any():
        return _FactorCosts(units, seconds)
    copies = _over_needs(known.table.copies, at, needs)[..., None]
    return _FactorCosts(units, seconds + copies * held_prices if copies.any() else seconds)


def _along(
    problem: FeatureProblem, wire: int, known: WireTable
) -> tuple[NDArray[np.intp], list[NDArray[np.intp]], tuple[int, ...]]:
    """Return a wire's row and columns in its table, each along the axis of its unit, and these units."""
    w = problem.space.wires[wire]
    units = tuple(sorted({w.producer, *(unit for unit, _ in w.readers)}))
    row, columns = _codes(problem, w, known)

    def along(codes: NDArray[np.intp], unit: int) -> NDArray[np.intp]:
        return codes.reshape([-1 if u == unit else 1 for u in units])

    needs = [along(need, unit) for need, (unit, _) in zip(columns, w.readers, strict=True)]
    return along(row, w.producer), needs, units


def _codes(
    problem: FeatureProblem, wire: Wire, known: WireTable
) -> tuple[NDArray[np.intp], list[NDArray[np.intp]]]:
    """Return the row in a wire's table of each option of its producer, and the column of each option of each reader."""
    made = problem.units[wire.producer].outputs[wire.output]
    needs = [problem.units[unit].inputs[operand] for unit, operand in wire.readers]
    return np.searchsorted(known.sources, made), [np.searchsorted(known.needs, need) for need in needs]


def _takes_seconds(known: WireTable) -> bool:
    return bool(known.hidden) or bool(known.seconds.any())


def _seconds(known: WireTable, row: NDArray[np.intp], columns: Sequence[NDArray[np.intp]]) -> FloatArray:
    """Sum a wire's seconds over the distinct needs of its readers, without what these compute beside its bridges."""
    total = _over_needs(known.seconds, row, columns)
    for hidden, column in zip(known.hidden, columns, strict=False):
        total = total - hidden[row, column]
    return total


def _over_needs(table: FloatArray, row: NDArray[np.intp], columns: Sequence[NDArray[np.intp]]) -> FloatArray:
    """Sum a wire's table over the distinct needs of its readers; the shape is that of the indices together."""
    total = np.zeros(np.broadcast_shapes(row.shape, *(c.shape for c in columns)))
    for i, column in enumerate(columns):
        own = table[row, column]
        for other in columns[:i]:
            own = np.where(column == other, 0.0, own)
        total += own
    return total
