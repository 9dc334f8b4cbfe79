"""Two stages on each group, which share its memory: cuts with which both fit, exactly, none longer than a bottleneck T.

    group g        runs stage g and, of the second round, stage groups + g
    state          where the first begins, where the second does, and where the second round begins
    allowed        both at most T seconds long, their bytes together at most the group's

A stage's bytes are the least that it needs if it is to take T seconds at most: of ways that can be run, for a pipeline; of
all ways, by Lagrange, for a bound. Where no cuts are allowed at T, every pipeline has a longer bottleneck.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from passes.search.hybrid.recipes.composed import SCALE, Composed
from passes.search.hybrid.recipes.mixes import Mixes
from passes.search.hybrid.staged import Staged

CLOSE = 1e-3
"""Bottlenecks nearer to each other than this are not told apart: as the gap of the search for pipelines."""
NEEDED = Callable[[float], list[FloatArray]]
"""Bytes at a bottleneck: per stage from the end, [first piece, last + 1] of what it needs; infinite where it is longer."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """The cuts of an option whose groups run two stages each."""

    staged: Staged[Composed]

    def cuts(self, most_seconds: float, needed: Sequence[FloatArray]) -> list[int] | None:
        """Return the pieces that stages begin with, whose bytes are least in all; None where none are allowed.

        ``needed``: bytes, as ``NEEDED`` returns them.
        """
        groups, pieces = self.staged.option.groups, len(needed[0]) - 1
        planes = [
            np.where(link <= most_seconds, plane, np.inf)
            for plane, link in zip(needed, self.staged.links, strict=True)
        ][::-1]
        first, second = planes[:groups], planes[groups:]
        longest = [[_longest(plane) for plane in half] for half in (first, second)]
        best: tuple[float, list[int]] | None = None
        for middle in range(max(groups, pieces - sum(longest[1])), min(pieces - groups, sum(longest[0])) + 1):
            known = [np.full((middle + 1, pieces + 1 - middle), np.inf)]
            known[0][-1, -1] = 0.0
            for group in reversed(range(groups)):
                ahead = first[group][: middle + 1, : middle + 1]
                behind = second[group][middle:, middle:]
                capacity, most = self.staged.capacity_bytes[group], (longest[0][group], longest[1][group])
                begins = _begins(group, longest[0], middle), _begins(group, longest[1], pieces - middle)
                known.append(_before(ahead, behind, known[-1], capacity, begins, most))
            total = float(known[-1][0, 0])
            if np.isfinite(total) and (best is None or total < best[0]):
                best = total, self._starts(first, second, middle, known[::-1])
        return None if best is None else best[1]

    def _starts(
        self,
        first: Sequence[FloatArray],
        second: Sequence[FloatArray],
        middle: int,
        known: Sequence[FloatArray],
    ) -> list[int]:
        """Follow the least sums from the first group to the last."""
        at, starts = (0, middle), ([0], [middle])
        for group, rest in enumerate(known[1:-1]):
            own = first[group][at[0], : middle + 1][:, None] + second[group][at[1], middle:][None]
            own = np.where(own <= self.staged.capacity_bytes[group], own, np.inf) + rest
            ahead, behind = np.unravel_index(int(own.argmin()), own.shape)
            at = int(ahead), middle + int(behind)
            starts[0].append(at[0])
            starts[1].append(at[1])
        return [*starts[0], *starts[1]]

    def least_seconds(self, low: float, high: float, needed: NEEDED) -> float:
        """Return a lower bound on any pipeline's bottleneck, between the two."""
        if self.cuts(high, needed(high)) is None:
            return high
        while high > low * (1 + CLOSE):
            middle = (low + high) / 2
            if self.cuts(middle, needed(middle)) is None:
                low = middle
            else:
                high = middle
        return low

    def least_bytes(self, priced: Sequence[FloatArray], rooms: Sequence[float]) -> NEEDED:
        """Bound the bytes of stages by Lagrange. ``priced``: ``Composed.priced`` of every stage with ``rooms``.

        A way of at most T seconds has bytes ≥ room + (least(seconds + λ · (bytes - room)) - T) / λ, at every price λ.
        """
        m = self.staged.option.microbatches

        def of_stage(stage: int, most_seconds: float) -> FloatArray:
            table, own = self.staged.tables[stage], priced[stage]
            prices = table.prices.state[1 : len(SCALE)] / m
            size = rooms[stage] + ((own[..., 1:] - most_seconds) / prices).max(axis=-1)
            size = np.where(own[..., 0] <= most_seconds, np.maximum(size, 0.0), np.inf).min(axis=1)
            return table.plane(size)

        def needed(most_seconds: float) -> list[FloatArray]:
            known: dict[tuple[int, int, float], FloatArray] = {}
            keys = [(id(t), id(p), r) for t, p, r in zip(self.staged.tables, priced, rooms, strict=True)]
            for stage, key in enumerate(keys):
                if key not in known:
                    known[key] = of_stage(stage, most_seconds)
            return [known[key] for key in keys]

        return needed

    def bytes_of(self, mixes: Sequence[Mixes]) -> NEEDED:
        """Return the least bytes of ways that can be run."""

        def needed(most_seconds: float) -> list[FloatArray]:
            known: dict[int, FloatArray] = {}
            for table, own in zip(self.staged.tables, mixes, strict=True):
                if id(own) not in known:
                    cost, size = own.cheapest(most_seconds, DEAR * most_seconds)
                    known[id(own)] = table.plane(np.where(np.isfinite(cost), size, np.inf))
            return [known[id(own)] for own in mixes]

        return needed


DEAR = 1e3
"""Price of a byte, in bottlenecks, at which seconds do not count."""


def _longest(plane: FloatArray) -> int:
    """Return the most pieces of a finite range."""
    first, end = np.nonzero(np.isfinite(plane))
    return int((end - first).max(initial=0))


def _before(
    ahead: FloatArray,
    behind: FloatArray,
    rest: FloatArray,
    capacity_bytes: float,
    begins: tuple[range, range],
    longest: tuple[int, int],
) -> FloatArray:
    """[where the first stage begins, where the second does] the least sum of this group and those behind it.

    Only for ``begins``, infinite elsewhere: no other states are on the way through all groups; ``longest``: pieces of a
    stage of either round.
    """
    found = np.full_like(rest, np.inf)
    if not (begins[0] and begins[1] and all(longest)):
        return found
    (one, one_ends), (two, two_ends) = (
        _stages(plane, own, most) for plane, own, most in zip((ahead, behind), begins, longest, strict=True)
    )
    place = found[begins[0].start : begins[0].stop, begins[1].start : begins[1].stop]
    for long in range(one.shape[1]):
        both = one[:, long, None, None] + two
        total = np.where(both <= capacity_bytes, both, np.inf) + rest[one_ends[:, long, None, None], two_ends]
        np.minimum(place, total.min(axis=-1), out=place)
    return found


def _stages(plane: FloatArray, begins: range, longest: int) -> tuple[FloatArray, IntArray]:
    """[where a stage begins, lengths] its bytes, and where it ends: the last piece again for those that are longer."""
    first = np.array(begins)[:, None]
    ends = np.minimum(first + np.arange(1, longest + 1), len(plane) - 1)
    return plane[first, ends], ends


def _begins(group: int, lengths: Sequence[int], end: int) -> range:
    """Return where a group's stage may begin if all stages of the round, of so many pieces at most, end at ``end``."""
    before, behind = lengths[:group], lengths[group:]
    return range(max(group, end - sum(behind)), min(sum(before), end - len(behind)) + 1)
