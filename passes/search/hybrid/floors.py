"""Seconds that no pipeline of an option is below: its work in the best shares, nothing sent between groups, however much
memory that takes.

work     the least seconds of one replica's whole batch on its shards, in proportion: fewer samples cost no less each
floor    fill · Σ shares · work + (micro-batches - fill) · longest share · work, over shares that make a whole
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from passes.lower.job import Job
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.pools import Run
from passes.search.hybrid.recipes.eliminate import TooWideError
from passes.search.hybrid.recipes.pieces import GroupKind, PieceSearch, Prices
from passes.search.hybrid.recipes.ranges import whole_seconds

MANY = 1 << 20
"""Micro-batches of a step in which what happens once does not count."""


@dataclass(eq=False)
class Floors:
    """Bounds options before anything else is known of them. ``job``: with the batch that options cut."""

    search: PieceSearch
    job: Job
    _known: dict[Hashable, float] = field(default_factory=dict)

    def work_seconds(self, run: Run, samples: int) -> float:
        """Seconds of a replica's micro-batch of ``samples`` on a run's shards.

        No stages take less together: replicas, parameters kept in parts and the end of a step only add to it.
        """
        key = run.pool.alike, run.tensor
        if key not in self._known:
            self._known[key] = min(map(self._work_on, run.pool.windows(run.tensor)))
        return self._known[key] * samples / self.job.batch_size

    def rate(self, run: Run, samples: int) -> float:
        """Return how many micro-batches of ``samples`` the run's groups do per second, at most."""
        seconds = self.work_seconds(run, samples // run.replicas)
        return run.groups / seconds if seconds else float("inf")

    def by_floor(self, found: Iterable[GroupOption]) -> Iterator[tuple[float, int]]:
        """Yield (floor, number of the option), by rising floor."""
        yield from sorted((_floor(option, self.work_seconds), number) for number, option in enumerate(found))

    def _work_on(self, ranks: tuple[int, ...]) -> float:
        """Seconds of the whole batch, as one of many micro-batches of its size."""
        job = replace(self.job, batch_size=self.job.batch_size * MANY)
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
