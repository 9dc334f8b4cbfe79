"""f(T) over pipelines of sharded stages: the dynamic program over cuts between pieces, for one bottleneck T.

    D_k[a] = min over b > a of  t_k(a, b) + x_k(b) + D_{k-1}[b]
    with t, x ≤ T and D_k ≤ in_flight[k] · v · T;    f(T) = D_p[0]

t_k(a, b) is the fastest way to run pieces a … b - 1 that fits beside what the k-th stage from the end holds; x_k(b) is the
cut behind it. The same program over bounds on t bounds f.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cost_models.arrays import FloatArray
from passes.search.hybrid.options import GroupOption


@dataclass(frozen=True)
class Pipeline:
    """Stages as runs of pieces, and what the surrogate says about them."""

    starts: tuple[int, ...]
    """The first piece of each stage."""
    objective_seconds: float
    bottleneck_seconds: float
    """T, per micro-batch."""

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.starts)

    @property
    def identity(self) -> tuple[int, ...]:
        """Equal for equal stages."""
        return self.starts


class PipelineProgram:
    """The program of one option. See ``passes.search.bisect.BottleneckProgram``."""

    def __init__(
        self, option: GroupOption, seconds: Sequence[FloatArray], links: Sequence[FloatArray]
    ) -> None:
        """``seconds[k - 1]``: [pieces + 1, pieces + 1] of stages from a to b as the k-th from the end, infinite where none
        fits. ``links[k - 1]``: [pieces + 1] of the cut behind it, at b."""
        self.option, self.seconds, self.links = option, seconds, links
        self.pieces = len(seconds[0]) - 1
        self.fill = option.fill
        self.bottleneck_weight = (option.microbatches - option.fill) * option.chunks
        unlike = {id(plane): plane for plane in seconds}
        self.least_seconds = _shortest_path(np.minimum.reduce(list(unlike.values())))

    def quick_seconds(self) -> float:
        """Return a bound at once: stages as short as they are in all, the longest one their mean, or what the first may
        wait for."""
        option, free = self.option, [np.zeros_like(link) for link in self.links]
        total = least_sum(self.seconds, self.links)
        longest, held = least_sum(self.seconds, free) / option.stages, option.in_flight[-1]
        if held < option.microbatches:
            longest = max(longest, total / (held * option.chunks))
        return self.fill * total + self.bottleneck_weight * longest

    def range(self) -> tuple[float, float]:
        """Between which bottlenecks the optimum lies."""
        unlike = {id(plane): plane for plane in self.seconds}
        longest = {key: float(plane[np.isfinite(plane)].max(initial=0.0)) for key, plane in unlike.items()}
        finite = [longest[id(plane)] for plane in self.seconds]
        least = self.least_seconds / self.option.stages
        links = [float(link[np.isfinite(link)].max()) for link in self.links]
        top = max([*finite, *links, sum(finite) + sum(links)])
        return least * (1 - 1e-9), top * (1 + 1e-9)

    def solve(self, threshold: float) -> list[tuple[float, int, int]]:
        """(f, stages, 0), or nothing where no pipeline has so short a bottleneck."""
        limit = threshold * (1 + 1e-12)
        rest = np.full(self.pieces - self.option.stages + 1, np.inf)
        rest[-1] = 0.0
        self._limit = limit
        self._rests: list[FloatArray] = []
        planes: dict[int, FloatArray] = {}
        for k, plane in enumerate(self.seconds, start=1):
            begin, end = self.option.joints(k - 1, self.pieces)
            if k > 1:
                link = self.links[k - 1][end]
                rest = rest + np.where(link <= limit, link, np.inf)
            self._rests.append(rest)
            if id(plane) not in planes:
                planes[id(plane)] = np.where(plane <= limit, plane, np.inf)
            rest = (planes[id(plane)][begin, end] + rest).min(axis=1)
            held = self.option.in_flight[k - 1]
            if held < self.option.microbatches:
                rest[rest > held * self.option.chunks * limit] = np.inf
            if not np.isfinite(rest).any():
                return []
        value = float(rest[0])
        return [(value, self.option.stages, 0)] if math.isfinite(value) else []

    def trace(self, end: tuple[int, int]) -> Pipeline:
        """Return the pipeline that the last ``solve`` found."""
        start, starts = 0, []
        for k in range(end[0], 0, -1):
            starts.append(start)
            _, ends = self.option.joints(k - 1, self.pieces)
            row = self.seconds[k - 1][start, ends]
            start = ends.start + int(
                (np.where(row <= self._limit, row, np.inf) + self._rests[k - 1]).argmin()
            )
        return self.valued(starts)

    def valued(self, starts: Sequence[int], stage_seconds: Sequence[float] | None = None) -> Pipeline:
        """Return the pipeline of stages that begin so, as the surrogate defines it.

        ``stage_seconds``: per micro-batch, if not the table's.
        """
        ends = [*starts[1:], self.pieces]
        count = len(starts)
        seconds = stage_seconds or [
            float(self.seconds[count - 1 - s][a, b])
            for s, (a, b) in enumerate(zip(starts, ends, strict=True))
        ]
        link = [0.0] + [float(self.links[count - s][starts[s]]) for s in range(1, count)]
        bottleneck, behind = max(*seconds, *link), 0.0
        for s in range(count - 1, -1, -1):
            behind += seconds[s]
            held = self.option.in_flight[count - 1 - s]
            if held < self.option.microbatches:
                bottleneck = max(bottleneck, behind / (held * self.option.chunks))
            behind += link[s]
        objective = self.fill * behind + self.bottleneck_weight * bottleneck
        return Pipeline(tuple(starts), objective, bottleneck)


def least_sum(planes: Sequence[FloatArray], links: Sequence[FloatArray]) -> float:
    """Return the least sum of as many stages as there are ``planes``, the first of them the last stage's, and of the cuts
    behind all others."""
    rest = np.full(len(planes[0]), np.inf)
    rest[-1] = 0.0
    for k, (plane, link) in enumerate(zip(planes, links, strict=True)):
        rest = (plane + (rest + link if k else rest)).min(axis=1)
    return float(rest[0])


def _shortest_path(plane: FloatArray) -> float:
    """Return the least sum of stages, however many, that cover all pieces."""
    least = np.full(len(plane), np.inf)
    least[-1] = 0.0
    for a in range(len(plane) - 2, -1, -1):
        least[a] = (plane[a] + least).min()
    return float(least[0])
