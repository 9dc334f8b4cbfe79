"""Exact minima over pipelines: a search over bottlenecks around a program that knows the best pipeline for each.

The optimum is the minimum over T of ``fill · f(T) + w · T`` with w = (m - fill)·v, where f(T) is the least
Σ_s (t_s + x_s) of a pipeline whose bottleneck is at most T: a program's answer (``BottleneckProgram``). Alpa (Zheng et al.
2022, section 5.2) tries every T that a stage may take; here T is bisected. f falls as T grows, so on [lo, hi] nothing is
below ``fill · f(hi) + w · lo``, and a solution found at T with bottleneck T' ≤ T settles [T', T]. Intervals
are taken in the order of their bounds until none can beat the best pipeline by more than the gap asked for; if
time runs out, the smallest remaining bound is still proved.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class PipelineValue(Protocol):
    """A pipeline and its surrogate."""

    @property
    def objective_seconds(self) -> float:
        """fill · total + w · T"""

    @property
    def bottleneck_seconds(self) -> float:
        """T, per micro-batch."""

    @property
    def stages(self) -> int:
        """The number of stages."""

    @property
    def identity(self) -> Hashable:
        """Equal for equal pipelines."""


SolutionT = TypeVar("SolutionT", bound=PipelineValue)
Found_co = TypeVar("Found_co", bound=PipelineValue, covariant=True)
End = tuple[int, int]
"""(stages, state in which the first of them is)."""


class BottleneckProgram(Protocol[Found_co]):
    """The program for one problem."""

    fill: float
    bottleneck_weight: float
    least_seconds: float
    """f is nowhere below."""

    def range(self) -> tuple[float, float]:
        """Between which bottlenecks the optimum lies: none is below the first, the second constrains nothing."""

    def solve(self, threshold: float) -> list[tuple[float, int, int]]:
        """(f, stages, state) of the best pipeline per number of stages, best first."""

    def trace(self, end: End) -> Found_co:
        """Return the pipeline that the last ``solve`` found."""


@dataclass(frozen=True)
class Bisected(Generic[SolutionT]):
    """``pipelines``: distinct, best first; empty if nothing fits. None is below ``bound_seconds``."""

    pipelines: tuple[SolutionT, ...]
    bound_seconds: float
    optimal: bool
    thresholds: int
    """Bottlenecks that the program was solved for."""


class Bisection(Generic[SolutionT]):
    """Branch and bound over intervals of bottlenecks of one problem."""

    def __init__(
        self,
        program: BottleneckProgram[SolutionT],
        *,
        keep: int,
        relative_gap: float,
        deadline: float = math.inf,
        cutoff_seconds: float = math.inf,
    ) -> None:
        """``relative_gap``: stop once bound ≥ (1 - gap) · best (0 would bisect for ever). ``deadline``: value of
        ``time.perf_counter`` to stop at. ``cutoff_seconds``: pipelines above it are of no interest; what is
        returned then may be empty with a bound ≥ cutoff.
        """
        self.program, self.keep, self.deadline = program, keep, deadline
        self.gap, self.cutoff = relative_gap, cutoff_seconds
        self.found: dict[Hashable, SolutionT] = {}
        self.best_seconds = math.inf
        self.best_threshold = math.inf
        self.solved = 0

    def run(self) -> Bisected[SolutionT]:
        """Search."""
        intervals = self._start()
        while intervals:
            bound, lo, hi, below = heapq.heappop(intervals)
            limit = min(self.best_seconds, self.cutoff)
            if bound >= limit * (1 - self.gap) or time.perf_counter() > self.deadline:
                heapq.heappush(intervals, (bound, lo, hi, below))
                break
            hi = max(lo, min(hi, self._last_useful(below)))
            middle = (lo + hi) / 2
            solved = self._at(middle)
            heapq.heappush(intervals, (self._bound(below, middle), middle, hi, below))
            if solved is not None and solved[1] > lo:
                heapq.heappush(intervals, (self._bound(solved[0], lo), lo, solved[1], solved[0]))
        return self._result(min((interval[0] for interval in intervals), default=math.inf))

    def _start(self) -> list[tuple[float, float, float, float]]:
        """First intervals (bound, lo, hi, f(hi) or less).

        The largest bottleneck that the caller cares about comes first: if nothing fits below it, as in most options
        where memory is short, one program has proved it. Then T grows until something fits, which says up to where
        T is worth looking at, and f there bounds f everywhere below it.
        """
        guess, top = self.program.range()
        solved = self._at(min(top, self._last_useful(self.program.least_seconds)))
        if solved is None:
            return []
        below, hi = solved
        lo = guess
        while guess < hi and self._at(guess) is None:
            lo, guess = guess, guess * 1.25
        useful = self._last_useful(below)
        if useful < hi:
            solved = self._at(useful)
            if solved is None:  # nothing below the largest useful bottleneck fits: what was found is the best
                return []
            below, hi = solved
        return [(self._bound(below, lo), lo, max(lo, hi), below)]

    def _result(self, remaining: float) -> Bisected[SolutionT]:
        self._other_stage_counts()
        found = sorted(self.found.values(), key=lambda s: (s.objective_seconds, s.stages))
        best = found[0].objective_seconds if found else math.inf
        bound = min(best, remaining, self.cutoff)
        # nothing unexplored is better than the best, or than what the caller still cares about
        optimal = remaining >= min(best, self.cutoff) * (1 - self.gap)
        return Bisected(tuple(found[: self.keep]), bound, optimal, self.solved)

    def _bound(self, total: float, bottleneck: float) -> float:
        return self.program.fill * total + self.program.bottleneck_weight * bottleneck

    def _last_useful(self, below: float) -> float:
        """The largest bottleneck whose bound is under the best, when f is at least ``below``."""
        weight = self.program.bottleneck_weight
        limit = min(self.best_seconds, self.cutoff)
        if weight <= 0 or math.isinf(limit):
            return math.inf
        return (limit - self.program.fill * below) / weight

    def _at(self, bottleneck: float) -> tuple[float, float] | None:
        """Solve for bottlenecks up to this one: (f, the solution's bottleneck); None if nothing fits."""
        self.solved += 1
        ends = self.program.solve(bottleneck)
        if not ends:
            return None
        found = self._keep(ends[0][1:])
        if found.objective_seconds < self.best_seconds:
            self.best_seconds, self.best_threshold = found.objective_seconds, bottleneck
        return ends[0][0], min(found.bottleneck_seconds, bottleneck)

    def _keep(self, end: End) -> SolutionT:
        found = self.program.trace(end)
        self.found.setdefault(found.identity, found)
        return found

    def _other_stage_counts(self) -> None:
        """Other numbers of stages at the best threshold: different plans that the surrogate thinks nearly as
        good."""
        if math.isinf(self.best_threshold) or self.keep <= 1:
            return
        ends = self.program.solve(self.best_threshold)
        for end in ends[1 : self.keep]:
            self._keep(end[1:])
