"""f(T): the dynamic program over (cut, devices of the stages behind it), for one bottleneck T.

    D_k[a] = min over b ⊃ a of  t(a, b) + min over next devices of (x(b) + D_{k-1}[b])
    with t, x ≤ T, memory, pins, and D_k ≤ in_flight[k] · v · T;    f(T) = min over k of D_k[∅]

Where stages alternate (``layer.problem``: q), each cut is charged to one of its two stages, t + charged cuts
≤ T, and D_k also says what the stage is charged for the cut into it: nothing, or one of the links it may have.

A stage that does not fit as the k-th from the end may compute its blocks again in backward: t(a, b) is then longer.

Keeping only the least D per state is exact: every constraint on D is an upper bound. One step over k looks
at the pairs of downsets whose stage is short enough, as arrays: O(stages · device states · pairs). Of these only
those that start where the k-th stage from the end may: stages of T or less must reach the end behind it and the
front before it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from passes.search.layer.problem import Held, LayerProblem, StageSplit, evaluate
from passes.search.layer.table import StageTable
from passes.search.touches import BoolArray


@dataclass(frozen=True)
class DeviceState:
    """The first of the remaining stages uses ``kind``; ``next`` are the states of level k-1 that may
    follow."""

    kind: int
    next: tuple[int, ...]


def device_levels(problem: LayerProblem) -> list[list[DeviceState]]:
    """States by level; entry k-1 holds level k. The states of level 1 have no successors.

    Stages are numbered from the end, because the micro-batches that a stage holds depend on how many stages follow it. A
    state of level k says which kind the k-th stage from the end uses and what is left for the stages before it:

        sequence     k                          the last k entries of a fixed list of devices
        ordered      (k, device)                any subsequence of a list of unlike devices
        unordered    (kind, used per kind)      identical devices collapse to a count
    """
    if problem.assignment == "sequence":
        return [
            [DeviceState(problem.sequence[-k], (0,) if k > 1 else ())]
            for k in range(1, problem.max_stages + 1)
        ]
    if problem.assignment == "ordered":
        return _ordered(len(problem.kinds), problem.max_stages)
    return _unordered(problem)


def _ordered(devices: int, max_stages: int) -> list[list[DeviceState]]:
    levels: list[list[DeviceState]] = []
    for k in range(1, max_stages + 1):
        # level k can start at device d only if k - 1 devices are left behind it; state index = device index
        count = devices - k + 1
        levels.append([DeviceState(d, tuple(range(d + 1, count + 1)) if k > 1 else ()) for d in range(count)])
    return levels


def _unordered(problem: LayerProblem) -> list[list[DeviceState]]:
    counts = [kind.count for kind in problem.kinds]
    levels: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(problem.max_stages)]
    for used in product(*(range(count + 1) for count in counts)):
        k = sum(used)
        if 1 <= k <= problem.max_stages:
            levels[k - 1] += [(kind, used) for kind, n in enumerate(used) if n > 0]
    result: list[list[DeviceState]] = []
    index_of: dict[tuple[int, tuple[int, ...]], int] = {}
    for level in levels:
        states = []
        for kind, used in level:
            rest = tuple(n - (i == kind) for i, n in enumerate(used))
            states.append(DeviceState(kind, tuple(index_of[i, rest] for i, n in enumerate(rest) if n > 0)))
        index_of = {key: position for position, key in enumerate(level)}
        result.append(states)
    return result


LinkKey: TypeAlias = tuple[float, float]
"""(latency, seconds per byte): cuts over equal links cost the same."""


class CutProgram:
    """f(T): the dynamic program over (cut, devices of the stages behind it)."""

    def __init__(self, problem: LayerProblem, table: StageTable) -> None:
        self.problem, self.table = problem, table
        self.fill, self.bottleneck_weight = problem.fill, problem.bottleneck_weight
        self.least_seconds = float(problem.seconds.min(axis=0).sum())
        self.levels = device_levels(problem)
        # kinds that differ by their links only share one class of costs; pairs of kinds with equal links one
        # array
        classes: dict[tuple[int, float], int] = {}
        self.classes = [classes.setdefault((k.row, k.capacity_bytes), len(classes)) for k in problem.kinds]
        used = {state.kind for level in self.levels for state in level}
        self.kinds = sorted({self.classes[kind]: kind for kind in used}.values())
        self.link_class: dict[tuple[int, int], LinkKey] = {}
        self.links: dict[LinkKey, FloatArray] = {}
        self.charged_into: list[list[list[LinkKey]]] = [[[] for _ in level] for level in self.levels]
        """Per level and state: what its stage may be charged for the cut into it."""
        for k, (later, level) in enumerate(itertools.pairwise(self.levels), start=1):
            for a, b in {(s.kind, later[i].kind) for s in level for i in s.next}:
                key = (float(problem.link_latency_seconds[a, b]), float(problem.link_seconds_per_byte[a, b]))
                self.link_class[a, b] = key
                if key not in self.links:
                    self.links[key] = table.link_seconds(a, b)
            if problem.charges_cut(k):
                for i, into in enumerate(self.charged_into[k - 1]):
                    into += {self.link_class[s.kind, later[i].kind] for s in level if i in s.next}
        self._full_at: dict[tuple[int, tuple[Held, ...], bool], BoolArray] = {}
        self._ever_fits: dict[tuple[int, bool], BoolArray] = {}
        self.starts = self._allowed_starts()
        rows = sorted({problem.kinds[kind].row for kind in self.kinds})
        self.least_before: FloatArray = table.geometry.members @ problem.seconds[rows].min(axis=0)
        """[downsets] seconds of all units before the cut, each on the fastest device for it."""

    def _fits_somewhere(self, kind: int, again: bool) -> BoolArray:
        """[pairs] whether the stage might fit the kind at any place, by the fewest micro-batches that stages hold.

        Rules pairs out before looking at places. ``again``: computing its blocks again.
        """
        key = (self.classes[kind], again)
        if key not in self._ever_fits:
            problem, table = self.problem, self.table
            fewest = min(max(w + d for w, d in problem.held_at(k)) for k in range(1, len(self.levels) + 1))
            least = table.held_again_bytes if again else table.held_bytes
            if problem.moments:
                least = np.minimum(least, table.deferred_bytes)
            free = table.room_bytes(kind, again)
            self._ever_fits[key] = (free >= 0) & (fewest * least <= free)
        return self._ever_fits[key]

    def _usable(self, kind: int, work: FloatArray, limit: float) -> BoolArray:
        """[pairs] whether the stage is short enough for the bottleneck, and might fit somewhere."""
        short = work <= limit
        plain = self._fits_somewhere(kind, False)
        if self.problem.recompute is not None and (short & ~plain).any():
            return np.asarray(short & (plain | self._fits_somewhere(kind, True)), dtype=bool)
        return np.asarray(short & plain, dtype=bool)

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
        if self.problem.recompute is not None:
            seconds = seconds + self.problem.recompute.seconds[rows]
        return least * (1 - 1e-9), (float(seconds.max(axis=0).sum()) + links) * (1 + 1e-9)

    def solve(self, threshold: float) -> list[tuple[float, int, int]]:
        """(Σ(t + x), k, state index) of the best plan per number of stages, best first. Keeps the tables."""
        geometry, problem = self.table.geometry, self.problem
        limit = threshold * (1 + 1e-12)
        work = {self.classes[k]: self.table.work_seconds[problem.kinds[k].row] for k in self.kinds}
        usable = [self._usable(kind, work[self.classes[kind]], limit) for kind in self.kinds]
        useful = np.nonzero(np.logical_or.reduce(usable))[0]
        if not len(useful):
            return []
        self._limit = limit
        self._useful = useful
        self._source: IntArray = geometry.source[useful]
        self._target: IntArray = geometry.target[useful]
        self._first = np.flatnonzero(np.diff(self._source, prepend=-1))
        self._heads = self._source[self._first]
        self._furthest = np.maximum.reduceat(self._target, self._first)
        self._work = {c: np.where(work[c][useful] <= limit, work[c][useful], np.inf) for c in work}
        self._links = {key: np.where(x <= limit, x, np.inf) for key, x in self.links.items()}
        self._costs: dict[tuple[int, bool, LinkKey | None, LinkKey | None], FloatArray] = {}
        self._best: list[list[dict[LinkKey | None, FloatArray]]] = []
        ends: list[tuple[float, int, int]] = []
        cuts = np.array([geometry.downsets - 1])
        for k, level in enumerate(self.levels, start=1):
            heads = self._may_start(k, cuts)
            rows = [self._least(k, index, heads) for index in range(len(level))]
            self._best.append(rows)
            if k >= problem.stage_counts[0]:
                value, index = min((float(row[None][0]), i) for i, row in enumerate(rows))
                if math.isfinite(value):
                    ends.append((value, k, index))
            # whoever is charged for its cut in comes no cheaper, so the uncharged have all finite places
            cuts = np.flatnonzero(np.logical_or.reduce([np.isfinite(row[None]) for row in rows]))
            if not len(cuts):
                break
        return sorted(ends)

    def _may_start(self, k: int, cuts: IntArray) -> slice:
        """The slice of ``_heads`` that the k-th stage may start from, if the stages behind it start at ``cuts``.

        A pair's source has a lower index than its target. What lies before the source must fit the stages that are
        left, each of them no longer than the bottleneck.
        """
        left = (len(self.levels) - k) * self._limit * (1 + 1e-9)
        useful = (
            (self._furthest >= cuts[0]) & (self._heads < cuts[-1]) & (self.least_before[self._heads] <= left)
        )
        found = np.flatnonzero(useful)
        return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, 0)

    def _least(self, k: int, index: int, heads: slice) -> dict[LinkKey | None, FloatArray]:
        """D_k of one state, [downsets], by what this stage is charged for the cut into it.

        ``heads``: the starts to look at; D is infinite elsewhere.
        """
        state = self.levels[k - 1][index]
        first = self._first[heads]
        if not len(first):
            nowhere = np.full(self.table.geometry.downsets, np.inf)
            return dict.fromkeys((None, *self.charged_into[k - 1][index]), nowhere)
        end = int(self._first[heads.stop]) if heads.stop < len(self._first) else len(self._source)
        pairs = slice(int(first[0]), end)
        full, nowhere = self._unfit(state.kind, k, pairs)
        rests = [(paid, rest[self._target[pairs]]) for paid, rest in self._rests(k, state).items()]
        rows: dict[LinkKey | None, FloatArray] = {}
        for charged in (None, *self.charged_into[k - 1][index]):
            each = [
                self._stage_cost(state.kind, k, charged, paid, pairs, full) + rest for paid, rest in rests
            ]
            cost = each[0] if len(each) == 1 else np.minimum.reduce(each)
            cost[nowhere] = np.inf
            least = np.full(self.table.geometry.downsets, np.inf)
            least[self._heads[heads]] = np.minimum.reduceat(cost, first - first[0])
            if self.starts is not None:
                least[~self.starts[k - 1]] = np.inf
            least[self._waits_too_long(k, least)] = np.inf
            rows[charged] = least
        return rows

    def _waits_too_long(self, k: int, least: FloatArray) -> BoolArray:
        """[downsets] whether the k-th stage from the end waits longer than the bottleneck for what is behind it."""
        held = self.problem.in_flight[k - 1]
        most = held * self.problem.chunks * self._limit if held < self.problem.microbatches else math.inf
        return np.asarray(least > most, dtype=bool)

    def _unfit(self, kind: int, k: int, pairs: slice) -> tuple[BoolArray | None, BoolArray]:
        """[pairs] as the k-th stage from the end: which compute their blocks again; and which do not fit at all.

        None: none does.
        """
        chosen, recompute = self._useful[pairs], self.problem.recompute
        full = self._full(kind, k, False)[chosen]
        if recompute is None or not (recompute.always or full.any()):
            return None, full
        if recompute.always:
            full = np.ones_like(full)
        return full, full & self._full(kind, k, True)[chosen]

    def _full(self, kind: int, k: int, again: bool) -> BoolArray:
        """[all pairs] whether the stage does not fit as the k-th from the end; ``again``: computing its blocks again."""
        key = (self.classes[kind], self.problem.held_at(k), again)
        if key not in self._full_at:
            self._full_at[key] = ~self.table.fits(kind, key[1], again=again)
        return self._full_at[key]

    def _stage_cost(
        self,
        kind: int,
        k: int,
        charged: LinkKey | None,
        paid: LinkKey | None,
        pairs: slice,
        again: BoolArray | None,
    ) -> FloatArray:
        """[pairs] seconds of each as the k-th stage from the end; those in ``again`` run their blocks forward again."""
        plain = self._cost(kind, False, charged, paid)[pairs]
        return (
            plain if again is None else np.where(again, self._cost(kind, True, charged, paid)[pairs], plain)
        )

    def _cost(self, kind: int, again: bool, charged: LinkKey | None, paid: LinkKey | None) -> FloatArray:
        """[useful pairs] seconds of the pair as a stage that is charged for the cut into it and pays for the next.

        Infinite where they are longer than the bottleneck; None: not charged.
        """
        key = (self.classes[kind], again, charged, paid)
        if key not in self._costs:
            work = self._work[key[0]]
            if again:
                work = self.table.work_again_seconds[self.problem.kinds[kind].row][self._useful]
            load = work.copy()
            if charged is not None:
                load += self._links[charged][self._source]
            if paid is not None:
                load += self._links[paid][self._target]
            self._costs[key] = np.where(load <= self._limit, work, np.inf)
        return self._costs[key]

    def _rests(self, k: int, state: DeviceState) -> dict[LinkKey | None, FloatArray]:
        """[downsets] cost of everything behind a stage that ends at the downset, the cut included.

        By what this stage pays for that cut: None if the stage behind is charged, or nobody.
        """
        if k == 1:
            rest = np.full(self.table.geometry.downsets, np.inf)
            rest[-1] = 0.0
            return {None: rest}
        rests: dict[LinkKey | None, FloatArray] = {}
        for paid, index, _ in self._ways(k, state):
            cost = self._behind(k, state, paid, index)
            rests[paid] = np.minimum(rests[paid], cost) if paid in rests else cost
        return rests

    def _ways(self, k: int, state: DeviceState) -> Iterator[tuple[LinkKey | None, int, LinkKey | None]]:
        """(what the stage pays for the cut behind it, state behind it, what that one is charged for it)."""
        for index in state.next:
            key = self._link_key(k, state, index)
            if self.problem.charges_cut(k - 1):
                yield None, index, key
                yield key, index, None
            else:
                yield None, index, None

    def _behind(self, k: int, state: DeviceState, paid: LinkKey | None, index: int) -> FloatArray:
        """[downsets] the cut and what follows in state ``index``."""
        key = self._link_key(k, state, index)
        charged = key if paid is None and self.problem.charges_cut(k - 1) else None
        return self._links[key] + self._best[k - 2][index][charged]

    def _link_key(self, k: int, state: DeviceState, index: int) -> LinkKey:
        return self.link_class[state.kind, self.levels[k - 2][index].kind]

    def trace(self, end: tuple[int, int]) -> StageSplit:
        """The split that the last ``solve`` found for (k, state index)."""
        return evaluate(self.problem, *self._trace_back(*end))

    def _trace_back(self, k: int, index: int) -> tuple[list[int], list[int], list[bool]]:
        """The split that ``solve`` found for (k, state): stage of each unit, kind of each stage, and whether it
        computes its blocks again.
        """
        members = self.table.geometry.members
        stage_of = np.zeros(self.problem.structure.units, dtype=np.int64)
        kinds: list[int] = []
        recomputed: list[bool] = []
        start, stage = 0, 0
        charged: LinkKey | None = None
        while k >= 1:
            state = self.levels[k - 1][index]
            kinds.append(state.kind)
            head = int(np.searchsorted(self._heads, start))
            lo = int(self._first[head])
            hi = int(self._first[head + 1]) if head + 1 < len(self._first) else len(self._source)
            target = self._target[lo:hi]
            pairs = slice(lo, hi)
            full, nowhere = self._unfit(state.kind, k, pairs)
            found = []
            for paid, rest in self._rests(k, state).items():
                seconds = self._stage_cost(state.kind, k, charged, paid, pairs, full) + rest[target]
                cost = np.where(nowhere, np.inf, seconds)
                at = int(np.argmin(cost))
                found.append((float(cost[at]), int(target[at]), paid, full is not None and bool(full[at])))
            _, end, paid, again = min(found, key=lambda entry: entry[0])
            recomputed.append(again)
            stage_of[members[end] & ~members[start]] = stage
            if k > 1:
                options = [way for way in self._ways(k, state) if way[0] == paid]
                behind = [float(self._behind(k, state, paid, i)[end]) for _, i, _ in options]
                _, index, charged = options[int(np.argmin(behind))]
            start, stage, k = end, stage + 1, k - 1
        return stage_of.tolist(), kinds, recomputed
