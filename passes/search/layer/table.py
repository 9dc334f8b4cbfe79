"""Costs of every possible stage at once: arrays over pairs of downsets (A, B), A ⊂ B, whose difference is a stage.

    prefixes    downset i = the first i units; pair (i, j) = units i … j-1. A storage touched by some units adds its size
                to a few rectangles of the (i, j) plane, so all pairs cost O(touches + n²): a two-dimensional prefix sum
    family      any list of downsets; each pair is looked at, one matrix product per quantity

The geometry depends on the structure only and is reused for every micro-batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from passes.search.layer.problem import Held, LayerProblem, LayerStructure, Working
from passes.search.layer.tuning import TUNING
from passes.search.touches import BoolArray, Touch

TouchSum: TypeAlias = Callable[[FloatArray], FloatArray]
"""Sizes of storages -> bytes held by each pair's stage, shape [pairs]."""


class Geometry:
    """Downsets of a structure (index 0 is ∅, the last is everything) and their pairs, sorted by source."""

    def __init__(self, structure: LayerStructure) -> None:
        self.structure = structure
        self.prefixes = structure.downsets is None
        n = structure.units
        if structure.downsets is None:
            self.members: BoolArray = np.tri(n + 1, n, k=-1, dtype=bool)
            source, target = np.triu_indices(n + 1, k=1)
        else:
            family = sorted({0, (1 << n) - 1, *structure.downsets}, key=lambda mask: (mask.bit_count(), mask))
            self.members = np.array([[mask >> u & 1 for u in range(n)] for mask in family], dtype=bool)
            as_float = self.members.astype(np.float32)
            sizes = as_float.sum(axis=1)
            inside = (as_float @ as_float.T >= sizes[:, None] - 0.5) & (sizes[:, None] < sizes[None, :])
            source, target = np.nonzero(inside)
        self.source: IntArray = source.astype(np.int64)
        self.target: IntArray = target.astype(np.int64)

    @property
    def downsets(self) -> int:
        return len(self.members)

    @cached_property
    def held(self) -> TouchSum:
        return self._touch_sum(self.structure.storages)

    @cached_property
    def recomputed(self) -> TouchSum:
        return self._touch_sum(self.structure.recomputed)

    @cached_property
    def deferred(self) -> TouchSum:
        return self._touch_sum(self.structure.deferred)

    @cached_property
    def state(self) -> TouchSum:
        return self._touch_sum(self.structure.states)

    def _touch_sum(self, touches: Sequence[Touch]) -> TouchSum:
        return RectangleSum(self, touches) if self.prefixes else PairSum(self, touches)

    def working(self, working: Working) -> FloatArray:
        """[pairs] ``Working.peak_bytes`` of the pair's stage."""
        if self.prefixes:
            return self._working_of_intervals(working)
        peak, freed = np.zeros(len(self.source)), np.zeros(len(self.source))
        for unit in reversed(range(self.structure.units)):
            has = self.members[:, unit]
            inside = np.flatnonzero(has[self.target] & ~has[self.source])
            peak[inside] = np.maximum(peak[inside], working.beside_bytes[unit] - freed[inside])
            freed[inside] += working.freed_bytes[unit]
        return peak

    def _working_of_intervals(self, working: Working) -> FloatArray:
        """Return the largest beside(u) + f(u + 1) of each interval [i, j), less f(j); f(j): freed by the first j units."""
        n = self.structure.units
        freed = np.append(0.0, np.cumsum(working.freed_bytes))
        plane = np.zeros((n + 1, n + 1))
        for first in range(n):
            plane[first, first + 1 :] = np.maximum.accumulate((working.beside_bytes + freed[1:])[first:])
        return np.asarray(np.maximum((plane - freed)[self._ends], 0.0))

    def over_pairs(self, of_units: FloatArray) -> FloatArray:
        """Sums over the units of each pair's stage: [R, units] -> [R, pairs]."""
        prefix = self.members.astype(np.float64) @ of_units.T  # [downsets, R]
        return np.asarray((prefix[self.target] - prefix[self.source]).T)

    def pairs_of(self, stage_of: Sequence[int], stages: int) -> list[int]:
        """Return the pair of each stage of a split. ``stage_of``: per unit."""
        before = np.array(stage_of) < np.arange(stages + 1)[:, None]
        cuts = [int(np.flatnonzero((self.members == own).all(axis=1))[0]) for own in before]
        first = np.searchsorted(self.source, cuts[:-1])
        return [
            int(start + np.flatnonzero(self.target[start:] == end)[0])
            for start, end in zip(first, cuts[1:], strict=True)
        ]

    @property
    def _ends(self) -> tuple[IntArray, IntArray]:
        return self.source, self.target

    @cached_property
    def crossed(self) -> FloatArray:
        """[downsets, crossings] 1 where the cut at the downset is crossed."""
        columns = []
        for crossing in self.structure.crossings:
            all_inside = self.members[:, list(crossing.readers)].all(axis=1)
            columns.append(self.members[:, crossing.producer] & ~all_inside)
        if not columns:
            return np.zeros((self.downsets, 0))
        return np.stack(columns, axis=1).astype(np.float64)


