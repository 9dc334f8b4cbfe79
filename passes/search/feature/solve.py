"""One mesh and one micro-batch count: the cheapest choice that fits, and a proved bound, in three steps.

    free      dual bound with memory without limit, and the choice that its messages say
    priced    where that does not fit: a price on bytes (Lagrange), raised until choices fit; or a proof that none does
    program   options that no better choice has are dropped, PuLP and HiGHS decide among the rest

A step is taken only while the bound is below the best cost that is known, of this problem or of another
(``passes.search.feature.place`` takes them in the order of bounds); most problems end after the first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from passes.search.feature.bound import DualBound, Priced, price, wire_tables
from passes.search.feature.ilp import FeatureProgram
from passes.search.feature.problem import FeatureProblem
from passes.search.feature.ties import without_needless_sums
from passes.search.feature.tuning import TUNING


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


class ProblemSearch:
    """``bound``: no choice that fits costs less. ``advance`` takes the next step."""

    def __init__(self, problem: FeatureProblem) -> None:
        self.problem = problem
        self.possible = _possible(problem)
        self.bound = 0.0 if self.possible else math.inf
        self.free_bound = 0.0
        self.best: tuple[Priced, tuple[int, ...]] | None = None
        self.least_bytes = math.inf
        """Bytes that the smallest choice needs at least, where it is proved that nothing fits."""
        self.short_of_memory = False
        """The cheapest choice of all may not fit."""
        self.out_of_time = False
        self._duals: DualBound | None = None
        self._latest: DualBound | None = None
        self._cheapest = Priced(0.0, math.inf)
        self._tight = problem
        self._steps = [self._free, self._priced, self._core]
        self._margins = list(TUNING.margins)
        if self.possible:
            self._does_not_fit(sum(float(u.bytes.min()) for u in problem.units) - problem.capacity_bytes)
        self._tables = self._whole_tables = wire_tables(problem) if self.possible else []

    @property
    def best_seconds(self) -> float:
        return math.inf if self.best is None else self.best[0].seconds

    def advance(self, known_seconds: float, deadline: float) -> None:
        self._steps.pop(0)(known_seconds, deadline)

    @property
    def comes_to_programs(self) -> bool:
        """True if what is left to do is to solve integer programs, which takes longest."""
        return bool(self._steps) and self._steps[0] == self._core

    def is_over(self, known_seconds: float) -> bool:
        return not self._steps or not self.possible or self.is_proved() or self.is_bounded(known_seconds)

    def will_do(self, closely_seconds: float) -> bool:
        """Tell whether only integer programs are left that cannot improve the plan enough to be worth solving."""
        return self.comes_to_programs and self.bound >= closely_seconds

    def is_bounded(self, known_seconds: float) -> bool:
        return self.bound >= known_seconds * (1 - TUNING.solved)

    def is_proved(self) -> bool:
        return self.best is not None and self.bound >= self.best_seconds * (1 - TUNING.solved)

    def result(self, known_seconds: float) -> Solved:
        if not self.possible:
            return Solved(None, math.inf, math.inf, math.inf, "infeasible")
        left = self.comes_to_programs and not self.out_of_time
        if self.best is None or self.best[0].seconds >= known_seconds:
            status = "bounded" if left or self.is_bounded(known_seconds) else "time limit"
            return Solved(None, math.inf, math.inf, self.bound, status)
        status = (
            "time limit" if self.out_of_time else "bounded" if left and not self.is_proved() else "optimal"
        )
        cost, chosen = self.best
        options = tuple(int(u.index[k]) for u, k in zip(self.problem.units, chosen, strict=True))
        bound = min(self.bound, cost.seconds)
        held = cost.bytes + self.problem.floor_bytes
        return Solved(options, cost.seconds, held, bound, status)

    # ----------------------------------------------------------------------------------------------
    # Steps

    def _free(self, known_seconds: float, deadline: float) -> None:
        self._cheapest = self._ascend(0.0, known_seconds)
        self.free_bound = self.bound

    def _does_not_fit(self, over_bytes: float) -> None:
        """Note that every choice needs so much more than there is."""
        if over_bytes <= 0:
            return
        self.least_bytes = self.problem.capacity_bytes + self.problem.floor_bytes + over_bytes
        self.possible = False
        self.bound = math.inf

    def _priced(self, known_seconds: float, deadline: float) -> None:
        """Bisect for the price at which choices just fit: there the bound is highest."""
        if not self.short_of_memory:
            return
        least = DualBound(self.problem, self._tables, 1.0, time_weight=0.0)
        over = least.ascend(
            TUNING.sweeps
        )  # bytes beyond the capacity that every choice needs, buffers not counted
        if over > 0 and self.best is None:
            self._does_not_fit(over)
            return
        # What leaves no room for its buffer, or needs too many bytes by itself, is in no choice that fits.
        self._tight = replace(self.problem, largest_buffer_bytes=max(-over, 0.0))
        self._shrink(least.needless(TUNING.rounding * self.problem.capacity_bytes))
        self._duals = self._latest = None
        if not self._tables:
            self.possible, self.bound = False, math.inf
            return
        # Every choice x is a line t(x) + λ·(b(x) − capacity) above the bound: on to where the lowest lines cross.
        cheap, small = self._cheapest, None
        at = self.bound / self.problem.capacity_bytes
        for _ in range(TUNING.prices):
            if self.is_bounded(known_seconds) or self.is_proved() or time.perf_counter() > deadline:
                return
            found = self._ascend(at, known_seconds)
            if found.bytes > self.problem.capacity_bytes:
                cheap = found
            else:
                small = found
            if small is None:
                at *= 4
                continue
            crossing = (small.seconds - cheap.seconds) / (cheap.bytes - small.bytes)
            if crossing <= 0.0:  # the smaller choice is the faster one: no price of memory tells them apart
                return
            height = small.seconds + crossing * (small.bytes - self.problem.capacity_bytes)
            if abs(crossing - at) < TUNING.near * at or height <= self.bound * (1 + TUNING.near):
                return
            at = crossing

    def _shrink(self, keep: Sequence[NDArray[np.bool_]]) -> None:
        self._tight = self._tight.keep(keep)
        self._tables = wire_tables(self._tight, self._tables) if _possible(self._tight) else []

    def _core(self, known_seconds: float, deadline: float) -> None:
        """Ask whether a choice costs at most a little more than the bound: a program over the few options that such a
        choice may have. Its best one is the best of all if it does; else the bound is raised to that much."""
        if time.perf_counter() > deadline:
            self.out_of_time = True
            return
        known = min(known_seconds, self.best_seconds)
        margin = self._margins.pop(0)
        limit = self.bound * (1 + margin)
        if known <= self.bound * (1 + TUNING.close * margin):
            limit = known
        core = self._core_problem(limit, deadline)
        if core is None:
            self.bound = max(self.bound, limit)
        else:
            self._solve_core(core, limit, deadline)
        if not self.out_of_time and limit < known:
            self._steps.append(self._core)

    def _core_problem(self, limit: float, deadline: float) -> DualBound | None:
        """The bound of the problem that has the options of choices that cost at most ``limit``; None if there are none."""
        duals = self._duals
        assert duals is not None
        while math.isfinite(limit):
            before = sum(len(unit.seconds) for unit in duals.problem.units)
            problem = duals.problem.keep(duals.needless(limit))
            if not _possible(problem):
                return None
            duals = DualBound(problem, wire_tables(problem, duals.tables), duals.price)
            if duals.ascend(TUNING.sweeps, target=limit) >= limit:
                return None
            after = sum(len(unit.seconds) for unit in problem.units)
            if after > TUNING.shrinks * before or time.perf_counter() > deadline:
                break
        return duals

    def _solve_core(self, core: DualBound, limit: float, deadline: float) -> None:
        pairs = core.needed_pairs(limit) if math.isfinite(limit) else None
        left = max(deadline - time.perf_counter(), 0.1)
        for memory in (False, True):
            if self.short_of_memory and not memory:
                continue
            program = FeatureProgram(core.problem, core.tables, memory=memory, pairs=pairs)
            found = program.solve(min(left, TUNING.longest_seconds))
            self.out_of_time = found.status not in ("optimal", "infeasible")
            # A choice that was left out costs at least the limit.
            self.bound = max(self.bound, min(found.bound_seconds, limit))
            if found.chosen is None:
                if found.status == "infeasible" and not math.isfinite(limit):
                    self.possible = False
                return
            if self._take(core.problem, found.chosen):
                return

    def _take(self, smaller: FeatureProblem, chosen: Sequence[int]) -> bool:
        """Take note of a choice of a smaller problem, and whether it fits."""
        units = zip(self.problem.units, smaller.units, chosen, strict=True)
        index = [unit.index.tolist().index(int(small.index[k])) for unit, small, k in units]
        index = without_needless_sums(self.problem, index)
        cost = price(self.problem, self._whole_tables, index)
        fits = cost.bytes <= self.problem.capacity_bytes * (1 + TUNING.rounding)
        if not fits:
            self.short_of_memory = True
        elif cost.seconds < self.best_seconds:
            self.best = cost, tuple(index)
        return fits

    def _ascend(self, seconds_per_byte: float, known_seconds: float) -> Priced:
        """Bound at one price of memory, and the choice that its messages say."""
        duals = DualBound(self._tight, self._tables, seconds_per_byte, start=self._latest)
        bound = duals.ascend(TUNING.sweeps, target=known_seconds)
        self._latest = duals
        if bound > self.bound or self._duals is None:
            self.bound, self._duals = max(bound, self.bound), duals
        chosen = without_needless_sums(self._tight, duals.decode())
        cost = price(self._tight, self._tables, chosen)
        if cost.bytes > self.problem.capacity_bytes:
            self.short_of_memory = True
        elif cost.seconds < min(TUNING.forbidden_seconds, self.best_seconds):
            self._take(self._tight, chosen)
        return cost


def _possible(problem: FeatureProblem) -> bool:
    return all(len(unit.seconds) for unit in problem.units)
