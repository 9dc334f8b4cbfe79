"""Lower bound on a pipeline whose stages share their group's memory: Lagrangian over groups.

    least(T) = max over prices of   min over cuts of  Σ_s (t_s + x_s + price of its group · (bytes_s - its room))

    t_s, x_s ≤ T        a stage of at most T seconds needs bytes ≥ (G(λ) - T) / λ at every price λ, G(λ) the least
                        t + λ · bytes of its recipes; at price μ ≥ λ it costs T + (μ / λ) · (G(λ) - T) at least

Groups whose stages hold more pay more: prices fall from the first group to the last, both found by climbing. The surrogate
is at least ``fill · least(T) + w · T'`` for bottlenecks between T' and T; intervals are halved where that is least. No
bottleneck is below the mean of stages, cuts not counted, nor below its part of what the first may wait for.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from cost_models.arrays import FloatArray, IntArray
from passes.search.hybrid.recipes.composed import SCALE
from passes.search.hybrid.staged import RangeTableT, Staged

LADDER = (
    0.0,
    1 / 32,
    3 / 64,
    1 / 16,
    3 / 32,
    1 / 8,
    3 / 16,
    1 / 4,
    3 / 8,
    1 / 2,
    3 / 4,
    1.0,
    1.5,
    2.0,
    4.0,
    8.0,
    16.0,
    32.0,
)
"""Prices that are tried: those of the tables, one between two of them, and higher ones, at which only memory counts."""
PRICED = LADDER.index(SCALE[-1])
"""The last of them up to which the cost of the cheapest ways is known."""
Entry = TypeVar("Entry", bound=np.generic)
Scales = tuple[int, ...]
"""Per group, the number of its price in ``LADDER``."""
CLOSE = 1e-3
"""Bottlenecks nearer to each other than this are not told apart: as the gap of the search for pipelines."""


class Together:
    """The bound for one option. Lists are per stage, counted from the end."""

    def __init__(self, staged: Staged[RangeTableT], priced: Sequence[FloatArray]) -> None:
        """``priced``: of each stage, as ``Composed.priced`` with its share of the group's memory."""
        self.option, self.tables, self.links = staged.option, staged.tables, staged.links
        self.groups, self.weight, self.priced = staged.groups, staged.weight, priced
        pieces = len(self.links[0]) - 1
        self._joints = [self.option.joints(k, pieces) for k in range(self.option.stages)]
        self._at = (0, 0)
        self._longest = pieces
        """The most pieces of a stage that is short enough."""
        self._bands: dict[tuple[int, int, int], FloatArray] = {}
        self._short: dict[int, tuple[IntArray, FloatArray]] = {}

    def quick_seconds(self) -> float:
        """Return a bound at once, as if the longest stage were as long as it has to be."""
        return self.option.fill * self.total_seconds + self.weight * self._longest_seconds

    @cached_property
    def total_seconds(self) -> float:
        """Return what stages and cuts add up to at least, however long they are."""
        return self.least(math.inf)

    def seconds(self, alone: Sequence[FloatArray], cutoff_seconds: float) -> float:
        """Return the bound, or one that is not below ``cutoff_seconds``.

        ``alone``: planes of stages that have their devices for themselves; none takes less than there.
        """
        fill, weight = self.option.fill, self.weight
        whole = self.total_seconds
        lo = self._longest_seconds
        hi = max(lo, (cutoff_seconds - fill * whole) / weight if weight > 0 else math.inf)
        if math.isinf(hi):
            hi = max(float(x[np.isfinite(x)].max(initial=lo)) for x in (*alone, *self.links))
        longer = fill * whole + weight * hi  # what stages may be that are longer than they have to be
        intervals = [(fill * self.least(hi, alone) + weight * lo, lo, hi)]
        while True:
            bound, lo, hi = heapq.heappop(intervals)
            if bound >= cutoff_seconds or hi <= lo * (1 + CLOSE):
                return min(bound, longer)
            middle = (lo + hi) / 2
            heapq.heappush(intervals, (fill * self.least(middle, alone) + weight * lo, lo, middle))
            heapq.heappush(intervals, (bound + weight * (middle - lo), middle, hi))

    @cached_property
    def _longest_seconds(self) -> float:
        """Return what the longest stage takes at least: what they take on average, or what the first may wait for."""
        option = self.option
        total = self.total_seconds
        free = [np.zeros(end.stop - end.start) for _, end in self._joints]
        (stages,) = self._values([self._falling(*self._at)], math.inf, (), free)
        mean, held = stages / option.stages, option.in_flight[-1]
        return max(mean, total / (held * option.chunks) if held < option.microbatches else 0.0)

    def least(self, most_seconds: float, alone: Sequence[FloatArray] = ()) -> float:
        """Return what the stages and cuts of a pipeline add up to at least, none longer than ``most_seconds``."""
        self._bands.clear()
        self._short.clear()
        self._longest = self._longest_of(most_seconds)
        top = PRICED if math.isinf(most_seconds) else len(LADDER) - 1
        cuts = [link[end] for link, (_, end) in zip(self.links, self._joints, strict=True)]
        links = [np.where(link <= most_seconds, link, np.inf) for link in cuts]
        known: dict[Scales, float] = {}

        def values(every: Sequence[Scales]) -> list[float]:
            left = [scales for scales in dict.fromkeys(every) if scales not in known]
            if left:
                known.update(zip(left, self._values(left, most_seconds, alone, links), strict=True))
            return [known[scales] for scales in every]

        first, last = (min(at, top) for at in self._at)
        (best,) = values([self._falling(first, last)])
        step = 4
        while step:
            near = [(first + step, last + step), (first - step, last - step)]
            near += [(first + step, last), (first - step, last), (first, last + step), (first, last - step)]
            near = [pair for pair in near if 0 <= min(pair) <= max(pair) <= top]
            found = max(zip(values([self._falling(*pair) for pair in near]), near, strict=True))
            if found[0] > best:
                best, (first, last) = found
            else:
                step //= 2
        self._at = first, last
        if math.isinf(most_seconds):
            return best
        scales = self._falling(first, last)
        changed = True
        while changed:
            changed = False
            for group in range(len(scales)):
                for other in (scales[group] + 1, scales[group] - 1):
                    moved = (*scales[:group], other, *scales[group + 1 :])
                    if 0 <= other <= top and values([moved])[0] > best * (1 + 1e-6):
                        (best,), scales, changed = values([moved]), moved, True
                        break
        return best

    def _falling(self, first: int, last: int) -> Scales:
        """Return prices of the groups, from the first group's to the last's."""
        groups = self.option.groups
        return tuple(round(first + (last - first) * group / max(1, groups - 1)) for group in range(groups))

    def _values(
        self,
        every: Sequence[Scales],
        most_seconds: float,
        alone: Sequence[FloatArray],
        links: Sequence[FloatArray],
    ) -> list[float]:
        """Return for each of several prices of the groups the least sum over cuts. ``links``: seconds of those at each
        stage's ends."""
        joints, longest = len(links[0]), self._longest
        padded = np.full((len(every), joints + longest), np.inf)
        padded[:, joints - 1] = 0.0
        rest = padded[:, :joints]
        ends = sliding_window_view(padded, longest, axis=1)[:, :joints]
        """[prices, where a stage begins, its pieces] seconds from its end on."""
        for k, (group, (begin, _)) in enumerate(zip(self.groups, self._joints, strict=True)):
            if k:
                rest += links[k]
            number: dict[int, int] = {}
            at = [number.setdefault(scales[group], len(number)) for scales in every]
            bands = [self._band(k, scale, most_seconds, alone)[begin] for scale in number]
            own = bands[0] if len(bands) == 1 else np.stack(bands)[at]
            rest[:] = (own + ends).min(axis=-1)
        return [float(total) for total in rest[:, 0]]

    def _longest_of(self, most_seconds: float) -> int:
        """Return the most pieces of a range that has a way of at most ``most_seconds``; 1 where there is none."""
        unlike = {id(priced): (table, priced) for table, priced in zip(self.tables, self.priced, strict=True)}
        longest = 1
        for table, priced in unlike.values():
            short = np.append((priced[..., 0] <= most_seconds).any(axis=1), False)
            first, end = np.nonzero(short[table.number])
            longest = max(longest, int((end - first).max(initial=1)))
        return longest

    def _band(self, stage: int, scale: int, most_seconds: float, alone: Sequence[FloatArray]) -> FloatArray:
        """[first piece, pieces - 1] the cost of a stage at one price; infinite beyond the longest of them."""
        priced = self.priced[stage]
        key = id(priced), scale, id(alone[stage]) if alone else 0
        if key not in self._bands:
            cost = np.append(self._cheapest(priced, scale, most_seconds), np.inf)
            band = cost[_band_of(self.tables[stage].number, self._longest, -1)]
            if alone:
                band = np.where(_band_of(alone[stage], self._longest, np.inf) <= most_seconds, band, np.inf)
            self._bands[key] = band
        return self._bands[key]

    def _cheapest(self, priced: FloatArray, scale: int, most_seconds: float) -> FloatArray:
        """[unlike ranges] seconds and what memory costs at least, of ways of at most ``most_seconds``."""
        found = np.full(len(priced), np.inf)
        if id(priced) not in self._short:
            short = priced[..., 0] <= most_seconds
            rows = np.flatnonzero(short.any(axis=1))
            kinds = int(np.flatnonzero(short.any(axis=0)).max(initial=-1)) + 1
            own = np.where(short[rows, :kinds, None], priced[rows, :kinds], np.inf)
            self._short[id(priced)] = rows, own
        rows, own = self._short[id(priced)]
        if not own.size:
            return found
        price = LADDER[scale]
        right = bisect_left(SCALE, price)  # the first price of the tables that is not below
        cost = own[..., min(right, len(SCALE) - 1)]
        if right < len(SCALE) and SCALE[right] > price:  # what the cheapest way costs is concave in the price
            share = (price - SCALE[right - 1]) / (SCALE[right] - SCALE[right - 1])
            cost = (1 - share) * own[..., right - 1] + share * cost
        if scale and math.isfinite(most_seconds):
            below = right if right < len(SCALE) and SCALE[right] > price else min(right + 1, len(SCALE))
            times = price / np.array(SCALE[1:below])
            dear = (times * own[..., 1:below] + (1 - times) * most_seconds).max(axis=-1, initial=-math.inf)
            cost = dear if scale > PRICED else np.maximum(cost, dear)
        found[rows] = cost.min(axis=1)
        return found


def _band_of(plane: NDArray[Entry], longest: int, beyond: float) -> NDArray[Entry]:
    """[first piece, pieces - 1] from [first piece, last + 1], of ranges of up to ``longest`` pieces."""
    padded = np.full((len(plane), len(plane) + longest), beyond, dtype=plane.dtype)
    padded[:, : len(plane)] = plane
    first = np.arange(len(plane))[:, None]
    band: NDArray[Entry] = padded[first, first + np.arange(1, longest + 1)]
    return band
