"""Stages that share a device, together: a bound on what fits at once, by Lagrange over the memory of all devices.

The program of cuts takes each stage alone against its device's memory. Where a device runs v stages, what all stages hold
fits all devices together at most, so of the splits that fit and have no bottleneck above T, none has a sum below

    f(T) = max over prices λ ≥ 0 of   min over splits of  Σ_s (t_s + x_s + λ · bytes_s) - λ · Σ_d capacity_d

    bytes_s     what stage s holds; a v-th part of what is there while a backward runs: one stage at a time is in backward

For one price that is the same program with dearer stages; the price rises while the best split takes more than there is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cost_models.arrays import FloatArray
from passes.search.bisect import Bisection, End
from passes.search.layer.cuts import CutProgram, LinkKey
from passes.search.layer.problem import LayerProblem, StageSplit
from passes.search.layer.table import StageTable
from passes.search.layer.tuning import TUNING
from passes.search.touches import BoolArray

PRICES = 12
"""Prices tried at most for one bottleneck. By hand: beyond, they are nearer to each other than ``NEAR``."""
NEAR = 1.05
"""Ratio of prices that are not told apart. By hand."""
CLOSE = 1e-3
"""Relative gap to which the bound is found: as the groups' (``passes.search.hybrid.bounds``)."""


@dataclass(frozen=True, eq=False)
class _PricedSplit:
    """A split, and its surrogate with what its memory costs."""

    split: StageSplit
    objective_seconds: float
    bottleneck_seconds: float

    @property
    def stages(self) -> int:
        return self.split.stages

    @property
    def identity(self) -> object:
        """Equal for equal splits that compute the same stages again."""
        return self.split.identity, self.split.recomputed


class _PricedProgram(CutProgram):
    """f(T) with a price of memory. How long a stage may wait for those behind it is left out."""

    def __init__(self, problem: LayerProblem, table: StageTable, cutoff_seconds: float) -> None:
        super().__init__(problem, table)
        self.cutoff_seconds = cutoff_seconds
        capacity = sum(kind.capacity_bytes * kind.count for kind in problem.kinds)
        self.capacity_bytes = capacity * (1 + TUNING.memory_tolerance)
        self.price = 0.0
        """Seconds per byte."""
        self._used: dict[tuple[int, int, bool], FloatArray] = {}
        self._first_price = self.least_seconds / self.capacity_bytes

    def solve(self, threshold: float) -> list[tuple[float, int, int]]:
        """(f, stages, state) of the best split at the price that leads to the most; nothing if that is above the cutoff."""
        low, high, price = 0.0, math.inf, 0.0
        most: tuple[float, float, list[tuple[float, int, int]]] = (-math.inf, 0.0, [])
        for _ in range(PRICES):
            ends = self._at_price(price, threshold)
            if not ends or self.fill * ends[0][0] >= self.cutoff_seconds:
                return []
            most = max(most, (ends[0][0], price, ends), key=lambda own: own[0])
            if self._taken_bytes(super().trace(ends[0][1:])) > self.capacity_bytes:
                low = price
                price = max(price * 2, self._first_price) if math.isinf(high) else math.sqrt(price * high)
            elif price == 0.0:
                break
            else:
                high, price = price, math.sqrt(low * price) if low else price / 2
            if low and high < low * NEAR:
                break
        return most[2] if self.price == most[1] else self._at_price(most[1], threshold)

    def _at_price(self, price: float, threshold: float) -> list[tuple[float, int, int]]:
        self.price = price
        return [
            (value - price * self.capacity_bytes, k, index) for value, k, index in super().solve(threshold)
        ]

    def _waits_too_long(self, k: int, least: FloatArray) -> BoolArray:
        return np.zeros(len(least), dtype=bool)

    def _used_bytes(self, kind: int, k: int, again: bool) -> FloatArray:
        """[all pairs] the bytes of each as the k-th stage from the end."""
        key = (self.classes[kind], k, again)
        if key not in self._used:
            self._used[key] = self.table.used_bytes(kind, self.problem.held_at(k), again=again)
        return self._used[key]

    def _unfit(self, kind: int, k: int, pairs: slice) -> tuple[BoolArray | None, BoolArray]:
        """Let any stage compute its blocks again that costs less so."""
        full, nowhere = super()._unfit(kind, k, pairs)
        recompute, chosen = self.problem.recompute, self._useful[pairs]
        if recompute is None or recompute.always:
            return full, nowhere
        plain, twice = (self._cost(kind, again, None, None)[pairs] for again in (False, True))
        plain = plain + self.price * self._used_bytes(kind, k, False)[chosen]
        twice = twice + self.price * self._used_bytes(kind, k, True)[chosen]
        cheaper = (twice < plain) & ~self._full(kind, k, True)[chosen]
        return (cheaper if full is None else full | cheaper), nowhere

    def _stage_cost(
        self,
        kind: int,
        k: int,
        charged: LinkKey | None,
        paid: LinkKey | None,
        pairs: slice,
        again: BoolArray | None,
    ) -> FloatArray:
        chosen = self._useful[pairs]
        used = self._used_bytes(kind, k, False)[chosen]
        if again is not None:
            used = np.where(again, self._used_bytes(kind, k, True)[chosen], used)
        return super()._stage_cost(kind, k, charged, paid, pairs, again) + self.price * used

    def trace(self, end: End) -> _PricedSplit:  # type: ignore[override]
        """Return the split that the last ``solve`` found, at its priced surrogate.

        One that takes more than there is says nothing about shorter bottlenecks than that it was found for.
        """
        split = super().trace(end)
        fits = self._taken_bytes(split) <= self.capacity_bytes
        bottleneck = min(split.bottleneck_seconds, self._limit) if fits else self._limit
        total = split.total_seconds + self.price * (self._taken_bytes(split) - self.capacity_bytes)
        return _PricedSplit(split, self.fill * total + self.bottleneck_weight * bottleneck, bottleneck)

    def _taken_bytes(self, split: StageSplit) -> float:
        """Bytes of all stages, of what is there while a backward runs a part."""
        return sum(split.memory_bytes) - (1 - 1 / self.problem.chunks) * sum(split.working_bytes)


def together(
    problem: LayerProblem, table: StageTable, cutoff_seconds: float, deadline: float
) -> tuple[float, tuple[StageSplit, ...]]:
    """Bound the surrogate of splits that fit, up to ``cutoff_seconds``; and return splits that prices lead to.

    ``deadline``: value of ``time.perf_counter`` to stop at.
    """
    program = _PricedProgram(problem, table, cutoff_seconds)
    least = Bisection(
        program, keep=TUNING.keep, relative_gap=CLOSE, deadline=deadline, cutoff_seconds=cutoff_seconds
    ).run()
    return least.bound_seconds, tuple(priced.split for priced in least.pipelines)
