"""Costs of every bridge between a way to produce a value and a way to need it, as tables.

The steps of a pair do not depend on the value, only their seconds do: they are found once per mesh (dimensions renamed
in the order in which they appear, since only equality matters), and a table [sources, needs] is a matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from cost_models.arrays import FloatArray
from cost_models.conversion import (
    AxisChange,
    AxisLinks,
    CollectiveKind,
    Steps,
    buffer_share,
    expected_gradient,
    given_gradient,
    local_share,
    path,
)
from cost_models.layout import Partial, Placement, Replicate, Shard
from passes.search.feature.codes import (
    DEFERRED,
    WHOLE,
    digits,
    left_in_parts,
    needs_of,
    source_placements,
    summed_later,
)
from passes.shard.bridges import last_sum
from passes.shard.words import Need, Placements


@dataclass(frozen=True, eq=False)
class BridgeTable:
    """Per (source, need). ``copies``: bytes of the bridged value on a rank where it is not the produced tensor itself.
    ``buffers``: of the largest collective. ``allowed``: a parameter whose gradient is a part of a sum must be deferred."""

    seconds: FloatArray
    copies: FloatArray
    buffers: FloatArray
    allowed: np.ndarray[tuple[int, int], np.dtype[np.bool_]]


@dataclass(frozen=True, eq=False)
class _ScalableTable:
    """The part of a table that does not depend on the value's size."""

    forward: FloatArray
    """[pairs, step kinds] how often."""
    backward: FloatArray
    copies: FloatArray
    forward_buffers: FloatArray
    backward_buffers: FloatArray
    allowed: np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(eq=False)
