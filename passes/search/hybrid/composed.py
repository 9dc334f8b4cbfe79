"""The ranges of pieces on one kind of group, with and without their blocks computed again: what a stage can cost.

pieces ─► recipes at every price of memory (``pieces``) ─► ranges (``ranges``) ─► the fastest that fits, and a bound on it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from passes.lower.job import Job
from passes.search.hybrid.joints import Pieces
from passes.search.hybrid.pieces import GroupKind, PieceSearch, Prices, Recipes, cheaper
from passes.search.hybrid.ranges import BUFFER, HELD, ONCE, SAVED, SECONDS, STATE, Layouts, Ranges, ranges_of
from passes.search.words import RecomputeMode

SCALE = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)
"""Prices of a whole device's memory, in steps: nothing, and from where it hardly counts to where it decides. By hand."""


@dataclass(frozen=True, eq=False)
class Fastest:
    """The fastest ways to run stages that fit. Arrays: [unlike ranges]."""

    seconds: FloatArray
    """Seconds per micro-batch; infinite where nothing fits."""
    price: IntArray
    """The price whose layouts are taken."""
    again: IntArray
    """Blocks computed again in backward: the first ones."""


@dataclass(frozen=True, eq=False)
class Composed:
    """Stages on one kind of group at one number of samples."""

    pieces: Pieces
    prices: Prices
    held: FloatArray
    """[prices] micro-batches that each price of what is held was made for."""
    recipes: tuple[tuple[Recipes, ...], ...]
    """Per class of pieces: keeping activations, and with the blocks computed again, where there are blocks."""
    ranges: tuple[Ranges, ...]
    """Ranges of either, and of the cheaper of both for each piece."""

    @property
    def number(self) -> IntArray:
        """[first piece, last + 1] which of the unlike ranges it is; -1: none."""
        return self.ranges[0].number

    @cached_property
    def blocks(self) -> FloatArray:
        """[unlike ranges] how many blocks each has."""
        before = np.concatenate([[0], np.cumsum([bool(name) for name in self.pieces.blocks])])
        found = np.zeros(int(self.number.max()) + 1)
        first, end = np.nonzero(self.number >= 0)
        found[self.number[first, end]] = before[end] - before[first]
        return found

    def plane(self, seconds: FloatArray) -> FloatArray:
        """[first piece, last + 1] seconds of each range; infinite where there is none."""
        return np.where(self.number >= 0, seconds[self.number], np.inf)

    def fastest(
        self, microbatches: int, held: int, room_bytes: float, recompute: RecomputeMode = "auto"
    ) -> Fastest:
        """Find the fastest ways that fit. ``held``: micro-batches that the stage holds at once.

        At each price as many blocks as must are computed again, or none, or all, if that is asked for: time and memory
        between none and all of them go by their number, which is exact where blocks are equal.
        """
        kept = self.ranges[0].amounts
        seconds, needed = (kept[SECONDS] + kept[ONCE]) / microbatches, _needed(kept, held)
        again = np.zeros(seconds.shape)
        if len(self.recipes) > 1 and recompute != "none":
            whole, every = self.ranges[1].amounts, np.broadcast_to(self.blocks[:, None], again.shape)
            blocks = np.maximum(every, 1.0)
            saved = (needed - _needed(whole, held)) / blocks
            short = needed + whole[SAVED] - room_bytes
            with np.errstate(divide="ignore", invalid="ignore"):
                count = np.where(saved > 0, np.ceil(short / saved * (1 - ROUNDING)), np.inf)
            again = np.where(needed > room_bytes, np.minimum(np.maximum(count, 1.0), every), 0.0)
            again = every if recompute == "full" else again
            needed = needed - again * saved + np.where(again > 0, whole[SAVED], 0.0)
            slower = (whole[SECONDS] + whole[ONCE]) / microbatches - seconds
            seconds = seconds + slower * again / blocks
        seconds = np.where(needed <= room_bytes * (1 + ROUNDING), seconds, np.inf)
        price = seconds.argmin(axis=1)
        at = np.arange(len(price)), price
        return Fastest(seconds[at], price, again[at].astype(np.int64))

    def least(self, microbatches: int, held: int, room_bytes: float) -> FloatArray:
        """[unlike ranges] seconds per micro-batch that no way that fits is below.

        Lagrange: at any price, seconds + price · (bytes - room) of the cheapest way is a bound; the best price's is taken.
        """
        found: FloatArray = self.priced(microbatches, held, room_bytes).max(axis=1)
        return found

    def priced(self, microbatches: int, held: int, room_bytes: float) -> FloatArray:
        """[unlike ranges, scales of prices] seconds + price · (bytes - room) of the cheapest way, per micro-batch."""
        a = self.ranges[-1].amounts
        found = a[SECONDS] + a[ONCE] + self.prices.held * a[HELD]
        found = found + self.prices.state * (a[STATE] - room_bytes)
        # the first scale is no price, so that it stands there once
        paid = slice(len(SCALE), None) if self.held[-1] <= held else slice(1, len(SCALE))
        return np.concatenate([found[:, :1], found[:, paid]], axis=1) / microbatches

    def weight_bytes(self, held: int) -> float:
        """Bytes of a stage of all pieces, whose memory counts for nothing: the measure for sharing a device out."""
        kept = self.ranges[0].amounts[:, int(self.number[0, len(self.pieces)]), 0]
        return float(kept[STATE] + held * kept[HELD])


ROUNDING = 1e-9
"""Relative error that counts of blocks may have from rounding."""


def _needed(amounts: FloatArray, held: int) -> FloatArray:
    """[unlike ranges, prices] bytes, but for what is made anew while a block is computed again."""
    found: FloatArray = amounts[STATE] + held * amounts[HELD] + amounts[BUFFER]
    return found


def composed(
    search: PieceSearch, group: GroupKind, job: Job, microbatches: int, most_held: int, step_seconds: float
) -> Composed:
    """Compose the ranges of a group. ``most_held``: micro-batches that its stages may hold at once; ``step_seconds``:
    about those of a step, which scales the prices."""
    capacity = min(search.cluster.devices[rank].memory_bytes for rank in group.ranks)
    scale = np.array(SCALE) * step_seconds / capacity
    held = np.repeat([1.0, float(most_held)], [len(scale), len(scale) - 1])
    state = np.concatenate([scale, scale[1:]])
    prices = Prices(state, state * held)
    kinds = range(len(search.pieces.first))

    def recipes(*, again: bool) -> tuple[Recipes, ...]:
        return tuple(search.recipes(k, group, job, microbatches, prices, again=again) for k in kinds)

    def ranges(own: Sequence[Recipes], saved_bytes: FloatArray | None = None) -> Ranges:
        free = np.zeros((len(own), len(Layouts(own))))
        return ranges_of(search.pieces.kind, own, free, free, saved_bytes)

    kept = recipes(again=False)
    if not any(search.pieces.blocks):
        return Composed(search.pieces, prices, held, (kept,), (ranges(kept),))
    anew = recipes(again=True)
    either = [cheaper(one, other) for one, other in zip(kept, anew, strict=True)]
    found = ranges(kept), ranges(anew, search.saved(kept)), ranges(either)
    return Composed(search.pieces, prices, held, (kept, anew), found)
