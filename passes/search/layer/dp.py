"""Exact minimum of the layer-wise surrogate: a search over bottlenecks around a dynamic program over cuts.

The optimum is the minimum over T of ``fill · f(T) + w · T`` with w = (m - fill)·v, where f(T) is the least
Σ_s (t_s + x_s) of a split whose bottleneck is at most T (``passes.search.layer.cuts``). Alpa (Zheng et al. 2022, section
5.2) tries every T that a stage may take; here T is bisected. f falls as T grows, so on [lo, hi] nothing is
below ``fill · f(hi) + w · lo``, and a solution found at T with bottleneck T' ≤ T settles [T', T]. Intervals
are taken in the order of their bounds until none can beat the best split by more than the gap asked for; if
time runs out, the smallest remaining bound is still proved.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass, replace

from passes.search.layer.cuts import CutProgram
from passes.search.layer.problem import LayerProblem, StageSplit, evaluate
from passes.search.layer.table import Geometry, StageTable


@dataclass(frozen=True)
class DpResult:
    """``splits``: distinct, best first; empty if nothing fits. No split of the space is below
    ``bound_seconds``."""

    splits: tuple[StageSplit, ...]
    bound_seconds: float
    optimal: bool
    thresholds: int
    """Dynamic programs solved."""


def solve_dp(
    problem: LayerProblem,
    *,
    geometry: Geometry | None = None,
    keep: int = 8,
    relative_gap: float = 1e-10,
    deadline: float = math.inf,
    cutoff_seconds: float = math.inf,
) -> DpResult:
    """The best split by the surrogate, and up to ``keep`` good ones of other bottlenecks and stage counts.

    ``relative_gap``: stop once bound ≥ (1 - gap) · best (0 would bisect for ever). ``deadline``: value of
    ``time.perf_counter`` to stop at. ``cutoff_seconds``: splits above it are of no interest; what is
    returned then may be empty with a bound ≥ cutoff.
    """
    table = StageTable(problem, geometry or Geometry(problem.structure))
    problems = [problem]
    if problem.pins:
        # a pin counts stages from the front, the program counts from the end: one search per number of stages
        first = max(problem.stage_counts[0], max(problem.pins.values()) + 1)
        problems = [replace(problem, stage_counts=(p, p)) for p in range(first, problem.max_stages + 1)]
    results: list[DpResult] = []
    for each in problems:
        results.append(_Bisection(each, table, keep, relative_gap, deadline, cutoff_seconds).run())
        best = min((r.splits[0].objective_seconds for r in results if r.splits), default=math.inf)
        cutoff_seconds = min(cutoff_seconds, best * (1 + 1e-9)) if keep == 1 else cutoff_seconds
    splits = sorted((s for r in results for s in r.splits), key=lambda s: s.objective_seconds)
    bound = min((r.bound_seconds for r in results), default=math.inf)
    return DpResult(
        tuple(splits[:keep]), bound, all(r.optimal for r in results), sum(r.thresholds for r in results)
    )


class _Bisection:
    """Branch and bound over intervals of bottlenecks of one problem."""

    def __init__(
        self,
        problem: LayerProblem,
        table: StageTable,
        keep: int,
        relative_gap: float,
        deadline: float,
        cutoff_seconds: float,
    ) -> None:
        self.problem, self.keep, self.deadline = problem, keep, deadline
        self.gap, self.cutoff = relative_gap, cutoff_seconds
        self.program = CutProgram(problem, table)
        self.found: dict[tuple[tuple[int, ...], tuple[int, ...]], StageSplit] = {}
        self.best_seconds = math.inf
        self.best_threshold = math.inf
        self.solved = 0

    def run(self) -> DpResult:
        if self.problem.max_stages < self.problem.stage_counts[0]:
            return DpResult((), math.inf, True, 0)
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
        floor = float(self.problem.seconds.min(axis=0).sum())  # of f(T), for every T
        guess, top = self.program.range()
        solved = self._at(min(top, self._last_useful(floor)))
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

    def _result(self, remaining: float) -> DpResult:
        self._other_stage_counts()
        splits = sorted(self.found.values(), key=lambda s: (s.objective_seconds, s.stages))
        best = splits[0].objective_seconds if splits else math.inf
        bound = min(best, remaining, self.cutoff)
        # nothing unexplored is better than the best split, or than what the caller still cares about
        optimal = remaining >= min(best, self.cutoff) * (1 - self.gap)
        return DpResult(tuple(splits[: self.keep]), bound, optimal, self.solved)

    def _bound(self, total: float, bottleneck: float) -> float:
        return self.problem.fill * total + self.problem.bottleneck_weight * bottleneck

    def _last_useful(self, below: float) -> float:
        """The largest bottleneck whose bound is under the best split, when f is at least ``below``."""
        weight = self.problem.bottleneck_weight
        limit = min(self.best_seconds, self.cutoff)
        if weight <= 0 or math.isinf(limit):
            return math.inf
        return (limit - self.problem.fill * below) / weight

    def _at(self, bottleneck: float) -> tuple[float, float] | None:
        """Solve for bottlenecks up to this one: (f, bottleneck of the split found); None if nothing fits."""
        self.solved += 1
        ends = self.program.solve(bottleneck)
        if not ends:
            return None
        split = self._keep(ends[0][1:])
        if split.objective_seconds < self.best_seconds:
            self.best_seconds, self.best_threshold = split.objective_seconds, bottleneck
        return ends[0][0], min(split.bottleneck_seconds, bottleneck)

    def _keep(self, end: tuple[int, int]) -> StageSplit:
        split = evaluate(self.problem, *self.program.trace_back(*end))
        self.found.setdefault((split.stage_of, split.kinds), split)
        return split

    def _other_stage_counts(self) -> None:
        """Other numbers of stages at the best threshold: different plans that the surrogate thinks nearly as
        good."""
        if math.isinf(self.best_threshold) or self.keep <= 1:
            return
        ends = self.program.solve(self.best_threshold)
        for end in ends[1 : self.keep]:
            self._keep(end[1:])
