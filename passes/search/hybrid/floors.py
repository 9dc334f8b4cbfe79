"""Seconds that no pipeline of an option is below: its work in the best shares, nothing sent between groups.

work     the least seconds of one replica's micro-batch on its shards, however much memory that takes
floor    fill · Σ shares · work + (micro-batches - fill) · longest share · work, over shares that make a whole
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from passes.lower.job import Job
from passes.search.hybrid.eliminate import TooWideError
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.pieces import GroupKind, PieceSearch, Prices
from passes.search.hybrid.pools import Run
from passes.search.hybrid.ranges import whole_seconds

MANY = 1 << 20
"""Micro-batches of a step in which what happens once does not count."""


@dataclass(eq=False)
class Floors:
    """Bounds options before they are solved. ``job``: with the batch that options cut."""

    search: PieceSearch
    job: Job
    known: dict[Hashable, float] = field(default_factory=dict)
    """Seconds of work, known so far."""

    def work_seconds(self, run: Run, samples: int) -> float:
        """Seconds of a replica's micro-batch of ``samples`` on a run's shards.

        No stages take less together: replicas, parameters kept in parts and the end of a step only add to it.
        """
        key = run.pool.alike, run.tensor, samples
        if key not in self.known:
            self.known[key] = min(self._work_on(ranks, samples) for ranks in run.pool.windows(run.tensor))
        return self.known[key]

    def rough_seconds(self, run: Run, samples: int) -> float:
        """Bound ``work_seconds`` by the whole batch's, in proportion: fewer samples cost no less each."""
        return self.work_seconds(run, self.job.batch_size) * samples / self.job.batch_size

    def rate(self, run: Run, samples: int) -> float:
        """Return how many micro-batches of ``samples`` the run's groups do per second, at most."""
        seconds = self.rough_seconds(run, samples // run.replicas)
        return run.groups / seconds if seconds else float("inf")

    def of_option(self, option: GroupOption) -> float:
        """Seconds that the option's surrogate is not below."""
        return _floor(option, self.work_seconds)

    def by_floor(self, found: Iterable[GroupOption]) -> Iterator[tuple[float, GroupOption]]:
        """Yield (floor, option), by rising floor; floors of those that are not asked for are only roughly computed."""
        listed = list(found)
        heap = [(_floor(option, self.rough_seconds), False, number) for number, option in enumerate(listed)]
        heapq.heapify(heap)
        while heap:
            floor, exact, number = heapq.heappop(heap)
            if exact:
                yield floor, listed[number]
            else:
                heapq.heappush(heap, (max(floor, self.of_option(listed[number])), True, number))

    def _work_on(self, ranks: tuple[int, ...], samples: int) -> float:
        job = replace(self.job, batch_size=samples * MANY)
        free = Prices(np.zeros(1), np.zeros(1))
        group, kinds = GroupKind(ranks, 1, len(ranks)), range(len(self.search.pieces.first))
        try:
            found = [self.search.recipes(kind, group, job, MANY, free) for kind in kinds]
        except TooWideError:
            return 0.0
        return whole_seconds(self.search.pieces.kind, found) / MANY


def _floor(option: GroupOption, work: Callable[[Run, int], float]) -> float:
    """Give each group its best share: the fastest ones full, for every number of them."""
    m, fill = option.microbatches, option.fill
    each = sorted((work(run, option.samples // run.replicas), run.groups) for run in option.runs)
    least, groups, rate = float("inf"), 0, 0.0
    for seconds, count in each:
        if not seconds:
            return 0.0
        groups, rate = groups + count, rate + count / seconds
        least = min(least, (fill * groups + m - fill) / rate)
    return least