class RectangleSum:
    """``TouchSum`` over intervals [i, j) of units, by differences on the (i, j) plane."""

    def __init__(self, geometry: Geometry, touches: Sequence[Touch]) -> None:
        self._n = geometry.structure.units
        self._pairs = (geometry.source, geometry.target)
        rows = [(index, *box) for index, t in enumerate(touches) for box in _boxes(t, self._n)]
        table = np.array(rows, dtype=np.int64).reshape(-1, 5)
        self._touch, self._i0, self._i1, self._j0, self._j1 = table.T

    def __call__(self, sizes: FloatArray) -> FloatArray:
        width = self._n + 2
        weight = sizes[self._touch]
        plane = np.zeros(width * width)
        for i, j, sign in (
            (self._i0, self._j0, 1),
            (self._i1, self._j1, 1),
            (self._i0, self._j1, -1),
            (self._i1, self._j0, -1),
        ):
            plane += np.bincount(i * width + j, weights=sign * weight, minlength=width * width)
        summed: FloatArray = plane.reshape(width, width).cumsum(axis=0).cumsum(axis=1)
        return summed[self._pairs]


def _boxes(touch: Touch, n: int) -> list[tuple[int, int, int, int]]:
    """Disjoint boxes (i0, i1, j0, j1), half-open, of the intervals [i, j) that hold the storage.

    Intervals that start after the producer hold it if they contain a saver or a reader; earlier ones if they
    contain a saver, or contain the producer but not the last reader. Each is filed under its first unit that
    matters.
    """
    boxes: list[tuple[int, int, int, int]] = []
    p = touch.producer
    savers = sorted(set(touch.savers))
    previous = p
    readers = touch.readers if p >= 0 else ()
    for unit in sorted({u for u in (*savers, *readers) if u > p}):
        boxes.append((previous + 1, unit + 1, unit + 1, n + 1))
        previous = unit
    if p < 0:
        return boxes
    previous = -1
    for unit in savers:
        if previous >= p:
            break
        boxes.append((previous + 1, min(unit, p) + 1, unit + 1, n + 1))
        previous = unit
    before = max((u for u in savers if u <= p), default=-1)
    after = min((u for u in savers if u > p), default=n)
    last = min(max(touch.readers, default=p), after)
    if before < p < last and touch.keeps_sent:
        boxes.append((before + 1, p + 1, p + 1, last + 1))
    return boxes


class PairSum:
    """``TouchSum`` over any family: one column of booleans per storage."""

    def __init__(self, geometry: Geometry, touches: Sequence[Touch]) -> None:
        members, source, target = geometry.members, geometry.source, geometry.target
        self._pairs = len(source)
        self._columns: list[BoolArray] = []
        for touch in touches:
            held = _any_inside(members, touch.savers, source, target)
            if touch.producer >= 0 and touch.readers:
                made = members[:, touch.producer]
                all_read: BoolArray = np.asarray(members[:, list(touch.readers)].all(axis=1))
                held |= made[source] & _any_inside(members, touch.readers, source, target)
                if touch.keeps_sent:
                    held |= ~made[source] & made[target] & ~all_read[target]
            self._columns.append(held)

    def __call__(self, sizes: FloatArray) -> FloatArray:
        total = np.zeros(self._pairs)
        for size, column in zip(sizes, self._columns, strict=True):
            total[column] += size
        return total


def _any_inside(members: BoolArray, units: Sequence[int], source: IntArray, target: IntArray) -> BoolArray:
    """[pairs] whether the pair's stage contains one of ``units``."""
    if not units:
        return np.zeros(len(source), dtype=bool)
    count: IntArray = members[:, list(units)].sum(axis=1, dtype=np.int64)
    return np.asarray(count[target] > count[source], dtype=bool)


