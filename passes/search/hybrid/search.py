"""The search over pipelines of sharded stages: every option bounded, the promising ones solved, by rising bound.

options ─► floor ─► bound by one replica ─► bounds by its own tables ─► dynamic program ─► pipelines, best first
"""

from __future__ import annotations

import copy
import heapq
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from cost_models.arrays import FloatArray
from cost_models.cluster import ClusterSpec
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.interrupts import keep_from_here, may_be_lost
from passes.lower.job import Job
from passes.progress import report_found, report_option
from passes.search.hybrid.bounds import full_bound, quick_bound
from passes.search.hybrid.cover import Covers
from passes.search.hybrid.decode import Decoded, decoded
from passes.search.hybrid.floors import Floors
from passes.search.hybrid.options import GroupOption, options
from passes.search.hybrid.pools import divisions
from passes.search.hybrid.recipes.composed import Composed
from passes.search.hybrid.recipes.eliminate import TooWideError
from passes.search.hybrid.recipes.joints import Pieces, pieces_of, value_bytes
from passes.search.hybrid.recipes.pieces import PieceSearch
from passes.search.hybrid.recipes.ranges import SAVED
from passes.search.hybrid.recipes.walk import needed_bytes
from passes.search.hybrid.solve import SolvedOption, fastest
from passes.search.hybrid.staged import RangeTableT, Staged
from passes.search.hybrid.tables import Tables
from passes.search.microbatches import accepted_counts, may_cost_less
from passes.search.words import RecomputeMode
from passes.timings import phase

log = logging.getLogger("partitioner")

SLACK = 1.05
"""Options whose bound is above the best surrogate by this factor are not solved: the surrogate was at most 4% off the
simulated step on Llama-8B and 70B (docs/06g-hybrid.md), on either side. On a part of the cluster, those whose bound is
above it at all: a plan that does without some of the devices has to be faster by surrogate."""

ENOUGH = 4
"""Options solved after which only those are that may be better than the best. By hand: more than are simulated first."""

SIMULATED_FIRST = 3
"""Pipelines of the least surrogates that always are simulated, so that so many are looked for. Measured: the surrogate
ranks the best among its first three on Llama-8B and 70B on 64 H100 and, but for 0.2%, on GPT-3 175B on 1,024."""

FIRST = 64
"""Steps after which one option is carried to its end if nothing is found yet: hundreds of thousands of options of unlike
devices have bounds below the best. By hand."""

PATIENCE = 32
"""Options without a pipeline that fits after which the time limit ends a search that has found nothing. By hand: small
limits wait for a first plan, which most jobs have among the first few; a search of thousands of options does not go on for
hours."""


@dataclass(frozen=True, eq=False)
class Survey:
    """All options, those that may still win solved. ``solved``: best first."""

    solved: tuple[SolvedOption, ...]
    options: int
    bounds: tuple[tuple[GroupOption, float], ...]
    """Each option that was solved, and the lower bound on its pipelines."""
    rest_seconds: float
    """Lower bound on the pipelines of all other options."""
    stopped: Literal["", "time limit", "interrupted"]
    """The reason why not all were looked at, if it is none of theirs."""
    untried: int
    """Options that were neither solved nor bounded to the end by then."""

    @property
    def bound_seconds(self) -> float:
        """No pipeline of any option is below, by the surrogate."""
        return min([self.rest_seconds, *(seconds for _, seconds in self.bounds)])


