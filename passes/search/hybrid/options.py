"""The options of a hybrid search: device groups × shards × replicas × micro-batches × schedules.

    groups · replicas · tensor = devices of a pool        samples · micro-batches = batch

Each pool of equal nodes is arranged in its own way, or left out, and the pools follow each other in any order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cost_models.units import counted
from passes.search.hybrid.pools import Pool, Run, runs
from passes.search.layer.options import ScheduleOption, in_flight
from runtime.schedules import SCHEDULES

SCHEDULES_TRIED: tuple[tuple[str, int], ...] = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4))
"""(name, stages per group). Schedules that part backward into halves need weight halves without collectives."""
SEARCHED = ("1f1b", "interleaved", "gpipe")
"""Schedules that the search knows, where one is asked for."""


MOST_ARRANGED = 4096
"""Ways to arrange several pools at one number of micro-batches: beyond, each pool keeps its fastest ways only. By hand:
three pools of 16 devices have 1,800 to 4,000."""
MOST_ORDERS = 6
"""Orders of the pools that are tried: all of three. Of more, the cluster's own and its reverse."""


@dataclass(frozen=True)
class GroupOption:
    """One way to arrange the devices and cut the batch."""

    runs: tuple[Run, ...]
    """Groups in the pipeline's order."""
    samples: int
    """Samples of a micro-batch."""
    microbatches: int
    schedule: str
    chunks: int
    """Stages of each group."""

    @cached_property
    def groups(self) -> int:
        """The number of groups."""
        return sum(run.groups for run in self.runs)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.groups * self.chunks

    def joints(self, stage: int, pieces: int) -> tuple[slice, slice]:
        """Return the joints at which a stage, counted from the end, may begin, and those at which it may end.

        Every stage has a piece at least, of all the ``pieces``.
        """
        first, spare = self.stages - 1 - stage, pieces - self.stages
        return slice(first, first + spare + 1), slice(first + 1, first + spare + 2)

    @property
    def in_pairs(self) -> bool:
        """True if every group runs two stages, one in each of two rounds."""
        return self.chunks == 2 and self.places == (*range(self.groups), *range(self.groups))

    @property
    def fill(self) -> float:
        """Share of filling and draining that the schedule does not hide."""
        return self._alone.fill(self.groups)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Micro-batches held at once by each stage, counted from the end."""
        return in_flight(self._alone, self.groups, self.stages)

    @cached_property
    def members(self) -> tuple[tuple[Run, int], ...]:
        """The run of each group, and its number there."""
        return tuple((run, number) for run in self.runs for number in range(run.groups))

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group."""
        return tuple(run.ranks(number) for run, number in self.members)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The group of each stage."""
        return tuple(SCHEDULES[self.schedule].positions(self.stages, self.groups))

    @property
    def _alone(self) -> ScheduleOption:
        return ScheduleOption(self.microbatches, self.schedule, self.chunks)

    def __str__(self) -> str:
        schedule = f"{self.schedule} × {self.chunks}" if self.chunks > 1 else self.schedule
        runs = " + ".join(map(str, self.runs))
        return f"{runs}, {schedule}, {self.microbatches} × {counted(self.samples, 'sample')}"


def options(
    divisions: Sequence[Sequence[Pool]],
    batch_size: int,
    counts: Sequence[int],
    most_stages: int,
    rate: Callable[[Run, int], float],
    schedule: str = "auto",
) -> Iterator[GroupOption]:
    """Yield the options on the pools of each of ``divisions``.

    ``counts``: numbers of micro-batches that the model allows; ``rate``: of a run's groups and a micro-batch's samples,
    how many of them they do per second, at most.
    """
    tried = [(name, v) for name, v in SCHEDULES_TRIED if schedule in ("auto", name)] or [(schedule, 1)]
    for m in counts:
        pooled = (_arrangements(pools, batch_size // m, most_stages, rate) for pools in divisions)
        for arranged in itertools.chain.from_iterable(pooled):
            groups = sum(run.groups for run in arranged)
            for name, chunks in tried if groups > 1 else [("1f1b", 1)]:
                if (
                    groups * chunks <= most_stages
                    and SCHEDULES[name].check(groups * chunks, groups, m) is None
                ):
                    for order in _orders(arranged):
                        yield GroupOption(order, batch_size // m, m, name, chunks)


def _arrangements(
    pools: Sequence[Pool], samples: int, most_groups: int, rate: Callable[[Run, int], float]
) -> Iterator[tuple[Run, ...]]:
    """Yield ways to arrange some pools; one that is alone may leave groups out."""
    ways = [list(runs(pool, samples)) for pool in pools]
    if math.prod(len(own) + 1 for own in ways) > MOST_ARRANGED:
        most = max(1, int(MOST_ARRANGED ** (1 / len(pools))) - 1)
        ways = [sorted(own, key=lambda run: -rate(run, samples))[:most] for own in ways]
    unused = [None] if 2 ** len(pools) <= MOST_ARRANGED else []
    for chosen in itertools.product(*([*unused, *own] for own in ways)):
        arranged = tuple(run for run in chosen if run is not None)
        if len(arranged) == 1:
            arranged = (replace(arranged[0], groups=min(arranged[0].groups, most_groups)),)
        if arranged and sum(run.groups for run in arranged) <= most_groups:
            yield arranged


def _orders(arranged: tuple[Run, ...]) -> Iterator[tuple[Run, ...]]:
    """Yield the orders of runs to try, the cluster's first."""
    if math.factorial(len(arranged)) <= MOST_ORDERS:
        yield from itertools.permutations(arranged)
    else:
        yield arranged
        yield arranged[::-1]
