"""The ranges of pieces on one kind of group, with and without their blocks computed again: what a stage can cost.

pieces ─► recipes at every price of memory (``pieces``) ─► ranges (``ranges``) ─► columns: (computed again?, price)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from passes.lower.job import Job
from passes.search.hybrid.joints import Pieces
from passes.search.hybrid.pieces import GroupKind, PieceSearch, Prices, Recipes
from passes.search.hybrid.ranges import BUFFER, HELD, ONCE, SAVED, SECONDS, STATE, Layouts, Ranges, ranges_of

SCALE = (0.0, 1 / 32, 1 / 4, 2.0)
"""Prices of a whole device's memory, in steps: nothing, and from where it hardly counts to where it decides. By hand."""


@dataclass(frozen=True, eq=False)
class Composed:
    """Stages on one kind of group at one number of samples. Columns are prices, first those that keep activations."""

    pieces: Pieces
    prices: Prices
    held: FloatArray
    """[prices] micro-batches that each price of what is held was made for."""
    recipes: tuple[tuple[Recipes, ...], ...]
    """Per mode (kept, computed again), per class of pieces."""
    ranges: tuple[Ranges, ...]
    """Per mode."""

    @property
    def number(self) -> IntArray:
        """[first piece, last + 1] which of the unlike ranges it is; -1: none."""
        return self.ranges[0].number

    def again(self, column: int) -> bool:
        """Tell whether a column computes blocks again."""
        return column >= len(self.prices)

    @cached_property
    def amounts(self) -> FloatArray:
        """[rows, unlike ranges, columns]"""
        found = np.concatenate([r.amounts for r in self.ranges], axis=2)
        found[SAVED, :, : len(self.prices)] = 0.0
        return found

    def fastest(self, microbatches: int, held: int, room_bytes: float) -> tuple[FloatArray, IntArray]:
        """[unlike ranges] seconds per micro-batch of the fastest way that fits, infinite without any; and its column.

        ``held``: micro-batches that the stage holds at once.
        """
        a = self.amounts
        needed = a[STATE] + held * a[HELD] + a[BUFFER] + a[SAVED]
        seconds = np.where(needed <= room_bytes, (a[SECONDS] + a[ONCE]) / microbatches, np.inf)
        column = seconds.argmin(axis=1)
        return np.take_along_axis(seconds, column[:, None], axis=1)[:, 0], column

    def least(self, microbatches: int, held: int, room_bytes: float) -> FloatArray:
        """[unlike ranges] seconds per micro-batch that no way that fits is below.

        Lagrange: at any price, seconds + price · (bytes - room) of the cheapest way is a bound; the best price's is taken.
        """
        a = self.amounts
        state = np.tile(self.prices.state, len(self.ranges))
        per_held = np.tile(self.prices.held, len(self.ranges))
        priced = a[SECONDS] + a[ONCE] + state * a[STATE] + per_held * a[HELD] - state * room_bytes
        usable = np.tile(self.held <= held, len(self.ranges))
        priced = np.where(usable, priced, -np.inf).reshape(len(priced), len(self.ranges), -1)
        found: FloatArray = priced.max(axis=2).min(axis=1) / microbatches
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
    modes = (False, True) if any(search.pieces.blocks) else (False,)
    recipes: list[tuple[Recipes, ...]] = []
    ranges: list[Ranges] = []
    for again in modes:
        kinds = range(len(search.pieces.first))
        own = tuple(search.recipes(k, group, job, microbatches, prices, again=again) for k in kinds)
        free = np.zeros((len(own), len(Layouts(own))))
        recipes.append(own)
        ranges.append(
            ranges_of(search.pieces.kind, own, free, free, search.saved(recipes[0]) if again else None)
        )
    return Composed(search.pieces, prices, held, tuple(recipes), tuple(ranges))
