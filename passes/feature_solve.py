"""One mesh and one micro-batch count: the cheapest choice that fits, and a proved bound, in three steps.

    free      dual bound with memory without limit, and the choice that its messages say
    priced    where that does not fit: a price on bytes (Lagrange), raised until choices fit; or a proof that none does
    program   options that no better choice has are dropped, PuLP and HiGHS decide among the rest

A step is taken only while the bound is below the best cost that is known, of this problem or of another
(``passes.place_features`` takes them in the order of bounds); most problems end after the first.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from passes import feature_ilp
from passes.feature_bound import FORBIDDEN_SECONDS, DualBound, Priced, price, wire_tables
from passes.feature_problem import FeatureProblem

PROVED = 1e-8
"""Relative distance of bound and cost at which nothing is left to prove: rounding."""
SWEEPS = 30
FEW_SWEEPS = 5
PRICES = 12
"""Prices of memory tried."""
LONGEST_SECONDS = 1e6
ROUNDING = 1e-8
"""The program's memory row holds to its solver's tolerance."""


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
    """Of the program, where one was needed."""


def solve_problem(problem: FeatureProblem, known_seconds: float, deadline: float) -> Solved:
    """Search for a choice that fits and costs less than ``known_seconds``, to the end."""
    search = ProblemSearch(problem)
    while not search.is_over(known_seconds):
        search.advance(known_seconds, deadline)
    return search.result(known_seconds)


class ProblemSearch:
    """``bound``: no choice that fits costs less. ``advance`` takes the next step."""

    def __init__(self, problem: FeatureProblem) -> None:
        self.problem = problem
        self.possible = all(len(unit.seconds) for unit in problem.units)
        self.bound = 0.0 if self.possible else math.inf
        self.free_bound = 0.0
        self.best: tuple[Priced, tuple[int, ...]] | None = None
        self.least_bytes = math.inf
        """Where it is proved that nothing fits: what the smallest choice needs at least."""
        self.short_of_memory = False
        """The cheapest choice of all may not fit."""
        self.variables = 0
        self.out_of_time = False
        self._duals: DualBound | None = None
        self._tight = problem
        self._steps = [self._free, self._priced, self._program]
        self._tables = wire_tables(problem) if self.possible else []

    def advance(self, known_seconds: float, deadline: float) -> None:
        self._steps.pop(0)(known_seconds, deadline)

    def is_over(self, known_seconds: float) -> bool:
        return not self._steps or not self.possible or self.is_proved() or self.is_bounded(known_seconds)

    def is_bounded(self, known_seconds: float) -> bool:
        return self.bound >= known_seconds * (1 - PROVED)

    def is_proved(self) -> bool:
        return self.best is not None and self.bound >= self.best[0].seconds * (1 - PROVED)

    def result(self, known_seconds: float) -> Solved:
        if not self.possible:
            return Solved(None, math.inf, math.inf, math.inf, "infeasible", self.variables)
        status = "time limit" if self.out_of_time else "optimal"
        if self.best is None or self.best[0].seconds >= known_seconds:
            status = "bounded" if self.is_bounded(known_seconds) else "time limit"
            return Solved(None, math.inf, math.inf, self.bound, status, self.variables)
        cost, chosen = self.best
        options = tuple(int(u.index[k]) for u, k in zip(self.problem.units, chosen, strict=True))
        bound = min(self.bound, cost.seconds)
        return Solved(options, cost.seconds, cost.bytes, bound, status, self.variables)

    # ----------------------------------------------------------------------------------------------
    # Steps

    def _free(self, known_seconds: float, deadline: float) -> None:
        # What plainly does not fit needs no bound on its seconds.
        least = DualBound(self.problem, self._tables, 1.0, time_weight=0.0)
        over = least.ascend(FEW_SWEEPS, target=1.0)
        if over > 0:
            self._does_not_fit(over)
            return
        self._ascend(0.0, known_seconds)
        self.free_bound = self.bound

    def _does_not_fit(self, over_bytes: float) -> None:
        self.least_bytes = self.problem.capacity_bytes + over_bytes
        self.possible = False
        self.bound = math.inf

    def _priced(self, known_seconds: float, deadline: float) -> None:
        """Bisect for the price at which choices just fit: there the bound is highest."""
        if not self.short_of_memory:
            return
        least = DualBound(self.problem, self._tables, 1.0, time_weight=0.0)
        over = least.ascend(SWEEPS)  # bytes beyond the capacity that every choice needs, buffers not counted
        if over > 0 and self.best is None:
            self._does_not_fit(over)
            return
        # What leaves no room for its buffer is in no choice that fits.
        self._tight = replace(self.problem, largest_buffer_bytes=max(-over, 0.0))
        self._tables = wire_tables(self._tight)
        low, high = 0.0, self.bound / self.problem.capacity_bytes
        raising = True
        for _ in range(PRICES):
            if self.is_bounded(known_seconds) or self.is_proved() or time.perf_counter() > deadline:
                return
            middle = high if raising else (low + high) / 2
            fits = self._ascend(middle, known_seconds).bytes <= self.problem.capacity_bytes
            if fits:
                raising, high = False, middle
            else:
                low = middle
                high = middle * 4 if raising else high

    def _program(self, known_seconds: float, deadline: float) -> None:
        """The integer program over the options that may be in a better choice."""
        assert self._duals is not None
        if time.perf_counter() > deadline:
            self.out_of_time = True
            return
        units = self.problem.units
        least_seconds = min(known_seconds, self.best[0].seconds if self.best else math.inf)
        if math.isfinite(least_seconds):
            keep = self._duals.needless(least_seconds)
            units = tuple(unit.keep(mask) for unit, mask in zip(units, keep, strict=True))
        smaller = replace(self._tight, units=units)
        found = self._solved(smaller, least_seconds, deadline)
        if found is None:
            return
        cost, chosen = found
        if self.best is None or cost.seconds < self.best[0].seconds:
            index = [int(unit.index[k]) for unit, k in zip(units, chosen, strict=True)]
            whole = zip(self.problem.units, index, strict=True)
            self.best = cost, tuple(unit.index.tolist().index(i) for unit, i in whole)

    def _solved(
        self, smaller: FeatureProblem, least_seconds: float, deadline: float
    ) -> tuple[Priced, tuple[int, ...]] | None:
        """The program's choice where it fits; without memory first if that has not been short so far."""
        tables = wire_tables(smaller) if all(len(unit.seconds) for unit in smaller.units) else []
        for memory in (False, True):
            if self.short_of_memory and not memory:
                continue
            left = max(deadline - time.perf_counter(), 0.1)
            found = feature_ilp.solve(smaller, memory=memory, time_limit_seconds=min(left, LONGEST_SECONDS))
            self.variables = found.variables
            self.out_of_time = found.status not in ("optimal", "infeasible")
            # A choice that was dropped costs at least the best that is known.
            self.bound = max(self.bound, min(found.bound_seconds, least_seconds))
            if found.chosen is None:
                if found.status == "infeasible" and not math.isfinite(least_seconds):
                    self.possible = False
                return None
            cost = price(smaller, tables, found.chosen)
            if cost.bytes <= self.problem.capacity_bytes * (1 + ROUNDING):
                return cost, found.chosen
            self.short_of_memory = True
        return None

    def _ascend(self, seconds_per_byte: float, known_seconds: float) -> Priced:
        """Bound at one price of memory, and the choice that its messages say."""
        duals = DualBound(self._tight, self._tables, seconds_per_byte)
        bound = duals.ascend(SWEEPS, target=known_seconds)
        if bound > self.bound or self._duals is None:
            self.bound, self._duals = max(bound, self.bound), duals
        return self._meet(duals.decode())

    def _meet(self, chosen: list[int]) -> Priced:
        """Take note of a choice."""
        cost = price(self.problem, self._tables, chosen)
        if cost.bytes > self.problem.capacity_bytes:
            self.short_of_memory = True
        elif cost.seconds < (self.best[0].seconds if self.best else FORBIDDEN_SECONDS):
            self.best = cost, tuple(chosen)
        return cost
