"""One mesh and one micro-batch count: the cheapest choice that fits, and a proved bound.

dual bound ─► not below what is known already?  left out
           ─► its choice fits and costs the bound?  proved, without a solver
           ─► too large?  a price on bytes (Lagrange), raised until choices fit
           ─► options that no better choice has are dropped ─► the program (PuLP, HiGHS) decides among the rest
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from passes import feature_ilp
from passes.feature_bound import DualBound, Priced, WireTable, price, wire_tables
from passes.feature_problem import FeatureProblem

PROVED = 1e-8
"""Relative distance of bound and cost at which nothing is left to prove: rounding."""
SWEEPS = 30
LONGEST_SECONDS = 1e6
ROUNDING = 1e-8
"""The program's memory row holds to its solver's tolerance."""
PRICES = 12
"""Prices of memory tried."""


@dataclass(frozen=True)
class Solved:
    """``options``: per unit, an index into its ``detail``; None if nothing better than what was known was found.

    ``status``: "optimal", "bounded" (no better than the known cost), "infeasible", "time limit".
    """

    options: tuple[int, ...] | None
    seconds: float
    bytes: float
    bound_seconds: float
    status: str
    variables: int = 0
    short_of_memory: bool = False
    """The cheapest choice of all does not fit."""
    free_bound_seconds: float = 0.0
    """Proved bound with memory without limit."""
    least_bytes: float = math.inf
    """Of the smallest choice that was met."""


def solve_problem(problem: FeatureProblem, known_seconds: float, deadline: float) -> Solved:
    """Search for a choice that fits and costs less than ``known_seconds``."""
    if any(not len(unit.seconds) for unit in problem.units):
        return Solved(None, math.inf, math.inf, math.inf, "infeasible")
    tables = wire_tables(problem)
    search = _Search(problem, tables, known_seconds)
    search.ascend(0.0)
    search.free_bound = search.bound
    if search.is_bounded():
        return search.result("bounded")
    if search.smallest.bytes > problem.capacity_bytes and not search.is_proved():
        least = DualBound(problem, tables, 1.0, time_weight=0.0)
        if least.ascend(SWEEPS, target=1.0) > 0:
            search.meet(least.decode())
            return search.result("infeasible")
        search.price_memory(deadline)
    if search.is_proved():
        return search.result("optimal")
    if search.is_bounded():
        return search.result("bounded")
    return search.with_solver(deadline)


class _Search:
    def __init__(self, problem: FeatureProblem, tables: Sequence[WireTable], known_seconds: float) -> None:
        self.problem, self.tables, self.known = problem, tables, known_seconds
        self.bound = 0.0
        self.best: tuple[Priced, tuple[int, ...]] | None = None
        self.smallest = Priced(math.inf, math.inf)
        self.duals: DualBound | None = None
        self.variables = 0
        self.needs_memory = False
        self.free_bound = 0.0

    @property
    def least_seconds(self) -> float:
        """What a choice must beat."""
        return min(self.known, self.best[0].seconds if self.best else math.inf)

    def is_bounded(self) -> bool:
        return self.bound >= self.known * (1 - PROVED)

    def is_proved(self) -> bool:
        return self.best is not None and self.bound >= self.best[0].seconds * (1 - PROVED)

    def ascend(self, seconds_per_byte: float) -> Priced:
        """Bound at one price of memory, and the choice that its messages say."""
        duals = DualBound(self.problem, self.tables, seconds_per_byte)
        bound = duals.ascend(SWEEPS, target=self.known)
        if bound > self.bound or self.duals is None:
            self.bound, self.duals = max(bound, self.bound), duals
        return self.meet(duals.decode())

    def meet(self, chosen: list[int]) -> Priced:
        """Take note of a choice."""
        cost = price(self.problem, self.tables, chosen)
        if cost.bytes < self.smallest.bytes:
            self.smallest = cost
        if cost.bytes <= self.problem.capacity_bytes:
            if self.best is None or cost.seconds < self.best[0].seconds:
                self.best = cost, tuple(chosen)
        else:
            self.needs_memory = True
        return cost

    def price_memory(self, deadline: float) -> None:
        """Bisect for the price at which choices just fit: there the bound is highest."""
        low, high = 0.0, self.bound / self.problem.capacity_bytes
        raising = True
        for _ in range(PRICES):
            if self.is_bounded() or self.is_proved() or time.perf_counter() > deadline:
                return
            middle = high if raising else (low + high) / 2
            fits = self.ascend(middle).bytes <= self.problem.capacity_bytes
            if fits:
                raising, high = False, middle
            else:
                low = middle
                high = middle * 4 if raising else high

    def with_solver(self, deadline: float) -> Solved:
        """The integer program over the options that may be in a better choice."""
        assert self.duals is not None
        left = deadline - time.perf_counter()
        if left <= 0:
            return self.result("time limit")
        units = self.problem.units
        if math.isfinite(self.least_seconds):
            keep = self.duals.needless(self.least_seconds)
            units = tuple(unit.keep(mask) for unit, mask in zip(units, keep, strict=True))
        smaller = replace(self.problem, units=units)
        tables = wire_tables(smaller)
        while True:
            left = max(deadline - time.perf_counter(), 0.1)
            found = feature_ilp.solve(
                smaller, memory=self.needs_memory, time_limit_seconds=min(left, LONGEST_SECONDS)
            )
            self.variables = found.variables
            # What was dropped costs more than the best that is known.
            self.bound = max(self.bound, min(found.bound_seconds, self.least_seconds))
            if found.chosen is None:
                break
            cost = price(smaller, tables, found.chosen)
            if cost.bytes > self.problem.capacity_bytes * (1 + ROUNDING):
                if self.needs_memory:
                    break
                self.needs_memory = True  # the free optimum does not fit: again, with memory
                continue
            if self.best is None or cost.seconds < self.best[0].seconds:
                index = [int(unit.index[k]) for unit, k in zip(units, found.chosen, strict=True)]
                whole = zip(self.problem.units, index, strict=True)
                self.best = cost, tuple(unit.index.tolist().index(i) for unit, i in whole)
            break
        if found.status in ("optimal", "infeasible"):
            nothing = self.best is None and not math.isfinite(self.known)
            return self.result("infeasible" if nothing and found.status == "infeasible" else "optimal")
        return self.result("time limit")

    def result(self, status: str) -> Solved:
        found = Solved(
            None,
            math.inf,
            math.inf,
            math.inf if status == "infeasible" else self.bound,
            status,
            self.variables,
            self.needs_memory,
            self.free_bound,
            self.smallest.bytes,
        )
        if self.best is None or self.best[0].seconds >= self.known:
            return replace(found, status="bounded" if status == "optimal" else status)
        cost, chosen = self.best
        options = tuple(int(u.index[k]) for u, k in zip(self.problem.units, chosen, strict=True))
        bound = min(self.bound, cost.seconds)
        return replace(found, options=options, seconds=cost.seconds, bytes=cost.bytes, bound_seconds=bound)
