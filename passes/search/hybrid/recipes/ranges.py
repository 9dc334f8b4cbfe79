"""Stages as ranges of pieces: what each costs at each price, by (min, +) products of its pieces' recipes.

    least(B B B)[arrives, leaves] = min over the layouts between of least(B) + least(B) + least(B)

Ranges of equal pieces are one: 80 equal layers between an embedding and a head make 241 unlike ranges, not 3,403. The
amounts (seconds, bytes) of the cheapest way go along; which layout it has at which joint, ``walk`` finds again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from passes.search.hybrid.recipes.pieces import Least, Recipes
from passes.shard.words import Placements
from passes.timings import phase

SECONDS, ONCE, STATE, HELD, BUFFER, SAVED = range(6)
"""Rows of the amounts of ranges. The last: the most that running one of the pieces again makes anew."""


@dataclass(frozen=True, eq=False)
class _Grown:
    """Ranges of one length. [ranges, prices, layouts at the end]; ``amounts`` with the rows first."""

    least: FloatArray
    amounts: FloatArray


@dataclass(frozen=True, eq=False)
class Ranges:
    """All ranges of pieces. ``number[first, last + 1]``: which of the unlike ranges it is, -1 where there is none."""

    number: IntArray
    least: FloatArray
    """[unlike ranges, prices] seconds per step and what memory costs: no way is below."""
    amounts: FloatArray
    """[rows, unlike ranges, prices] of the ways that are chosen."""


class Layouts:
    """Numbers for the layouts at joints, one numbering for all pieces. 0: a joint without a stream."""

    def __init__(self, recipes: Sequence[Least]) -> None:
        found: dict[Placements | None, int] = {None: 0}
        for own in recipes:
            for layout in (*own.arriving, *own.leaving):
                found.setdefault(layout, len(found))
        self.number = found

    def __len__(self) -> int:
        return len(self.number)

    def square(self, own: Least, values: FloatArray, missing: float) -> FloatArray:
        """[prices, arrives, leaves] over all layouts, from an array over a recipe's own."""
        rows, columns = ([self.number[x] for x in side] for side in (own.arriving, own.leaving))
        found = np.full((len(values), len(self), len(self)), missing)
        found[np.ix_(range(len(values)), rows, columns)] = values
        return found


@phase("ranges")
def ranges_of(
    kinds: Sequence[int],
    recipes: Sequence[Recipes],
    arriving_cost: FloatArray,
    leaving_cost: FloatArray,
    saved_bytes: FloatArray | None = None,
) -> Ranges:
    """Compose the ranges of pieces of ``kinds``, by the ``recipes`` of each kind.

    ``arriving_cost``, ``leaving_cost``: [kinds, layouts] seconds per step that it costs a stage to begin, or to end, so.
    ``saved_bytes``: [kinds] made anew while a piece of the kind is computed again; None: none is.
    """
    layouts = Layouts(recipes)
    least = np.stack([layouts.square(own, own.least, np.inf) for own in recipes])
    anew = np.zeros(len(recipes)) if saved_bytes is None else saved_bytes
    rows = [
        (
            a.seconds,
            a.once_seconds,
            a.state_bytes,
            a.held_bytes,
            a.buffer_bytes,
            np.full_like(a.seconds, saved),
        )
        for a, saved in zip((own.amounts for own in recipes), anew, strict=True)
    ]
    amounts = np.stack(
        [
            np.stack([layouts.square(own, values, 0.0) for values in each])
            for own, each in zip(recipes, rows, strict=True)
        ],
        axis=1,
    )  # [rows, kinds, prices, arrives, leaves]
    prices = least.shape[1]
    number, unlike = _unlike(tuple(kinds))
    grown: _Grown | None = None
    closed: list[FloatArray] = []
    cheapest: list[FloatArray] = []
    for parents, added in unlike:
        grown = (
            _first(least[added], amounts[:, added], arriving_cost[added])
            if grown is None
            else _next(grown, parents, least[added], amounts[:, added])
        )
        total = grown.least + leaving_cost[added][:, None, :]
        end = total.argmin(axis=-1)
        cheapest.append(total.min(axis=-1))
        closed.append(np.take_along_axis(grown.amounts, end[None, :, :, None], axis=-1)[..., 0])
    assert prices == closed[0].shape[-1]
    return Ranges(number, np.concatenate(cheapest), np.concatenate(closed, axis=1))


@phase("ranges")
def least_of_ranges(kinds: Sequence[int], recipes: Sequence[Least]) -> tuple[IntArray, FloatArray]:
    """Return ``number`` and ``least`` of the ``Ranges`` of pieces of ``kinds`` alone, that begin and end at no cost."""
    layouts = Layouts(recipes)
    each = np.stack([layouts.square(own, own.least, np.inf) for own in recipes])
    number, unlike = _unlike(tuple(kinds))
    grown: FloatArray | None = None
    found: list[FloatArray] = []
    for parents, added in unlike:
        total = each[added] if grown is None else grown[parents][..., None] + each[added]
        grown = total.min(axis=2)
        found.append(grown.min(axis=-1))
    return number, np.concatenate(found)


