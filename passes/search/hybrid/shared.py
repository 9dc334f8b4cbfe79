"""Memory handed out to the stages that share a group, so that none of them is longer than a bottleneck.

    T, a price per group ─► each range's cheapest way of at most T seconds ─► cuts ─► bytes of each group
                                     prices rise where a group has too little, and fall where it has more

Lagrange over groups, as in ``together``, over ways that can be run: where every group has enough, each of its stages gets
what it needs and an equal share of what is left. Bottlenecks are halved between the least possible and the best known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cost_models.arrays import FloatArray
from passes.search.hybrid.recipes.composed import Composed
from passes.search.hybrid.recipes.mixes import Mixes
from passes.search.hybrid.staged import Staged

ROUNDS = 12
"""Times that prices are changed at one bottleneck, by hand: more of them found nothing more on Llama-70B and 405B."""
MOST_CHANGE = 4.0
"""Factor by which a price changes at most in a round. By hand."""


class SharedMemory:
    """The stages of one option. Lists are per stage, counted from the end."""

    def __init__(self, staged: Staged[Composed], mixes: Sequence[Mixes]) -> None:
        self.option, self.tables, self.mixes, self.links = staged.option, staged.tables, mixes, staged.links
        self.capacity = np.array(staged.capacity_bytes)
        self.groups = np.array(staged.groups)
        each = {id(own): own for own in mixes}.values()
        self.least_seconds = min(float(own.seconds.min()) for own in each)
        """No stage is shorter."""
        number = self.tables[0].number[0, -1]
        self.most_seconds = max(float(own.seconds[number].max()) for own in each)
        """All pieces in the slowest recipe."""

    def rooms(self, most_seconds: float) -> list[float] | None:
        """Return the bytes of each stage, none longer than ``most_seconds``; None where no prices are found for that."""
        price = np.full(self.option.groups, most_seconds * self.option.chunks) / self.capacity
        best: tuple[float, FloatArray] | None = None
        for _ in range(ROUNDS):
            found = self._cut(most_seconds, price)
            if found is None:
                return None
            seconds, needed = found
            used = np.zeros(len(self.capacity))
            np.add.at(used, self.groups, needed)
            share = used / self.capacity
            if share.max() <= 1.0 and (best is None or seconds < best[0]):
                best = seconds, needed
            price = price * np.clip(share * share, 1 / MOST_CHANGE, MOST_CHANGE)
        if best is None:
            return None
        used = np.zeros(len(self.capacity))
        np.add.at(used, self.groups, best[1])
        left = (self.capacity - used) / self.option.chunks
        return [float(size + left[group]) for size, group in zip(best[1], self.groups, strict=True)]

    def _cut(self, most_seconds: float, price: FloatArray) -> tuple[float, FloatArray] | None:
        """Return the seconds of the cheapest pipeline at these prices, and the bytes of its stages."""
        known: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
        planes, sizes = [], []
        pieces = len(self.links[0]) - 1
        rest = np.full(pieces - self.option.stages + 1, np.inf)
        rest[-1] = 0.0
        rests = []
        for k, group in enumerate(self.groups.tolist()):
            key = id(self.mixes[k]), group
            if key not in known:
                cost, size = self.mixes[k].cheapest(most_seconds, float(price[group]))
                known[key] = self.tables[k].plane(cost), size
            plane, size = known[key]
            begin, end = self.option.joints(k, pieces)
            if k:
                link = self.links[k][end]
                rest = rest + np.where(link <= most_seconds, link, np.inf)
            rests.append(rest)
            planes.append(plane[begin, end])
            sizes.append(size)
            rest = (planes[-1] + rest).min(axis=1)
        if not np.isfinite(rest[0]):
            return None
        needed, start = np.zeros(len(planes)), 0
        for k in reversed(range(len(planes))):
            begin, ends = self.option.joints(k, pieces)
            end = ends.start + int((planes[k][start - begin.start] + rests[k]).argmin())
            needed[k] = sizes[k][self.tables[k].number[start, end]]
            start = end
        return float(rest[0] - (needed * price[self.groups]).sum()), needed