@dataclass(frozen=True, eq=False)
class StageTable:
    """The numbers of one problem over the pairs of its geometry, made where they are needed."""

    problem: LayerProblem
    geometry: Geometry

    def __post_init__(self) -> None:
        if self.geometry.structure is not self.problem.structure:
            raise ValueError("the geometry belongs to another structure")

    @cached_property
    def work_seconds(self) -> FloatArray:
        """[R, pairs]"""
        return self.geometry.over_pairs(self.problem.seconds)

    @cached_property
    def free_bytes(self) -> tuple[FloatArray, ...]:
        """Per kind, [pairs]: what the state leaves. Kinds of one capacity share one array."""
        geometry, kinds = self.geometry, self.problem.kinds
        gradient = geometry.crossed @ self.problem.gradient_bytes
        fixed = (
            geometry.state(self.problem.state_bytes) + gradient[geometry.source] + gradient[geometry.target]
        )
        sizes = {kind.capacity_bytes for kind in kinds}
        free = {size: size * (1 + TUNING.memory_tolerance) - fixed for size in sizes}
        return tuple(free[kind.capacity_bytes] for kind in kinds)

    @cached_property
    def held_bytes(self) -> FloatArray:
        """[pairs] of one micro-batch held whole."""
        return self.geometry.held(self.problem.storage_bytes)

    @cached_property
    def deferred_bytes(self) -> FloatArray:
        """[pairs] of one micro-batch whose weight half alone is still to run."""
        if not self.problem.moments:
            return np.zeros_like(self.held_bytes)
        return self.geometry.deferred(self.problem.deferred_bytes)

    @cached_property
    def cut_bytes(self) -> FloatArray:
        """[downsets] activations + gradients crossing."""
        crossed: FloatArray = self.geometry.crossed @ (
            self.problem.forward_bytes + self.problem.gradient_bytes
        )
        return crossed

    @cached_property
    def work_again_seconds(self) -> FloatArray:
        """[R, pairs] of a stage that computes its blocks again."""
        assert self.problem.recompute is not None
        return self.work_seconds + self.geometry.over_pairs(self.problem.recompute.seconds)

    @cached_property
    def held_again_bytes(self) -> FloatArray:
        """[pairs] of one micro-batch held whole, by a stage that computes its blocks again."""
        assert self.problem.recompute is not None
        return self.geometry.recomputed(self.problem.recompute.storage_bytes)

    @cached_property
    def working_bytes(self) -> FloatArray:
        """[pairs] alive while the backward of the stage runs, beyond what was kept for it."""
        return self.geometry.working(self.problem.working)

    @cached_property
    def working_again_bytes(self) -> FloatArray:
        """[pairs] of a stage that computes its blocks again."""
        assert self.problem.recompute is not None
        peak = self.geometry.working(self.problem.recompute.working)
        return peak + self.deferred_bytes if self.problem.moments else peak

    def room_bytes(self, kind: int, again: bool) -> FloatArray:
        """[pairs] the room on the kind for what forwards keep. ``again``: of a stage that computes its blocks again."""
        return self.free_bytes[kind] - (self.working_again_bytes if again else self.working_bytes)

    def used_bytes(self, kind: int, moments: Sequence[Held], *, again: bool) -> FloatArray:
        """[pairs] what the stage takes of the kind's memory at the fullest of these moments.

        Of what is there while a backward runs a part only: the chunks of a device are in backward one at a time.
        """
        full = self.problem.kinds[kind].capacity_bytes * (1 + TUNING.memory_tolerance)
        held = self.held_again_bytes if again else self.held_bytes
        working = self.working_again_bytes if again else self.working_bytes
        kept = np.maximum.reduce([whole * held + weights * self.deferred_bytes for whole, weights in moments])
        used: FloatArray = full - self.free_bytes[kind] + working / self.problem.chunks + kept
        return used

    def fits(self, kind: int, moments: Sequence[Held], *, again: bool = False) -> BoolArray:
        """[pairs] whether the stage fits the kind's memory at all of these moments.

        ``again``: computing its blocks again in backward.
        """
        free = self.room_bytes(kind, again)
        if beyond := self.problem.beyond.get((kind, tuple(moments), again)):
            free = free.copy()
            free[list(beyond)] -= list(beyond.values())
        held = self.held_again_bytes if again else self.held_bytes
        fitting = free >= 0
        for whole, weights in moments:
            needed = whole * held
            if weights:
                needed = needed + weights * self.deferred_bytes
            fitting = fitting & (needed <= free)
        return np.asarray(fitting, dtype=bool)

    def link_seconds(self, a: int, b: int) -> FloatArray:
        """[downsets] seconds of a cut between a stage on kind ``a`` and the next on kind ``b``."""
        problem = self.problem
        seconds: FloatArray = (
            problem.link_latency_seconds[a, b] + self.cut_bytes * problem.link_seconds_per_byte[a, b]
        )
        return seconds