def largest_of_ranges(kinds: Sequence[int], each: FloatArray) -> FloatArray:
    """[unlike ranges] the largest of what the pieces of each have. ``each``: [kinds]."""
    grown: FloatArray | None = None
    found: list[FloatArray] = []
    for parents, added in _unlike(tuple(kinds))[1]:
        grown = each[added] if grown is None else np.maximum(grown[parents], each[added])
        found.append(grown)
    return np.concatenate(found)


@lru_cache(maxsize=16)
def _unlike(kinds: tuple[int, ...]) -> tuple[IntArray, tuple[tuple[IntArray, IntArray], ...]]:
    """Number the unlike ranges of pieces of ``kinds``: [first, last + 1] of each range, -1: none.

    And by length, of each unlike range its place among those of one piece less, and the kind of its last piece.
    """
    count, before = len(kinds), 0
    number = np.full((count + 1, count + 1), -1)
    levels = []
    at = [-1] * count  # the place of the range that begins here among those of the length before
    for length in range(1, count + 1):
        known: dict[tuple[int, int], int] = {}
        for first in range(count - length + 1):
            key = at[first], kinds[first + length - 1]
            at[first] = known.setdefault(key, len(known))
            number[first, first + length] = before + at[first]
        before += len(known)
        parents, added = (np.array(x, dtype=np.int64) for x in zip(*known, strict=True))
        levels.append((parents, added))
    number.setflags(write=False)
    return number, tuple(levels)


def least_by_count(
    ranges: Ranges,
    kinds: Sequence[int],
    kept: Sequence[Least],
    anew: Sequence[Least | None],
    longest: int,
) -> FloatArray:
    """[unlike ranges, counts, prices] the least cost with exactly so many pieces computed again.

    ``anew``: the recipes of each kind that may be computed again. Infinite for ranges of more than ``longest`` pieces, and
    for counts that they have not.
    """
    layouts = Layouts([*kept, *filter(None, anew)])
    keeping = [layouts.square(own, own.least, np.inf) for own in kept]
    again = [None if own is None else layouts.square(own, own.least, np.inf) for own in anew]
    count, prices = len(kinds), len(kept[0].least)
    most = max(
        sum(anew[kind] is not None for kind in kinds[first : first + longest]) for first in range(count)
    )
    found = np.full((int(ranges.number.max()) + 1, most + 1, prices), np.inf)
    start = np.full((prices, len(layouts), most + 1), np.inf)
    start[:, :, 0] = 0.0
    states = [start] * count  # of the range that begins here, one piece shorter than now
    for length in range(1, min(longest, count) + 1):
        known: dict[int, FloatArray] = {}
        for first in range(count - length + 1):
            number, kind = int(ranges.number[first, first + length]), kinds[first + length - 1]
            if number not in known:
                known[number] = _counted(states[first], keeping[kind], again[kind])
                found[number] = known[number].min(axis=1).T
            states[first] = known[number]
    return found


def _counted(before: FloatArray, keeping: FloatArray, again: FloatArray | None) -> FloatArray:
    """[prices, layouts at the end, counts] of one piece more."""
    found: FloatArray = (before[:, :, None, :] + keeping[..., None]).min(axis=1)
    if again is not None:
        more = (before[:, :, None, :-1] + again[..., None]).min(axis=1)
        found[:, :, 1:] = np.minimum(found[:, :, 1:], more)
    return found


def whole_seconds(kinds: Sequence[int], recipes: Sequence[Least]) -> float:
    """Return the least cost of all pieces in a row, at the first price."""
    layouts = Layouts(recipes)
    each = [layouts.square(own, own.least[:1], np.inf)[0] for own in recipes]
    least = np.zeros(len(layouts))
    for kind in kinds:
        least = (least[:, None] + each[kind]).min(axis=0)
    return float(least.min())


def _first(least: FloatArray, amounts: FloatArray, arriving: FloatArray) -> _Grown:
    """Ranges of one piece. ``arriving``: [ranges, layouts]."""
    total = least + arriving[:, None, :, None]
    before = total.argmin(axis=2)
    return _Grown(
        np.take_along_axis(total, before[:, :, None], axis=2)[:, :, 0],
        np.take_along_axis(amounts, before[None, :, :, None], axis=3)[:, :, :, 0],
    )


def _next(shorter: _Grown, parents: IntArray, least: FloatArray, amounts: FloatArray) -> _Grown:
    """Ranges of one more piece, which is added to ``shorter`` ones."""
    total = shorter.least[parents][..., None] + least
    before = total.argmin(axis=2)
    index = before[None, :, :, None]
    added = np.take_along_axis(amounts, index, axis=3)[:, :, :, 0]
    so_far = np.take_along_axis(shorter.amounts[:, parents], before[None], axis=-1)
    summed = so_far + added
    summed[BUFFER] = np.maximum(so_far[BUFFER], added[BUFFER])
    summed[SAVED] = np.maximum(so_far[SAVED], added[SAVED])
    return _Grown(np.take_along_axis(total, before[:, :, None], axis=2)[:, :, 0], summed)
