"""f(T): the dynamic program over (cut, devices of the stages behind it), for one bottleneck T.

    D_k[a] = min over b ⊃ a of  t(a, b) + min over next devices of (x(b) + D_{k-1}[b])
    with t, x ≤ T, memory, pins, and D_k ≤ in_flight[k] · v · T;    f(T) = min over k of D_k[∅]

Keeping only the least D per state is exact: every constraint on D is an upper bound. One step over k looks
at the pairs of downsets whose stage is short enough, as arrays: O(stages · device states · pairs).
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from passes.layer_devices import DeviceState, device_levels
from passes.layer_problem import FloatArray, LayerProblem
from passes.layer_table import BoolArray, IntArray, StageTable


class CutProgram:
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

    def range(self) -> tuple[float, float]:
        """Between which bottlenecks the optimum lies: none is below the first, the second constrains
        nothing."""
        rows = sorted({self.problem.kinds[k].row for k in self.kinds})
        seconds = self.problem.seconds[rows]
        fastest = seconds.min(axis=0)
        least = max(float(fastest.max()), float(fastest.sum()) / max(1, len(self.levels)))
        links = sum(float(x.max()) for x in self.links.values()) * len(self.levels)
        return least * (1 - 1e-9), (float(seconds.max(axis=0).sum()) + links) * (1 + 1e-9)

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
                held = problem.in_flight[k - 1]
                if held < problem.microbatches:
                    least[least > held * problem.chunks * limit] = np.inf
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
