"""The ranges of pieces on one kind of group, with and without their blocks computed again: what a stage can cost.

pieces ─► recipes at every price of memory (``pieces``) ─► ranges (``ranges``) ─► the fastest that fits, and a bound on it
"""

from __future__ import annotations

from bisect import bisect_left
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


def families_of(most_held: int) -> tuple[int, ...]:
    """Return the numbers of micro-batches held that prices are made for: powers of two, the last not below."""
    return tuple(1 << i for i in range((most_held - 1).bit_length() + 1))


@dataclass(frozen=True)
class Mix:
    """A way to run a stage: its first ``count`` blocks as one recipe says, everything else as another.

    A recipe is a price of memory whose layouts are taken, and whether blocks are computed again in backward.
    """

    price: int
    again: bool
    first_price: int
    first_again: bool
    count: int

    def of_piece(self, blocks_before: int, *, block: bool) -> tuple[int, bool]:
        """Return price and recomputation of a piece behind so many blocks of its stage."""
        if block and blocks_before < self.count:
            return self.first_price, self.first_again
        return self.price, self.again and block


@dataclass(frozen=True, eq=False)
class Fastest:
    """The fastest ways to run stages that fit. Arrays: [unlike ranges]."""

    seconds: FloatArray
    """Seconds per micro-batch; infinite where nothing fits."""
    rest: IntArray
    """The recipe of most pieces: its place among ``Composed.ways``."""
    first: IntArray
    """The recipe of the first blocks."""
    count: IntArray
    """The number of blocks that follow it."""


@dataclass(frozen=True, eq=False)
class Composed:
    """Stages on one kind of group at one number of samples."""

    pieces: Pieces
    prices: Prices
    families: tuple[int, ...]
    """Micro-batches held at once that prices of what is held are made for, rising: those of each scale but 0 in turn."""
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

    @cached_property
    def ways(self) -> tuple[tuple[int, bool], ...]:
        """The recipes that differ in what any range takes: price, and whether blocks are computed again."""
        found: dict[bytes, tuple[int, bool]] = {}
        for again, own in enumerate(self.ranges[: len(self.recipes)]):
            for price in range(len(self.prices)):
                found.setdefault(own.amounts[:SAVED, :, price].tobytes(), (price, bool(again)))
        return tuple(found.values())

    def mix(self, fastest: Fastest, number: int) -> Mix:
        """Return the fastest way to run a range."""
        rest, first = (self.ways[int(each[number])] for each in (fastest.rest, fastest.first))
        return Mix(*rest, *first, int(fastest.count[number]))

    def fastest(
        self, microbatches: int, held: int, room_bytes: float, recompute: RecomputeMode = "auto"
    ) -> Fastest:
        """Find the fastest ways that fit. ``held``: micro-batches that the stage holds at once.

        Every recipe alone, and any two, of which the leaner has as many blocks as it must: time and memory between them
        go by the number of blocks, which is exact where blocks are equal.
        """
        allowed = {"none": (False,), "full": (True,), "auto": (False, True)}[
            recompute if self._anew else "none"
        ]
        ways = [w for w, (_, again) in enumerate(self.ways) if again in allowed]
        amounts = np.stack([self.ranges[a].amounts[:, :, p] for p, a in (self.ways[w] for w in ways)], axis=2)
        anew = np.array([self.ways[w][1] for w in ways]) & (self.blocks[:, None] > 0)
        seconds = (amounts[SECONDS] + amounts[ONCE]) / microbatches
        needed = amounts[STATE] + held * amounts[HELD] + amounts[BUFFER]
        extra = self.ranges[-1].amounts[SAVED, :, :1]
        fits = needed + extra * anew <= room_bytes * (1 + ROUNDING)
        best = np.where(fits, seconds, np.inf)
        rest = best.argmin(axis=1)
        at = np.arange(len(best))
        found, first, count = best[at, rest], rest.copy(), np.zeros(len(best), dtype=np.int64)
        blocks = np.maximum(self.blocks[:, None], 1.0)
        for w in range(len(ways)):  # as the first blocks, leaner than the rest
            more = (needed - needed[:, w : w + 1]) / blocks
            short = needed + extra * (anew | anew[:, w : w + 1]) - room_bytes
            with np.errstate(divide="ignore", invalid="ignore"):
                some = np.where(more > 0, np.maximum(np.ceil(short / more * (1 - ROUNDING)), 1.0), np.inf)
            mixed = np.full(seconds.shape, np.inf)
            may = some < self.blocks[:, None]
            mixed[may] = (seconds + (seconds[:, w : w + 1] - seconds) * np.where(may, some, 0) / blocks)[may]
            own = mixed.argmin(axis=1)
            better = mixed[at, own] < found
            found = np.where(better, mixed[at, own], found)
            rest, first = np.where(better, own, rest), np.where(better, w, first)
            count = np.where(better, np.where(may, some, 0)[at, own], count).astype(np.int64)
        place = np.array(ways)
        return Fastest(found, place[rest], place[first], count)

    @property
    def _anew(self) -> bool:
        """True if there are blocks that can be computed again."""
        return len(self.recipes) > 1

    def least(
        self, microbatches: int, held: int, room_bytes: float, recompute: RecomputeMode = "auto"
    ) -> FloatArray:
        """[unlike ranges] seconds per micro-batch that no way that fits is below.

        Lagrange: at any price, seconds + price · (bytes - room) of the cheapest way is a bound; the best price's is taken.
        """
        each = self.priced(microbatches, held, room_bytes, recompute)
        found: FloatArray = np.minimum.reduce([own.max(axis=1) for own in each])
        return found

    def priced(
        self, microbatches: int, held: int, room_bytes: float, recompute: RecomputeMode = "auto"
    ) -> list[FloatArray]:
        """[unlike ranges, scales of prices] seconds + price · (bytes - room) of the cheapest way, per micro-batch.

        One array for ways that keep everything, and one for those that compute some blocks again, which takes room too.
        What the cheapest way costs is concave in the prices: between two that it is known for, it is not below the mean.
        """
        kept, anew, either = self.ranges[0], self.ranges[-2 % len(self.ranges)], self.ranges[-1]
        each = {"none": [kept], "full": [anew], "auto": [kept, either]}[recompute if self._anew else "none"]
        found = []
        for a in (own.amounts for own in each):
            cost = a[SECONDS] + a[ONCE] + self.prices.held * a[HELD]
            cost = cost + self.prices.state * (a[STATE] + a[SAVED] - room_bytes)
            found.append(self._at_held(cost, held) / microbatches)
        return found

    def _at_held(self, cost: FloatArray, held: int) -> FloatArray:
        """[unlike ranges, scales of prices] from [unlike ranges, prices], where ``held`` micro-batches are held."""
        each = len(SCALE) - 1  # the first scale is no price, so that it stands there once
        paid = [cost[:, 1 + each * f : 1 + each * (f + 1)] for f in range(len(self.families))]
        above = bisect_left(self.families, held)
        between = paid[min(above, len(paid) - 1)]
        if 0 < above < len(paid):
            low, high = self.families[above - 1], self.families[above]
            share = (held - low) / (high - low)
            between = (1 - share) * paid[above - 1] + share * between
        return np.concatenate([cost[:, :1], between], axis=1)

    def weight_bytes(self, held: int) -> float:
        """Bytes of a stage of all pieces, whose memory counts for nothing: the measure for sharing a device out."""
        kept = self.ranges[0].amounts[:, int(self.number[0, len(self.pieces)]), 0]
        return float(kept[STATE] + held * kept[HELD])


