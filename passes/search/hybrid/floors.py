"""A lower bound on an option's pipelines: its work in the best shares, nothing sent between groups, however much
memory that takes; infinite where its devices together do not hold the parameters, their gradients and optimizer state once.

work     the least seconds of one replica's whole batch on its shards, in proportion: fewer samples cost no less each
floor    fill · Σ shares · work + (micro-batches - fill) · longest share · work, over shares that make a whole
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from passes.lower.job import Job
from passes.search.beside_tensors import least_room_bytes
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.pools import Run
from passes.search.hybrid.recipes.eliminate import TooWideError
from passes.search.hybrid.recipes.pieces import GroupKind, PieceSearch, Prices
from passes.search.hybrid.recipes.ranges import whole_seconds
from passes.search.model import read_state_bytes

MANY = 1 << 40
"""Micro-batches of a step in which what happens once does not count: not in the last digits that tests compare."""


@dataclass(eq=False)
class Floors:
    """Bounds options before anything else is known of them. ``job``: with the batch that options cut."""

    search: PieceSearch
    job: Job
    cheaper_in_pieces: bool = False
    """Micro-batches may take less than their share of the whole batch's work: it bounds none of them."""
    _known: dict[Hashable, float] = field(default_factory=dict)
    _paces: dict[Hashable, list[tuple[float, int]]] = field(default_factory=dict)
    _rooms: dict[Hashable, int] = field(default_factory=dict)

    def work_seconds(self, run: Run, samples: int) -> float:
        """Seconds of a replica's micro-batch of ``samples`` on a run's shards, in its fastest group.

        No stages take less together: replicas, parameters kept in parts and the end of a step only add to it.
        """
        return min(seconds for seconds, _ in self.paces(run)) * samples / self.job.batch_size

    def rate(self, run: Run, samples: int) -> float:
        """Return how many micro-batches of ``samples`` the run's groups do per second, at most."""
        share = samples / run.replicas / self.job.batch_size
        return sum(count / (seconds * share) if seconds else math.inf for seconds, count in self.paces(run))

    def paces(self, run: Run) -> list[tuple[float, int]]:
        """List seconds of the whole batch on a replica, as slow as its group's slowest, with the groups of that pace."""
        if run.key not in self._paces:
            found: Counter[float] = Counter()
            for number in range(run.groups) if run.pool.marks else [0]:
                replicas = range(run.replicas) if run.pool.marks else [0]
                slowest = max(self._on(run, number, replica) for replica in replicas)
                found[slowest] += 1 if run.pool.marks else run.groups
            self._paces[run.key] = sorted(found.items())
        return self._paces[run.key]

    def _on(self, run: Run, group: int, replica: int) -> float:
        key = run.shards_kind(group, replica)
        if key not in self._known:
            first = run.first(group) + replica * run.tensor
            self._known[key] = self._work_on(run.pool.ranks(first, run.tensor))
        return self._known[key]

    def by_floor(self, found: Iterable[GroupOption], room: float) -> Iterator[tuple[float, int]]:
        """Yield (floor, number of the option), by rising floor. ``room``: share of the memory to plan with."""
        yield from sorted((self._floor(option, room), number) for number, option in enumerate(found))

    def _floor(self, option: GroupOption, room: float) -> float:
        """Give each group its best share: the fastest ones full, for every number of them."""
        if room * sum(map(self._room_bytes, option.runs)) < self._state_bytes:
            return math.inf
        if self.cheaper_in_pieces:
            return 0.0
        m, fill, size = option.microbatches, option.fill, self.job.batch_size
        each = sorted(
            (seconds * option.samples / run.replicas / size, count)
            for run in option.runs
            for seconds, count in self.paces(run)
        )
        least, groups, rate = math.inf, 0, 0.0
        for seconds, count in each:
            if not seconds:
                return 0.0
            groups, rate = groups + count, rate + count / seconds
            least = min(least, (fill * groups + m - fill) / rate)
        return least

    def _room_bytes(self, run: Run) -> int:
        """Count the room of all of a run's devices, each as much as the smallest in its group."""
        if run.key not in self._rooms:
            groups = map(run.ranks, range(run.groups))
            self._rooms[run.key] = sum(run.size * least_room_bytes(self.search.cluster, g) for g in groups)
        return self._rooms[run.key]

    @cached_property
    def _state_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state: of tied ones once, in parts or whole."""
        return read_state_bytes(self.search.pieces.graph, self.job)

    def _work_on(self, ranks: tuple[int, ...]) -> float:
        """Seconds of the whole batch, as one of many micro-batches of its size."""
        job = replace(self.job, batch_size=self.job.batch_size * MANY)
        free = Prices(np.zeros(1), np.zeros(1))
        group, kinds = GroupKind(ranks, 1, len(ranks)), range(len(self.search.pieces.first))
        try:
            found = [self.search.least(kind, group, job, MANY, free) for kind in kinds]
        except TooWideError:
            return 0.0
        return whole_seconds(self.search.pieces.kind, found) / MANY