@dataclass(eq=False)
class GroupSearch:
    """Everything that the search reads, and caches per kind of group."""

    graph: OpGraph
    costs: GraphCosts
    cluster: ClusterSpec
    job: Job
    microbatches: int | Literal["auto"] = "auto"
    schedule: str = "auto"
    recompute: RecomputeMode = "auto"
    used: Sequence[int] | None = None
    """Ranks that groups are made of, from the first of each node on; None: all."""
    pieces: Pieces = field(init=False)
    _crossing: dict[int, FloatArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pieces = pieces_of(self.graph)

    @property
    def slack(self) -> float:
        """The factor above the best surrogate up to which options are solved: ``SLACK``, 1 on a part of the cluster."""
        return SLACK if self.used is None else 1.0

    @property
    def world_size(self) -> int:
        """The number of devices that groups are made of."""
        return self.cluster.world_size if self.used is None else len(self.used)

    def on(self, ranks: Sequence[int]) -> GroupSearch:
        """Search on a part of the cluster, with the same tables, be they made here or before."""
        search = copy.copy(self)
        search.used = ranks
        search.piece_search, search.floors = self.piece_search, self.floors
        search.covers, search.tables = self.covers, self.tables
        return search

    @cached_property
    def piece_search(self) -> PieceSearch:
        """The search of recipes."""
        return PieceSearch(self.pieces, self.cluster, self._shared)

    @cached_property
    def _shared(self) -> frozenset[str]:
        """Parameters and buffers that several pieces read."""
        seen: dict[str, int] = {}
        for part in self.pieces.parts:
            for given in part.inputs:
                if given.kind in ("parameter", "buffer"):
                    seen[given.name] = seen.get(given.name, 0) + 1
        return frozenset(name for name, count in seen.items() if count > 1)

    @cached_property
    def counts(self) -> list[int]:
        """The numbers of equal micro-batches that the model allows, rising."""
        batch = self.job.batch_size
        wanted = range(1, batch + 1) if self.microbatches == "auto" else [self.microbatches]
        return sorted(m for m in accepted_counts(self.graph, batch, wanted) if batch % m == 0)

    @phase("options")
    def options(self) -> list[GroupOption]:
        """List all options."""
        pools, pieces = divisions(self.cluster, self.used), len(self.pieces)
        return list(options(pools, self.job.batch_size, self.counts, pieces, self.floors.rate, self.schedule))

    @cached_property
    def floors(self) -> Floors:
        """The bounds of options before anything is composed for them."""
        return Floors(self.piece_search, self.job, may_cost_less(self.graph, self.microbatches))

    @cached_property
    def covers(self) -> Covers:
        """Tables that bound those of the groups."""
        return Covers(self.piece_search, self.job, self.floors, self.recompute)

    @cached_property
    def tables(self) -> Tables:
        """The ranges of the kinds of groups."""
        return Tables(self.piece_search, self.job, self.floors)

    def survey(self, deadline: float, room: float = 1.0, known_seconds: float = math.inf) -> Survey:
        """Solve every option whose bound leaves it a chance, by rising bound. ``room``: share of the memory to plan with.

        ``deadline``: value of ``time.perf_counter`` to stop at, once something is found or ``PATIENCE`` options do not fit.
        Ctrl-C stops it likewise, once something is found.
        ``known_seconds``: of another plan's step.
        """
        listed = self.options()
        search = _OptionQueue(self, listed, room, known_seconds)
        stopped: Literal["", "time limit", "interrupted"] = ""
        try:
            while not search.is_over():
                if search.may_stop() and time.perf_counter() > deadline:
                    stopped = "time limit"
                    break
                search.report()
                with may_be_lost():
                    search.advance()
        except KeyboardInterrupt:
            if not search.found:
                raise
            stopped = "interrupted"
        ranked = tuple(sorted(search.found, key=lambda solved: solved.seconds))
        left = search.untried if stopped else 0
        return Survey(ranked, len(listed), tuple(search.bounds), search.least_seconds, stopped, left)

    def staged(self, option: GroupOption, room: float = 1.0) -> Staged[Composed] | None:
        """Return the option's stages; None where the tables of its groups would be too large."""
        try:
            return self._staged(option, self.tables.of_groups(option), room)
        except TooWideError as error:
            log.info("%s: not searched, its tables would have %s", option, error)
            return None

    def first_bound(self, option: GroupOption, cutoff_seconds: float, room: float = 1.0) -> float:
        """Lower bound on an option's pipelines, without tables of its own."""
        try:
            return quick_bound(self._staged(option, self.covers.of_groups(option), room), cutoff_seconds)
        except TooWideError:
            return 0.0

    def _staged(self, option: GroupOption, groups: Sequence[RangeTableT], room: float) -> Staged[RangeTableT]:
        devices = self.cluster.devices
        capacity = [room * min(devices[rank].memory_bytes for rank in ranks) for ranks in option.ranks]
        tables = [groups[place] for place in option.places[::-1]]
        return Staged(option, tables, self._links(option), capacity, self.recompute)

    @phase("program")
    def solve(self, option: GroupOption, cutoff_seconds: float, room: float = 1.0) -> SolvedOption | None:
        """Find the best pipeline of an option; None where none is below ``cutoff_seconds``."""
        staged = self.staged(option, room)
        if staged is None:
            return None
        bound = max(quick_bound(staged, cutoff_seconds), full_bound(staged, cutoff_seconds))
        return None if bound >= cutoff_seconds else fastest(staged, cutoff_seconds, bound)

    def decode(self, solved: SolvedOption, *, one_queue: bool) -> Decoded:
        """Return the candidate that an option's best pipeline is."""
        return decoded(self.pieces, solved.option, solved.pipeline, solved.steps, one_queue=one_queue)

    def fits(self, solved: SolvedOption, room: float = 1.0) -> bool:
        """Tell whether a pipeline fits as memory is counted: what it takes piece by piece, not what a table says."""
        staged = self.staged(solved.option, room * (1 + 1e-9))
        if staged is None:
            return False
        left, starts = list(staged.capacity_bytes), solved.pipeline.starts
        ends = [*starts[1:], len(self.pieces)]
        stages = zip(
            staged.tables[::-1], solved.steps, starts, ends, solved.option.in_flight[::-1], staged.groups[::-1],
            strict=True,
        )  # fmt: skip
        for table, steps, first, end, held, group in stages:
            again = any(step.again for step in steps)
            anew = float(table.ranges[-1].amounts[SAVED, table.number[first, end], 0]) if again else 0.0
            left[group] -= needed_bytes(steps, held) + anew
        return min(left) >= 0

    def _links(self, option: GroupOption) -> list[FloatArray]:
        """Per stage from the end: [pieces + 1] seconds of the cut behind it, at each joint."""
        sizes = self._cut_bytes(option.samples)
        groups, places = option.ranks, option.places
        found = [np.zeros(len(sizes))]
        for before, behind in zip(places[-2::-1], places[:0:-1], strict=True):
            path = self.cluster.path(groups[before][-1], groups[behind][0])
            ports = min(len(groups[before]), len(groups[behind]))
            rate = path.bandwidth_bytes_per_second * ports
            found.append(2 * path.latency_seconds + sizes / rate)
        return found

    def _cut_bytes(self, samples: int) -> FloatArray:
        """[joints] bytes of the values that cross, and of their gradients."""
        if samples not in self._crossing:
            found = np.zeros(len(self.pieces) + 1)
            for name, last in self.pieces.last_reader.items():
                size = value_bytes(self.graph, name, samples)
                found[self.pieces.piece_of[name] + 1 : last + 1] += size * (
                    2 if name in self.graph.needs_grad else 1
                )
            self._crossing[samples] = found
        return self._crossing[samples]


class _OptionQueue:
    """Options by their bounds, of four ranks; the option of the least bound gets the next, or is solved."""

    def __init__(
        self, search: GroupSearch, options: Sequence[GroupOption], room: float, known_seconds: float
    ) -> None:
        self.search, self.options, self.room = search, options, room
        self.found: list[SolvedOption] = []
        self.best_seconds = known_seconds
        self.bounds: list[tuple[GroupOption, float]] = []
        """Options that are done with, and what none of their pipelines is below."""
        self._open: list[tuple[float, int, int]] = [
            (floor, n, 0) for floor, n in search.floors.by_floor(options, room) if floor < math.inf
        ]
        """Bound, number, and how many further bounds led to it."""
        heapq.heapify(self._open)
        self._staged: dict[int, Staged[Composed]] = {}
        self._now: tuple[float, int, int] | None = None
        """The option at work, which is not among the open ones meanwhile."""
        self._steps = self._solved = 0
        self._unfit: list[tuple[float, int, int]] = []
        """Options in which nothing fits while nothing is found in any. They are open again once something is."""

    @property
    def least_seconds(self) -> float:
        """No pipeline of an option that is not solved is below."""
        waiting = (self._now, *self._open[:1], *self._unfit, (math.inf,))
        return min(own[0] for own in waiting if own is not None)

    @property
    def untried(self) -> int:
        """The number of options that may hold a better pipeline and were not solved."""
        tried = {id(solved.option) for solved in self.found}
        return sum(id(self.options[number]) not in tried for _, number, _ in self._open)

    def is_over(self) -> bool:
        """Tell whether no option is left that may be better, or nearly as good while there are few that are."""
        near = sum(solved.seconds <= self.search.slack * self.best_seconds for solved in self.found)
        slack = 1.0 if near >= SIMULATED_FIRST and self._solved >= ENOUGH else self.search.slack
        if not self._open:
            return True
        return self.least_seconds >= self.best_seconds * slack

    def may_stop(self) -> bool:
        """Tell whether the time limit may end it."""
        return math.isfinite(self.best_seconds) or len(self._unfit) >= PATIENCE

    def report(self) -> None:
        """Say what comes next."""
        option = self.options[self._open[0][1]]
        done = len(self.bounds)
        proved = min([self.least_seconds, *(bound for _, bound in self.bounds)])
        report_option(option, proved, len(self.found), done, len(self.options))

    @phase("program")
    def advance(self) -> None:
        """Refine the open option of the lowest bound; after ``FIRST`` steps in vain, the one closest to a solution."""
        self._steps += 1
        if self.found or self._steps <= FIRST:
            self._now = heapq.heappop(self._open)
        else:
            self._now = min(self._open, key=lambda own: (-own[2], own[0]))
            self._open.remove(self._now)
            heapq.heapify(self._open)
        further = self._further(*self._now)
        if further is None or further[0] == math.inf:
            self.bounds.append((self.options[self._now[1]], (further or self._now)[0]))
        elif further == self._now:
            self._unfit.append(further)
        else:
            heapq.heappush(self._open, further)
        self._now = None
        while self.found and self._unfit:
            heapq.heappush(self._open, self._unfit.pop())

    def _further(self, bound: float, number: int, rank: int) -> tuple[float, int, int] | None:
        """Bound an option better, or solve it; None where it is done with."""
        cutoff, option = self.best_seconds * self.search.slack, self.options[number]
        if rank == 0:
            better = self.search.first_bound(option, cutoff, self.room)
        elif rank == 1:
            staged = self.search.staged(option, self.room)
            if staged is None:
                return None
            self._staged[number] = staged
            better = quick_bound(staged, cutoff)
        elif rank == 2:
            if not self.found:  # without a plan to beat, the full bound is slower than solving
                self._solve(number, bound)
            if math.isinf(self.best_seconds):
                return bound, number, rank
            better = full_bound(self._staged[number], self.best_seconds, self.best_seconds)
        else:
            self._solve(number, bound)
            self._staged.pop(number)
            self._solved += 1
            return None
        return max(bound, better), number, rank + 1

    def _solve(self, number: int, bound: float) -> None:
        best = self.best_seconds
        found = fastest(
            self._staged[number], best * self.search.slack, bound, closely=bound < best < math.inf
        )
        if found is not None:
            log.debug("%s: %.6g s, not below %.6g s", found.option, found.seconds, bound)
            known = next((own for own in self.found if own.option is found.option), None)
            if known is not None and known.seconds <= found.seconds:
                return
            self.found = [own for own in self.found if own is not known] + [found]
            keep_from_here()
            self.best_seconds = min(self.best_seconds, found.seconds)
            report_found(self.best_seconds)