class Bridges:
    """Tables for one mesh. Steps are numbered as they are met."""

    shape: tuple[int, ...]
    links: tuple[AxisLinks, ...]
    parameters: dict[object, list[tuple[float, float, float]]] = field(default_factory=dict)
    """Seconds, bytes and seconds of sums of every way to keep a parameter, as ``feature.problem`` makes them: numbers of
    micro-batches share them."""
    _kinds: dict[tuple[CollectiveKind, int, float], int] = field(default_factory=dict)
    _pairs: dict[tuple[int, int], tuple[dict[int, int], dict[int, int], float, float, float, bool]] = field(
        default_factory=dict
    )
    _seconds: dict[float, FloatArray] = field(default_factory=dict)
    """Seconds of every kind of step for a value of so many bytes."""
    _tables: dict[object, BridgeTable] = field(default_factory=dict)
    _shapes: dict[tuple[tuple[int, ...], tuple[int, ...]], _ScalableTable] = field(default_factory=dict)

    def table(
        self, sources: Sequence[int], needs: Sequence[int], size_bytes: float, gradient: bool
    ) -> BridgeTable:
        """Make the table for a value of ``size_bytes`` as a whole; without a gradient only the forward steps."""
        key = (tuple(sources), tuple(needs))
        known = self._tables.get((key, size_bytes, gradient))
        if known is None:
            if key not in self._shapes:
                self._shapes[key] = self._shape(*key)
            known = self._table(self._shapes[key], (len(sources), len(needs)), size_bytes, gradient)
            self._tables[key, size_bytes, gradient] = known
        return known

    def _table(
        self, shape: _ScalableTable, grid: tuple[int, int], size_bytes: float, gradient: bool
    ) -> BridgeTable:
        width = shape.forward.shape[1]
        each = self._seconds.get(size_bytes)
        if each is None or len(each) < width:
            steps = [self.links[axis].seconds(kind, share * size_bytes) for kind, axis, share in self._kinds]
            each = self._seconds[size_bytes] = np.array(steps)
        each = each[:width]
        count = shape.forward + shape.backward if gradient else shape.forward
        buffers = np.maximum(shape.forward_buffers, shape.backward_buffers if gradient else 0.0)
        return BridgeTable(
            (count @ each).reshape(grid),
            (shape.copies * size_bytes).reshape(grid),
            (buffers * size_bytes).reshape(grid),
            (shape.allowed | (not gradient)).reshape(grid),
        )

    def sum_seconds(self, sources: Sequence[int], needs: Sequence[int], size_bytes: float) -> FloatArray:
        """[sources, needs] seconds of the sum of a value's gradient beside which readers of the bridge may compute."""
        found = np.zeros((len(sources), len(needs)))
        for column, need in enumerate(needs):
            if all(not own.partial_gradient for own in needs_of(need, len(self.shape))):
                continue
            for row, source in enumerate(sources):
                step = last_sum_of(source, need, self.shape)
                if step is not None:
                    found[row, column] = self.links[step.axis].seconds(step.kind, step.share * size_bytes)
        return found

    def gather_seconds(
        self, sources: Sequence[int], needs: Sequence[int], size_bytes: float, part: float
    ) -> tuple[FloatArray, FloatArray]:
        """[gather of a parameter that is started ahead, sum on its way back; sources, needs] seconds by itself, and of its
        ``part`` of a collective of a whole step of gathers."""
        alone, merged = np.zeros((2, 2, len(sources), len(needs)))
        for row, source in enumerate(sources):
            for column, need in enumerate(needs):
                for way, step in enumerate(_gathered_ahead(source, need, self.shape)):
                    if step is not None:
                        size, links = step.share * size_bytes, self.links[step.axis]
                        alone[way, row, column] = links.seconds(step.kind, size)
                        merged[way, row, column] = part * links.seconds(step.kind, size / part)
        return alone, merged

    def growing(self, sources: Sequence[int], needs: Sequence[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Tell per (source, need) whether a rank has more of a value once it is bridged."""
        axes = len(self.shape)
        had = np.array([local_share(source_placements(code, axes), self.shape) for code in sources])
        wanted = [[need.placement for need in needs_of(code, axes)] for code in needs]
        has = np.array([local_share(placements, self.shape) for placements in wanted])
        return np.asarray(has[None, :] > had[:, None])

    def summed_where_in_parts(
        self, sources: Sequence[int], needs: Sequence[int]
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Tell per (source, need) whether the need leaves parts along each axis on which the source's gradient is summed
        later."""
        axes = len(self.shape)
        later = np.array([summed_later(code, axes) for code in sources], dtype=np.int64)
        parts = np.array([left_in_parts(code, axes) for code in needs], dtype=np.int64)
        return np.asarray(later[:, None] & ~parts[None, :] == 0)

    def _shape(self, sources: tuple[int, ...], needs: tuple[int, ...]) -> _ScalableTable:
        pairs = [self._pair(source, need) for source in sources for need in needs]
        forward = np.zeros((len(pairs), len(self._kinds)))
        backward = np.zeros_like(forward)
        for row, (there, back, *_) in enumerate(pairs):
            for kind, count in there.items():
                forward[row, kind] = count
            for kind, count in back.items():
                backward[row, kind] = count
        columns = [np.array([pair[i] for pair in pairs]) for i in range(2, 6)]
        return _ScalableTable(forward, backward, columns[0], columns[1], columns[2], columns[3])

    def _pair(
        self, source: int, need: int
    ) -> tuple[dict[int, int], dict[int, int], float, float, float, bool]:
        known = self._pairs.get((source, need))
        if known is None:
            there, back, allowed = bridge_steps(source, need, self.shape)
            needed = tuple(n.placement for n in needs_of(need, len(self.shape)))
            known = self._pairs[source, need] = (
                self._counted(there),
                self._counted(back),
                local_share(needed, self.shape) if there else 0.0,
                max((buffer_share(s, self.shape[s.axis]) for s in there), default=0.0),
                max((buffer_share(s, self.shape[s.axis]) for s in back), default=0.0),
                allowed,
            )
        return known

    def _counted(self, steps: Steps) -> dict[int, int]:
        counts: dict[int, int] = {}
        for step in steps:
            number = self._kinds.setdefault((step.kind, step.axis, step.share), len(self._kinds))
            counts[number] = counts.get(number, 0) + 1
        return counts


@cache
def bridge_steps(source: int, need: int, shape: tuple[int, ...]) -> tuple[Steps, Steps, bool]:
    """(forward, backward, allowed) of a pair of codes.

    The gradient of a deferred parameter stays a sum of parts. A parameter whose gradients are said to be whole may not be
    read in a way that gives parts: all its gradients on an axis are summed at once or all later.
    """
    digit = digits(source, len(shape))
    produced, needed = source_placements(source, len(shape)), needs_of(need, len(shape))
    there, back = steps_between(produced, needed, tuple(d == DEFERRED for d in digit), shape)
    given = given_gradient(needed)
    allowed = not any(d == WHOLE and isinstance(g, Partial) for d, g in zip(digit, given, strict=True))
    return there, back, allowed


@cache
def _gathered_ahead(
    source: int, need: int, shape: tuple[int, ...]
) -> tuple[AxisChange | None, AxisChange | None]:
    there, back, _ = bridge_steps(source, need, shape)
    return gather_ahead(there, back)


def gather_ahead(there: Steps, back: Steps) -> tuple[AxisChange | None, AxisChange | None]:
    """Return the first step of a parameter's bridge and the last of its way back, if they are a gather and its sum."""
    if not there or there[0].kind != "all_gather":
        return None, None
    return there[0], back[-1] if back and back[-1].kind == "reduce_scatter" else None


@cache
def last_sum_of(source: int, need: int, shape: tuple[int, ...]) -> AxisChange | None:
    """Return the step of a pair of codes that ``passes.shard.bridges.last_sum`` tells of."""
    later = tuple(d == DEFERRED for d in digits(source, len(shape)))
    produced, needed = source_placements(source, len(shape)), needs_of(need, len(shape))
    return summed_beside(produced, needed, later, shape)


def summed_beside(
    produced: Placements, needed: Sequence[Need], deferred: Sequence[bool], shape: tuple[int, ...]
) -> AxisChange | None:
    """Return the step back of the last op of a bridge, if it is a sum that runs beside what reads the bridge."""
    settled = tuple(
        Need(Replicate()) if size == 1 or (later and need.partial_gradient) else need
        for later, need, size in zip(deferred, needed, shape, strict=True)
    )
    produced = tuple(Replicate() if size == 1 else p for p, size in zip(produced, shape, strict=True))
    there = path(produced, tuple(n.placement for n in settled), shape)
    back = path(given_gradient(settled), expected_gradient(produced), shape)
    return last_sum(there, back, produced, settled)


def steps_between(
    produced: Placements, needed: tuple[Need, ...], deferred: tuple[bool, ...], shape: tuple[int, ...]
) -> tuple[Steps, Steps]:
    """Steps as ``cost_models.conversion.steps`` has them, except that gradients of deferred axes stay parts of a sum."""
    expected = tuple(
        Partial() if later else place
        for later, place in zip(deferred, expected_gradient(produced), strict=True)
    )
    there = _path(produced, tuple(n.placement for n in needed), shape)
    return there, _path(given_gradient(needed), expected, shape)


def _path(source: Placements, target: Placements, shape: tuple[int, ...]) -> Steps:
    """``path`` with dimensions renamed: many pairs share one search. Steps keep kinds, axes and shares only."""
    if source == target:
        return ()
    names: dict[int, int] = {}

    def renamed(placement: Placement) -> Placement:
        if isinstance(placement, Shard):
            return Shard(names.setdefault(placement.dim, len(names)))
        return placement if isinstance(placement, Partial) else Replicate()

    return path(tuple(map(renamed, source)), tuple(map(renamed, target)), shape)
