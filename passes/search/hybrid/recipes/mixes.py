"""Ways to run a stage: one recipe for all its pieces, or two, of which the leaner is that of its first blocks.

    count · leaner recipe's blocks │ the rest as the faster recipe says

A recipe is a price of memory whose layouts are taken, and whether blocks are computed again in backward. Time and memory of
a mix go by its number of blocks, which is exact where blocks are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import FloatArray, IntArray

ROUNDING = 1e-9
"""Relative error that counts of blocks may have from rounding."""


@dataclass(frozen=True)
class Mix:
    """A way to run a stage: its first ``count`` blocks as one recipe says, everything else as another."""

    price: int
    again: bool
    first_price: int
    first_again: bool
    count: int

    @property
    def mixed(self) -> bool:
        """Tell whether it has two recipes."""
        return (self.price, self.again) != (self.first_price, self.first_again)

    def of_piece(self, blocks_before: int, *, block: bool) -> tuple[int, bool]:
        """Return price and recomputation of a piece behind so many blocks of its stage."""
        if block and blocks_before < self.count:
            return self.first_price, self.first_again
        return self.price, self.again and block


@dataclass(frozen=True, eq=False)
class Fastest:
    """The fastest ways that fit. Arrays: [unlike ranges]."""

    seconds: FloatArray
    """Seconds per micro-batch; infinite where nothing fits."""
    rest: IntArray
    """The recipe of most pieces: its place among the ways."""
    first: IntArray
    """The recipe of the first blocks."""
    count: IntArray
    """The number of blocks that follow it."""


@dataclass(frozen=True, eq=False)
class Mixes:
    """The recipes of all ranges of one kind of group, where stages hold some number of micro-batches at once."""

    ways: tuple[tuple[int, bool], ...]
    """The price of each recipe, and whether it computes blocks again."""
    seconds: FloatArray
    """[unlike ranges, ways] seconds per micro-batch."""
    needed: FloatArray
    """[unlike ranges, ways] bytes, but for what is made anew while a block is computed again."""
    extra: FloatArray
    """[unlike ranges] bytes that are made anew then."""
    blocks: FloatArray
    """[unlike ranges] how many blocks each has."""

    def mix(self, fastest: Fastest, number: int) -> Mix:
        """Return the fastest way to run a range."""
        rest, first = (self.ways[int(each[number])] for each in (fastest.rest, fastest.first))
        return Mix(*rest, *first, int(fastest.count[number]))

    def fastest(self, room_bytes: float | FloatArray, most_seconds: float = np.inf) -> Fastest:
        """Find the fastest ways that fit, of ranges that may take at most ``most_seconds``: as few blocks as must are the
        leaner recipe's. ``room_bytes``: of all, or [unlike ranges]."""
        short = np.flatnonzero(self.seconds.min(axis=1, initial=np.inf) <= most_seconds)
        own = self._fastest_of(short, np.broadcast_to(room_bytes, len(self.seconds))[short, None])
        found = Fastest(np.full(len(self.seconds), np.inf), *np.zeros((3, len(self.seconds)), dtype=np.int64))
        for every, each in zip(vars(found).values(), vars(own).values(), strict=True):
            every[short] = each
        return found

    def _fastest_of(self, rows: NDArray[np.intp], room_bytes: FloatArray) -> Fastest:
        seconds, needed, alone = self.seconds[rows], self.needed[rows], self._alone[rows]
        at, whole = np.arange(len(rows)), self.blocks[rows, None]
        blocks, extra = np.maximum(whole, 1.0), self.extra[rows, None] * (whole > 0)
        best = np.where(alone <= room_bytes * (1 + ROUNDING), seconds, np.inf)
        rest = best.argmin(axis=1)
        found, first, count = best[at, rest], rest.copy(), np.zeros(len(best), dtype=np.int64)
        for w in range(len(self.ways)):
            frees = (needed - needed[:, w : w + 1]) / blocks
            slower = (seconds[:, w : w + 1] - seconds) / blocks
            short = needed + extra * (self._again | self._again[w]) - room_bytes
            with np.errstate(divide="ignore", invalid="ignore"):
                must = np.where(frees > 0, np.maximum(np.ceil(short / frees * (1 - ROUNDING)), 1.0), np.inf)
            may = must < whole
            must = np.where(may, must, 0.0)
            mixed = np.where(may, seconds + slower * must, np.inf)
            own = mixed.argmin(axis=1)
            better = mixed[at, own] < found
            found = np.where(better, mixed[at, own], found)
            rest, first = np.where(better, own, rest), np.where(better, w, first)
            count = np.where(better, must[at, own], count).astype(np.int64)
        return Fastest(found, rest, first, count)

    def cheapest(self, most_seconds: float, price: float) -> tuple[FloatArray, FloatArray]:
        """[unlike ranges] seconds + price · bytes of the cheapest ways of at most ``most_seconds``, and their bytes.

        As many blocks as the time allows are the leaner recipe's, or none: either is cheapest.
        """
        cost, size = np.full(len(self.seconds), np.inf), np.zeros(len(self.seconds))
        may = np.flatnonzero(self.seconds.min(axis=1, initial=np.inf) <= most_seconds)
        at, blocks = np.arange(len(may)), self.blocks[may, None]
        seconds, needed = self.seconds[may], self.needed[may]
        alone = np.where(seconds <= most_seconds, seconds + price * self._alone[may], np.inf)
        own = alone.argmin(axis=1)
        cost[may], size[may] = alone[at, own], self._alone[may][at, own]
        extra = self.extra[may, None, None] * ((self._again[:, None] | self._again) & (blocks > 0)[..., None])
        frees = (needed[:, :, None] - needed[:, None]) / np.maximum(blocks, 1.0)[..., None]
        slower = (seconds[:, None] - seconds[:, :, None]) / np.maximum(blocks, 1.0)[..., None]
        left = (most_seconds - seconds)[..., None]
        with np.errstate(divide="ignore", invalid="ignore"):
            many = np.minimum(np.floor(left / slower * (1 + ROUNDING)), (blocks - 1)[..., None])
        mixes = (frees > 0) & (slower > 0) & (left >= 0) & (many > 0)
        many = np.where(mixes, many, 0.0)
        bytes_of = needed[..., None] + extra - many * frees
        mixed = np.where(mixes, seconds[..., None] + many * slower + price * bytes_of, np.inf)
        flat = mixed.reshape(len(may), -1)
        pair = flat.argmin(axis=1)
        better = flat[at, pair] < cost[may]
        cost[may] = np.where(better, flat[at, pair], cost[may])
        size[may] = np.where(better, bytes_of.reshape(len(may), -1)[at, pair], size[may])
        return cost, size

    @cached_property
    def _again(self) -> NDArray[np.bool_]:
        return np.array([again for _, again in self.ways], dtype=bool)

    @cached_property
    def _alone(self) -> FloatArray:
        """[unlike ranges, ways] bytes of one recipe for all pieces."""
        extra: FloatArray = self.extra[:, None] * (self._again & (self.blocks[:, None] > 0))
        return self.needed + extra
