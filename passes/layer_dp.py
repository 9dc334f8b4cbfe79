"""Exact minimum of the layer-wise surrogate: a bounded search over bottlenecks around a dynamic program over
cuts.

    f(T) = min Σ_s (t_s + x_s)  subject to  t_s, x_s ≤ T, memory, pins
    D_k[a] = min over b ⊃ a of  t(a, b) + min over next devices of (x(b) + D_{k-1}[b])       f(T) = min over
    k of D_k[∅]

The optimum is the minimum over T of ``fill · f(T) + w · T`` (w = (m - fill)·v), and only values that some
stage or link takes matter as T. Alpa (Zheng et al. 2022, section 5.2) enumerates them all; here they are
bisected. f falls as T grows, so on thresholds [lo, hi] nothing is below ``fill · f(hi) + w · lo``, and a
solution found at T with bottleneck T' ≤ T settles [T', T]. Intervals are taken in the order of their bounds
until none can beat the best split: exact, and if time runs out the smallest remaining bound is still proved.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from passes.layer_devices import DeviceState, device_levels
from passes.layer_problem import FloatArray, LayerProblem, Split, evaluate
from passes.layer_table import BoolArray, Geometry, IntArray, StageTable, stage_table


@dataclass(frozen=True)
class DpResult:
    """``splits``: distinct, best first; empty if nothing fits. No split of the space is below
    ``bound_seconds``."""

    splits: tuple[Split, ...]
    bound_seconds: float
    optimal: bool
    thresholds: int
    """Dynamic programs solved."""

    @property
    def best(self) -> Split | None:
        return self.splits[0] if self.splits else None


def solve_dp(
    problem: LayerProblem,
    *,
    geometry: Geometry | None = None,
    keep: int = 8,
    relative_gap: float = 0.0,
    deadline: float = math.inf,
    cutoff_seconds: float = math.inf,
) -> DpResult:
    """The best split by the surrogate, and up to ``keep`` good ones of other bottlenecks and stage counts.

    ``relative_gap``: stop once bound ≥ (1 - gap) · best. ``deadline``: value of ``time.perf_counter`` to
    stop at. ``cutoff_seconds``: splits above it are of no interest; what is returned then may be empty with
    a bound ≥ cutoff.
    """
    geometry = geometry or Geometry(problem.structure)
    table = stage_table(problem, geometry)
    if not problem.pins:
        return _Search(problem, table, keep, relative_gap, deadline, cutoff_seconds).run()
    # a pin counts stages from the front, the program counts from the end: one search per number of stages
    results = []
    first = max(problem.stage_counts[0], max(problem.pins.values()) + 1)
    for p in range(first, problem.max_stages + 1):
        fixed = replace(problem, stage_counts=(p, p))
        results.append(_Search(fixed, table, keep, relative_gap, deadline, cutoff_seconds).run())
        best = min((r.splits[0].objective_seconds for r in results if r.splits), default=math.inf)
        cutoff_seconds = min(cutoff_seconds, best * (1 + 1e-9)) if keep == 1 else cutoff_seconds
    splits = sorted((s for r in results for s in r.splits), key=lambda s: s.objective_seconds)
    bound = min((r.bound_seconds for r in results), default=math.inf)
    return DpResult(
        tuple(splits[:keep]), bound, all(r.optimal for r in results), sum(r.thresholds for r in results)
    )


class _Search:
    """Branch and bound over the sorted thresholds of one problem."""

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
        self.program = _CutProgram(problem, table)
        self.found: dict[tuple[tuple[int, ...], tuple[int, ...]], Split] = {}
        self.best_seconds = math.inf
        self.best_threshold = math.inf
        self.solved = 0

    def run(self) -> DpResult:
        problem = self.problem
        thresholds = self.program.thresholds()
        floor = float(problem.seconds.min(axis=0).sum())  # of f(T), for every T
        if not len(thresholds) or problem.max_stages < problem.stage_counts[0]:
            return DpResult((), math.inf, True, 0)
        last = len(thresholds) - 1
        intervals = [(self._bound(floor, float(thresholds[0])), 0, last, floor)]
        # first the smallest feasible threshold, roughly: upper intervals then start out of reach
        for guess in self._guesses(thresholds):
            if self._at(float(thresholds[guess]), thresholds) is not None:
                break
            if guess == last:
                intervals = []
                break
            intervals = [(self._bound(floor, float(thresholds[guess + 1])), guess + 1, last, floor)]
        while intervals:
            bound, lo, hi, below = heapq.heappop(intervals)
            if lo > hi:
                continue
            limit = min(self.best_seconds, self.cutoff)
            if bound >= limit * (1 - self.gap) or time.perf_counter() > self.deadline:
                heapq.heappush(intervals, (bound, lo, hi, below))
                break
            hi = max(lo, min(hi, self._last_useful(thresholds, below)))
            middle = (lo + hi) // 2
            solved = self._at(float(thresholds[middle]), thresholds)
            if middle < hi:
                heapq.heappush(intervals, (self._bound(below, thresholds[middle + 1]), middle + 1, hi, below))
            if solved is not None:
                total, settled_from = solved
                if settled_from - 1 >= lo:
                    heapq.heappush(
                        intervals, (self._bound(total, thresholds[lo]), lo, settled_from - 1, total)
                    )
        remaining = min((b for b, lo, hi, _ in intervals if lo <= hi), default=math.inf)
        return self._result(remaining)

    def _result(self, remaining: float) -> DpResult:
        self._other_stage_counts()
        splits = sorted(self.found.values(), key=lambda s: (s.objective_seconds, s.stages))
        best = splits[0].objective_seconds if splits else math.inf
        bound = min(best, remaining, self.cutoff)
        optimal = remaining >= best * (1 - self.gap) and math.isfinite(best)
        if not splits:
            optimal = math.isinf(remaining)
        return DpResult(tuple(splits[: self.keep]), bound, optimal, self.solved)

    def _bound(self, total: float, threshold: float) -> float:
        return self.problem.fill * total + self.problem.bottleneck_weight * float(threshold)

    def _guesses(self, thresholds: FloatArray) -> Iterable[int]:
        value = float(thresholds[0])
        while True:
            index = int(np.searchsorted(thresholds, value, side="right")) - 1
            yield index
            if index >= len(thresholds) - 1:
                return
            value = max(value * 1.25, float(thresholds[index + 1]))

    def _last_useful(self, thresholds: FloatArray, below: float) -> int:
        """Index of the last threshold whose bound is under the best split."""
        weight = self.problem.bottleneck_weight
        limit = min(self.best_seconds, self.cutoff)
        if weight <= 0 or math.isinf(limit):
            return len(thresholds) - 1
        value = (limit - self.problem.fill * below) / weight
        return max(0, int(np.searchsorted(thresholds, value * (1 + 1e-12), side="right")) - 1)

    def _at(self, threshold: float, thresholds: FloatArray) -> tuple[float, int] | None:
        """Solve at a threshold: (f(T), index of the smallest threshold that this settles); None if nothing
        fits."""
        self.solved += 1
        ends = self.program.solve(threshold)
        if not ends:
            return None
        split = self._keep(ends[0][1:])
        if split.objective_seconds < self.best_seconds:
            self.best_seconds, self.best_threshold = split.objective_seconds, threshold
        settled = int(np.searchsorted(thresholds, split.bottleneck_seconds * (1 - 1e-12), side="left"))
        return ends[0][0], min(settled, int(np.searchsorted(thresholds, threshold, side="left")))

    def _keep(self, end: tuple[int, int]) -> Split:
        stage_of, kinds = self.program.trace_back(*end)
        split = evaluate(self.problem, stage_of, kinds)
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


class _CutProgram:
    """f(T): the dynamic program over (cut, devices of the stages behind it)."""

    def __init__(self, problem: LayerProblem, table: StageTable) -> None:
        self.problem, self.table = problem, table
        self.levels = device_levels(problem)
        # kinds that differ by their links only share one class of costs; pairs of kinds with equal links one
        # array
        classes: dict[tuple[int, float], int] = {}
        self.classes = [classes.setdefault((k.row, k.capacity_bytes), len(classes)) for k in problem.kinds]
        used = {state.kind for level in self.levels for state in level}
        self.kinds = sorted({self.classes[kind]: kind for kind in used}.values())
        self.link_class: dict[tuple[int, int], tuple[float, float]] = {}
        self.links: dict[tuple[float, float], FloatArray] = {}
        for later, level in itertools.pairwise(self.levels):
            for a, b in {(s.kind, later[i].kind) for s in level for i in s.next}:
                key = (float(problem.link_latency_seconds[a, b]), float(problem.link_seconds_per_byte[a, b]))
                self.link_class[a, b] = key
                if key not in self.links:
                    self.links[key] = table.link_seconds(problem, a, b)
        self.starts = self._allowed_starts()

    def _allowed_starts(self) -> list[BoolArray] | None:
        """Per level, the downsets that its stage may start from without breaking a pin."""
        problem, members = self.problem, self.table.geometry.members
        if not problem.pins:
            return None
        p = problem.stage_counts[1]
        pinned = np.full(problem.structure.units, -1)
        for unit, stage in problem.pins.items():
            pinned[unit] = stage
        allowed: list[BoolArray] = []
        for k in range(1, p + 1):
            stage = p - k
            before, after = (pinned >= 0) & (pinned < stage), pinned >= stage
            legal = members[:, before].all(axis=1) & ~members[:, after].any(axis=1)
            allowed.append(np.asarray(legal, dtype=bool))
        return allowed

    def thresholds(self) -> FloatArray:
        """Every value that a bottleneck can take and that is not below a proved minimum, ascending."""
        rows = sorted({self.problem.kinds[k].row for k in self.kinds})
        values = np.unique(np.concatenate([self.table.work_seconds[rows].ravel(), *self.links.values()]))
        fastest = self.problem.seconds[rows].min(axis=0)
        least = max(float(fastest.max()), float(fastest.sum()) / max(1, len(self.levels)))
        return values[np.searchsorted(values, least * (1 - 1e-9)) :]

    def solve(self, threshold: float) -> list[tuple[float, int, int]]:
        """(Σ(t + x), k, state index) of the best plan per number of stages, best first. Keeps the tables."""
        geometry, problem = self.table.geometry, self.problem
        limit = threshold * (1 + 1e-12)
        fewest = min(problem.in_flight[: len(self.levels)])
        work = {self.classes[k]: self.table.work_seconds[problem.kinds[k].row] for k in self.kinds}
        room = {self.classes[k]: self.table.room[k] for k in self.kinds}
        usable = [(work[c] <= limit) & (room[c] >= fewest) for c in work]
        useful = np.nonzero(np.logical_or.reduce(usable))[0]
        if not len(useful):
            return []
        self._source: IntArray = geometry.source[useful]
        self._target: IntArray = geometry.target[useful]
        self._first = np.flatnonzero(np.diff(self._source, prepend=-1))
        self._heads = self._source[self._first]
        self._work = {c: np.where(work[c][useful] <= limit, work[c][useful], np.inf) for c in work}
        self._room = {c: room[c][useful] for c in work}
        self._links = {key: np.where(x <= limit, x, np.inf) for key, x in self.links.items()}
        self._costs: dict[tuple[int, int], FloatArray] = {}
        self._best: list[list[FloatArray]] = []
        ends: list[tuple[float, int, int]] = []
        for k, level in enumerate(self.levels, start=1):
            rows = []
            for state in level:
                least = np.full(geometry.downsets, np.inf)
                cost, rest = self._cost(state.kind, k), self._rest(k, state)
                least[self._heads] = np.minimum.reduceat(cost + rest[self._target], self._first)
                if self.starts is not None:
                    least[~self.starts[k - 1]] = np.inf
                rows.append(least)
            self._best.append(rows)
            if k >= problem.stage_counts[0]:
                value, index = min((float(row[0]), i) for i, row in enumerate(rows))
                if math.isfinite(value):
                    ends.append((value, k, index))
            if not any(np.isfinite(row).any() for row in rows):
                break
        return sorted(ends)

    def _cost(self, kind: int, k: int) -> FloatArray:
        """[useful pairs] seconds of the pair as k-th stage from the end; infinite where it does not fit."""
        key = (self.classes[kind], self.problem.in_flight[k - 1])
        if key not in self._costs:
            self._costs[key] = np.where(self._room[key[0]] >= key[1], self._work[key[0]], np.inf)
        return self._costs[key]

    def _rest(self, k: int, state: DeviceState) -> FloatArray:
        """[downsets] cost of everything behind a stage that ends at the downset, the cut included."""
        if k == 1:
            rest = np.full(self.table.geometry.downsets, np.inf)
            rest[-1] = 0.0
            return rest
        options = [self._link(k, state, i) + self._best[k - 2][i] for i in state.next]
        return options[0] if len(options) == 1 else np.asarray(np.minimum.reduce(options))

    def _link(self, k: int, state: DeviceState, index: int) -> FloatArray:
        return self._links[self.link_class[state.kind, self.levels[k - 2][index].kind]]

    def trace_back(self, k: int, index: int) -> tuple[list[int], list[int]]:
        """The split that ``solve`` found for (k, state): stage of each unit, kind of each stage."""
        members = self.table.geometry.members
        stage_of = np.zeros(self.problem.structure.units, dtype=np.int64)
        kinds: list[int] = []
        start, stage = 0, 0
        while k >= 1:
            state = self.levels[k - 1][index]
            kinds.append(state.kind)
            head = int(np.searchsorted(self._heads, start))
            lo = int(self._first[head])
            hi = int(self._first[head + 1]) if head + 1 < len(self._first) else len(self._source)
            target = self._target[lo:hi]
            end = int(target[np.argmin(self._cost(state.kind, k)[lo:hi] + self._rest(k, state)[target])])
            stage_of[members[end] & ~members[start]] = stage
            if k > 1:
                options = [
                    float(self._link(k, state, i)[end] + self._best[k - 2][i][end]) for i in state.next
                ]
                index = state.next[int(np.argmin(options))]
            start, stage, k = end, stage + 1, k - 1
        return stage_of.tolist(), kinds
