"""The ranges of pieces on one kind of group, with and without their blocks computed again: what a stage can cost.

pieces ─► recipes at every price of memory (``pieces``) ─► ranges (``ranges``) ─► the fastest that fits, and a bound on it
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from passes.lower.job import Job
from passes.search.beside_tensors import least_room_bytes
from passes.search.hybrid.recipes.joints import Pieces
from passes.search.hybrid.recipes.mixes import Mixes
from passes.search.hybrid.recipes.pieces import GroupKind, PieceSearch, Prices, Recipes, cheaper
from passes.search.hybrid.recipes.ranges import (
    BUFFER,
    HELD,
    ONCE,
    SAVED,
    SECONDS,
    STATE,
    Layouts,
    Ranges,
    largest_of_ranges,
    least_by_count,
    least_of_ranges,
    ranges_of,
)
from passes.search.words import RecomputeMode

SCALE = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)
"""Prices of a whole device's memory, in steps: nothing, and from where it hardly counts to where it decides. By hand."""


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
    """Ranges of either."""
    either: FloatArray
    """[unlike ranges, prices] lower bound on a range whose pieces each choose freely to keep or to recompute."""
    _counted: dict[int, FloatArray] = field(default_factory=dict)

    @property
    def number(self) -> IntArray:
        """[first piece, last + 1] which of the unlike ranges it is; -1: none."""
        return self.ranges[0].number

    @cached_property
    def buffers(self) -> FloatArray:
        """[unlike ranges] bytes of the largest buffer that each has at least, whatever is chosen."""
        each = np.min([[own.floor_bytes for own in recipes] for recipes in self.recipes], axis=0)
        return largest_of_ranges(self.pieces.kind, np.asarray(each))

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
    def _recipes(self) -> tuple[tuple[bytes, tuple[int, bool]], ...]:
        """Bytes that say what all ranges take by a recipe, and the recipe: price, and whether blocks are computed again."""
        return tuple(
            (own.amounts[:SAVED, :, price].tobytes(), (price, bool(again)))
            for again, own in enumerate(self.ranges)
            for price in range(len(self.prices))
        )

    def mixes(self, microbatches: int, held: int, recompute: RecomputeMode = "auto") -> Mixes:
        """Return the ways to run stages that hold ``held`` micro-batches at once."""
        allowed = {"none": (False,), "full": (True,), "auto": (False, True)}[
            recompute if self._anew else "none"
        ]
        unlike: dict[bytes, tuple[int, bool]] = {}  # the recipes allowed that differ in what any range takes
        for amounts_of_all, way in self._recipes:
            if way[1] in allowed:
                unlike.setdefault(amounts_of_all, way)
        ways = tuple(unlike.values())
        amounts = np.stack([self.ranges[again].amounts[:, :, price] for price, again in ways], axis=2)
        return Mixes(
            ways,
            (amounts[SECONDS] + amounts[ONCE]) / microbatches,
            amounts[STATE] + held * amounts[HELD] + amounts[BUFFER],
            self.ranges[-1].amounts[SAVED, :, 0],
            np.minimum(self.blocks, 1.0) if self.pieces.parted else self.blocks,
        )

    @property
    def _anew(self) -> bool:
        """True if there are blocks that can be computed again."""
        return len(self.recipes) > 1

    def priced(
        self,
        microbatches: int,
        held: int,
        room_bytes: float,
        recompute: RecomputeMode = "auto",
        longest: int | None = None,
    ) -> FloatArray:
        """[unlike ranges, kinds of ways, scales of prices] seconds + price · (bytes - room) of the cheapest way.

        Per micro-batch. Lagrange: of each kind no way that fits is below any of them. Kinds: keeping everything, and
        computing some blocks again, which takes room for one; or, of ranges of up to ``longest`` pieces if that is given,
        computing exactly so many blocks again.
        """
        least = self._least_of_kinds(recompute, longest)
        again = self.ranges[-1].amounts[SAVED, :, :1] * np.ones(least.shape[1])
        again[:, : recompute != "full" or longest is not None] = 0.0  # the first kind keeps everything
        beside = again + self.buffers[:, None]
        cost = least + self.prices.state * (beside[..., None] - room_bytes)
        return self._at_held(cost, held) / microbatches

    def longest(self, microbatches: int, most_seconds: float) -> int:
        """Return the most pieces of a stage of at most ``most_seconds``, however much memory it takes."""
        least = self.ranges[0].least[:, 0] / microbatches
        first, end = np.nonzero(self.plane(least) <= most_seconds)
        return int((end - first).max(initial=1))

    def _least_of_kinds(self, recompute: RecomputeMode, longest: int | None) -> FloatArray:
        """[unlike ranges, kinds of ways, prices] what the cheapest way costs."""
        if not self._anew or longest is None:
            places = {"none": [0], "full": [-2], "auto": [0, -1]}[recompute if self._anew else "none"]
            each = [*(own.least for own in self.ranges), self.either]
            return np.stack([each[place] for place in places], axis=1)
        if longest not in self._counted:
            kept, anew = self.recipes
            blocks = [bool(self.pieces.blocks[first]) for first in self.pieces.first]
            again = [own if block else None for own, block in zip(anew, blocks, strict=True)]
            self._counted[longest] = least_by_count(self.ranges[0], self.pieces.kind, kept, again, longest)
        found = self._counted[longest]
        if recompute == "none":
            return found[:, :1]
        if recompute == "full":
            every = self.blocks[:, None] == np.arange(found.shape[1])
            return np.where(every[..., None], found, np.inf)
        return found

    def _at_held(self, cost: FloatArray, held: int) -> FloatArray:
        """[…, scales of prices] from [..., prices], where ``held`` micro-batches are held.

        What the cheapest way costs is concave in the prices: between two that it is known for, it is not below the mean.
        """
        each = len(SCALE) - 1  # the first scale is no price, so that it stands there once
        paid = [cost[..., 1 + each * f : 1 + each * (f + 1)] for f in range(len(self.families))]
        above = bisect_left(self.families, held)
        between = paid[min(above, len(paid) - 1)]
        if 0 < above < len(paid) and held < self.families[above]:
            low, high = self.families[above - 1], self.families[above]
            share = (held - low) / (high - low)
            between = (1 - share) * paid[above - 1] + share * between
        return np.concatenate([cost[..., :1], between], axis=-1)


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
    capacity = least_room_bytes(search.cluster, group.ranks)
    scale = np.array(SCALE) * step_seconds / capacity
    state = np.concatenate([scale[:1], *[scale[1:] for _ in families]])
    prices = Prices(state, np.concatenate([scale[:1], *[scale[1:] * held for held in families]]))
    kinds = range(len(search.pieces.first))

    def ranges(own: Sequence[Recipes], saved_bytes: FloatArray | None = None) -> Ranges:
        free = np.zeros((len(own), len(Layouts(own))))
        return ranges_of(search.pieces.kind, own, free, free, saved_bytes)

    kept = tuple(search.recipes(kind, group, job, microbatches, prices) for kind in kinds)
    if not any(search.pieces.blocks):
        alone = ranges(kept)
        return Composed(search.pieces, prices, families, (kept,), (alone,), alone.least)
    anew = tuple(
        search.recipes(kind, group, job, microbatches, prices, again=True)
        if search.pieces.blocks[first]
        else own
        for kind, first, own in zip(kinds, search.pieces.first, kept, strict=True)
    )
    _, either = least_of_ranges(
        search.pieces.kind, [cheaper(one, other) for one, other in zip(kept, anew, strict=True)]
    )
    found = ranges(kept), ranges(anew, search.saved(kept))
    return Composed(search.pieces, prices, families, (kept, anew), found, either)
