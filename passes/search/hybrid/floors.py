"""Seconds that no pipeline of an option is below: its work in the best shares, nothing sent between groups.

work     the least seconds of one replica's micro-batch on its shards, however much memory that takes
floor    fill · Σ shares · work + (micro-batches - fill) · longest share · work, over shares that make a whole

Where all groups are equal, memory counts too. Lagrange: a stage that holds h micro-batches at once pays μ / h per byte, so
that all of them together pay μ for each byte that a micro-batch holds, and less what they have room for:

    work ≥ G(μ) - μ · Σ_groups (memory / least h) + μ · state / (devices of a group · most h)

G(μ) is the least work + μ · bytes held, blocks computed again where that is cheaper; parameters, their gradients and the
optimizer's state are somewhere, in equal parts at best.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from cost_models.arrays import FloatArray
from cost_models.memory import state_bytes
from passes.lower.job import Job
from passes.search.hybrid.eliminate import TooWideError
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.pieces import GroupKind, PieceSearch, Prices, cheaper
from passes.search.hybrid.pools import Run
from passes.search.hybrid.ranges import whole_seconds
from passes.search.words import RecomputeMode

MANY = 1 << 20
"""Micro-batches of a step in which what happens once does not count."""
PRICES = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)
"""Prices of all that a micro-batch holds, in times of its work: computing blocks again costs about a third of it."""


@dataclass(eq=False)
class Floors:
    """Bounds options before they are solved. ``job``: with the batch that options cut."""

    search: PieceSearch
    job: Job
    recompute: RecomputeMode
    _work: dict[Hashable, float] = field(default_factory=dict)
    _priced: dict[Hashable, tuple[FloatArray, FloatArray]] = field(default_factory=dict)

    def work_seconds(self, run: Run, samples: int) -> float:
        """Seconds of a replica's micro-batch of ``samples`` on a run's shards.

        No stages take less together: replicas, parameters kept in parts and the end of a step only add to it.
        """
        key = run.pool.alike, run.tensor, samples
        if key not in self._work:
            self._work[key] = min(self._work_on(ranks, samples) for ranks in run.pool.windows(run.tensor))
        return self._work[key]

    def rough_seconds(self, run: Run, samples: int) -> float:
        """Bound ``work_seconds`` by the whole batch's, in proportion: fewer samples cost no less each."""
        return self.work_seconds(run, self.job.batch_size) * samples / self.job.batch_size

    def rate(self, run: Run, samples: int) -> float:
        """Return how many micro-batches of ``samples`` the run's groups do per second, at most."""
        seconds = self.rough_seconds(run, samples // run.replicas)
        return run.groups / seconds if seconds else float("inf")

    def of_option(self, option: GroupOption) -> float:
        """Seconds that the option's surrogate is not below."""
        if len(option.runs) > 1:
            return _floor(option, self.work_seconds)
        return _floor(option, lambda run, _: self._work_in_memory(option, run))

    @cached_property
    def state_bytes(self) -> int:
        """The bytes of all parameters, their gradients and the optimizer's state."""
        graph, job = self.search.pieces.graph, self.job
        held = [
            (spec.elements, graph.types_of(name, job.precision), name in graph.trained)
            for name, spec in (*graph.parameters.items(), *graph.buffers.items())
        ]
        return state_bytes(held, job.optimizer).total

    def _work_in_memory(self, option: GroupOption, run: Run) -> float:
        """Seconds of a replica's micro-batch, in the memory that all groups have."""
        prices, least = self._by_price(run, option.samples // run.replicas)
        held = [option.microbatches] * option.groups
        for place, own in zip(option.places, option.in_flight[::-1], strict=True):
            held[place] = min(held[place], own)
        devices = self.search.cluster.devices
        room = sum(
            min(devices[rank].memory_bytes for rank in ranks) / own
            for ranks, own in zip(option.ranks, held, strict=True)
        )
        room -= self.state_bytes / (run.size * max(held))
        return float((least - prices * room).max())

    def by_floor(self, found: Iterable[GroupOption]) -> Iterator[tuple[float, int]]:
        """Yield (floor, number of the option), by rising floor; floors of options that nobody asks for stay rough."""
        listed = list(found)
        heap = [(_floor(option, self.rough_seconds), False, number) for number, option in enumerate(listed)]
        heapq.heapify(heap)
        while heap:
            floor, exact, number = heapq.heappop(heap)
            if exact:
                yield floor, number
            else:
                heapq.heappush(heap, (max(floor, self.of_option(listed[number])), True, number))

    def _work_on(self, ranks: tuple[int, ...], samples: int) -> float:
        try:
            return float(self._least(ranks, samples, np.zeros(1))[0])
        except TooWideError:
            return 0.0

    def _by_price(self, run: Run, samples: int) -> tuple[FloatArray, FloatArray]:
        """Return prices of a byte that a micro-batch holds, and at each the least seconds and what the bytes cost."""
        key = run.pool.alike, run.tensor, samples
        if key not in self._priced:
            prices = np.array(PRICES) * self.work_seconds(run, samples) / self._held_bytes(run, samples)
            try:
                each = [self._least(ranks, samples, prices) for ranks in run.pool.windows(run.tensor)]
                self._priced[key] = prices, np.minimum.reduce(each)
            except TooWideError:
                self._priced[key] = np.zeros(1), np.zeros(1)
        return self._priced[key]

    def _held_bytes(self, run: Run, samples: int) -> float:
        """Return about what a micro-batch holds on each device: what autograd saves, in equal parts."""
        kinds = self.search.pieces.kind
        each = [sum(self.search.costs(k).storage_bytes(samples).values()) for k in range(max(kinds) + 1)]
        return max(1.0, sum(each[kind] for kind in kinds) / run.tensor)

    def _least(self, ranks: tuple[int, ...], samples: int, held_prices: FloatArray) -> FloatArray:
        """[prices] the least seconds of a micro-batch on ``ranks``, and what it holds at each price."""
        pieces = self.search.pieces
        job = replace(self.job, batch_size=samples * MANY)
        prices = Prices(np.zeros(len(held_prices)), held_prices * MANY)
        group, kinds = GroupKind(ranks, 1, len(ranks)), range(len(pieces.first))
        again = self.recompute == "full" or (self.recompute == "auto" and bool(held_prices.any()))
        found = []
        for kind in kinds:
            block = bool(pieces.blocks[pieces.first[kind]])
            anew = block and again and self.search.recipes(kind, group, job, MANY, prices, again=True)
            if anew and self.recompute == "full":
                found.append(anew)
                continue
            own = self.search.recipes(kind, group, job, MANY, prices)
            found.append(cheaper(own, anew) if anew else own)
        return whole_seconds(pieces.kind, found) / MANY


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