ROUNDING = 1e-9
"""Relative error that counts of blocks may have from rounding."""


def composed(
    search: PieceSearch,
    group: GroupKind,
    job: Job,
    microbatches: int,
    families: tuple[int, ...],
    step_seconds: float,
) -> Composed:
    """Compose the ranges of a group. ``families``: micro-batches held at once that prices are made for;
    ``step_seconds``: about those of a step, which scales the prices."""
    capacity = min(search.cluster.devices[rank].memory_bytes for rank in group.ranks)
    scale = np.array(SCALE) * step_seconds / capacity
    state = np.concatenate([scale[:1], *[scale[1:] for _ in families]])
    prices = Prices(state, np.concatenate([scale[:1], *[scale[1:] * held for held in families]]))
    kinds = range(len(search.pieces.first))

    def recipes(*, again: bool) -> tuple[Recipes, ...]:
        return tuple(search.recipes(k, group, job, microbatches, prices, again=again) for k in kinds)

    def ranges(own: Sequence[Recipes], saved_bytes: FloatArray | None = None) -> Ranges:
        free = np.zeros((len(own), len(Layouts(own))))
        return ranges_of(search.pieces.kind, own, free, free, saved_bytes)

    kept = recipes(again=False)
    if not any(search.pieces.blocks):
        return Composed(search.pieces, prices, families, (kept,), (ranges(kept),))
    anew = recipes(again=True)
    either = [cheaper(one, other) for one, other in zip(kept, anew, strict=True)]
    saved = search.saved(kept)
    found = ranges(kept), ranges(anew, saved), ranges(either, saved)
    return Composed(search.pieces, prices, families, (kept, anew), found)
