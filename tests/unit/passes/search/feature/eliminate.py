"""The feature-wise optimum over every combination of options, none left out: units are eliminated one by one.

    best(rest) = min over the unit's options of Σ of everything that mentions the unit          (Bertelè and Brioschi, 1972)

Exact for seconds alone. Shares no code with the bound or the integer program, and holds the table of every combination of
the units that an eliminated one is connected with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.search.feature.problem import FeatureProblem

MOST_ENTRIES = 2_000_000
"""Of a table. A value with many readers needs more."""


class TooWideError(Exception):
    """A table would be too large."""


@dataclass(frozen=True, eq=False)
class Term:
    """Seconds for every combination of ``units``; one dimension per unit."""

    units: tuple[int, ...]
    seconds: NDArray[np.float64]

    def over(self, units: tuple[int, ...]) -> NDArray[np.float64]:
        """The same with a dimension for each of ``units``, a superset in ascending order."""
        shape = [1] * len(units)
        for unit, size in zip(self.units, self.seconds.shape, strict=True):
            shape[units.index(unit)] = size
        return self.seconds.reshape(shape)


def least_seconds(problem: FeatureProblem) -> tuple[float, float]:
    """(the least seconds of all combinations, how many combinations these are)."""
    terms = [Term((u,), np.asarray(unit.seconds, dtype=float)) for u, unit in enumerate(problem.units)]
    terms += [_wire(problem, w) for w in range(len(problem.space.wires))]
    waiting = set(range(len(problem.units)))
    while waiting:
        unit = min(waiting, key=lambda u: (_entries(problem, _around(terms, u)), u))
        around = _around(terms, unit)
        _refuse_wide(problem, around)
        total = sum((t.over(around) for t in terms if unit in t.units), np.zeros((1,) * len(around)))
        least = np.min(total, axis=around.index(unit))
        terms = [t for t in terms if unit not in t.units]
        terms.append(Term(tuple(u for u in around if u != unit), np.asarray(least)))
        waiting.remove(unit)
    count = math.prod(float(len(unit.seconds)) for unit in problem.units)
    return float(sum(float(t.seconds) for t in terms)), count


def _around(terms: list[Term], unit: int) -> tuple[int, ...]:
    return tuple(sorted({u for t in terms if unit in t.units for u in t.units}))


def _entries(problem: FeatureProblem, units: tuple[int, ...]) -> int:
    return math.prod(len(problem.units[u].seconds) for u in units)


def _refuse_wide(problem: FeatureProblem, units: tuple[int, ...]) -> None:
    if _entries(problem, units) > MOST_ENTRIES:
        raise TooWideError(f"a table of {_entries(problem, units):,} entries")


def _wire(problem: FeatureProblem, w: int) -> Term:
    """A value's bridges: one for each distinct need among its readers."""
    wire = problem.space.wires[w]
    made = problem.units[wire.producer].outputs[wire.output].tolist()
    needed = [problem.units[u].inputs[i].tolist() for u, i in wire.readers]
    sources, needs = sorted(set(made)), sorted({code for codes in needed for code in codes})
    table = problem.table(w, sources, needs)
    cost = np.where(table.allowed, table.seconds, math.inf)
    units = tuple(sorted({wire.producer, *(u for u, _ in wire.readers)}))
    _refuse_wide(problem, units)

    def along(unit: int, values: list[int]) -> NDArray[np.intp]:
        shape = [1] * len(units)
        shape[units.index(unit)] = len(values)
        return np.array(values, dtype=np.intp).reshape(shape)

    row = along(wire.producer, [sources.index(code) for code in made])
    columns = [
        along(u, [needs.index(code) for code in codes])
        for (u, _), codes in zip(wire.readers, needed, strict=True)
    ]
    total = np.zeros([len(problem.units[u].seconds) for u in units])
    for n in range(len(needs)):
        used = np.zeros((1,) * len(units), dtype=bool)
        for column in columns:
            used = used | (column == n)
        total = total + np.where(used, cost[row, n], 0.0)
    for hidden, column in zip(problem.hidden(w, sources, needs), columns, strict=False):
        total = total - hidden[row, column]
    return Term(units, total)
