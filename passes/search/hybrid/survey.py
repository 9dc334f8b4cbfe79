"""The survey of all options: each bounded, the promising ones solved, by rising bound.

option ─► floor ─► bounds by one replica, by its mesh, by its own tables ─► dynamic program ─► pipelines, best first
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from passes.interrupts import keep_from_here, may_be_lost
from passes.progress import report_found, report_option
from passes.search.hybrid.bounds import full_bound, quick_bound
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.recipes.composed import Composed
from passes.search.hybrid.search import GroupSearch
from passes.search.hybrid.solve import SolvedOption, fastest
from passes.search.hybrid.staged import Staged
from passes.timings import phase

log = logging.getLogger("partitioner")

SLACK = 1.05
"""Options whose bound is above the best surrogate by this factor are not solved: the surrogate was at most 4% off the
simulated step on Llama-8B and 70B (docs/06g-hybrid.md), on either side. On a part of the cluster, nor are those whose bound
is above that of plans on more devices at all: a plan that does without some of them has to be faster by surrogate."""

ENOUGH = 4
"""Options solved after which only those are that may be better than the best. By hand: more than are simulated first."""

SIMULATED_FIRST = 3
"""Pipelines of the least surrogates that always are simulated, so that so many are looked for. Measured: the surrogate
ranks the best among its first three on Llama-8B and 70B on 64 H100 and, but for 0.2%, on GPT-3 175B on 1,024."""

FIRST = 64
"""Steps after which options are carried to their ends one by one, until one is solved: hundreds of thousands of options of
unlike devices have bounds below the best, and no time may be left. By hand; none at all is too few on 16,384 devices, where
each is solved in seconds, and the first ones are poor."""

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


def survey(
    search: GroupSearch, deadline: float, room: float = 1.0, known_seconds: float = math.inf
) -> Survey:
    """Solve every option whose bound leaves it a chance, by rising bound. ``room``: share of the memory to plan with.

    ``deadline``: value of ``time.perf_counter`` to stop at, once something is found or ``PATIENCE`` options do not fit.
    Ctrl-C stops it likewise, once something is found.
    ``known_seconds``: of another plan's step.
    """
    listed = search.options()
    queue = _OptionQueue(search, listed, room, known_seconds)
    stopped: Literal["", "time limit", "interrupted"] = ""
    try:
        while not queue.is_over():
            if queue.may_stop() and time.perf_counter() > deadline:
                stopped = "time limit"
                break
            queue.report()
            with may_be_lost():
                queue.advance()
    except KeyboardInterrupt:
        if not queue.found:
            raise
        stopped = "interrupted"
    ranked = tuple(sorted(queue.found, key=lambda solved: solved.seconds))
    left = queue.untried if stopped else 0
    return Survey(ranked, len(listed), tuple(queue.bounds), queue.least_seconds, stopped, left)


class _OptionQueue:
    """Options by their bounds, of five ranks; the option of the least bound gets the next, or is solved."""

    def __init__(
        self, search: GroupSearch, options: Sequence[GroupOption], room: float, known_seconds: float
    ) -> None:
        self.search, self.options, self.room = search, options, room
        self.found: list[SolvedOption] = []
        self.best_seconds = known_seconds
        self.cutoff_seconds = known_seconds * (SLACK if search.used is None else 1.0)
        """Surrogates from here on are not looked for."""
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
        left = [*self._open, *([] if self._now is None else [self._now])]
        return sum(id(self.options[number]) not in tried for _, number, _ in left)

    def is_over(self) -> bool:
        """Tell whether no option is left that may be better, or nearly as good while there are few that are."""
        near = sum(solved.seconds <= self.cutoff_seconds for solved in self.found)
        enough = near >= SIMULATED_FIRST and self._solved >= ENOUGH
        if not self._open and self._now is None:
            return True
        return self.least_seconds >= (self.best_seconds if enough else self.cutoff_seconds)

    def may_stop(self) -> bool:
        """Tell whether the time limit may end it."""
        return math.isfinite(self.best_seconds) or len(self._unfit) >= PATIENCE

    def report(self) -> None:
        """Say what comes next."""
        option = self.options[(self._now or self._open[0])[1]]
        done = len(self.bounds)
        proved = min([self.least_seconds, *(bound for _, bound in self.bounds)])
        report_option(option, proved, len(self.found), done, len(self.options))

    @phase("program")
    def advance(self) -> None:
        """Refine the open option of the lowest bound; after ``FIRST`` steps in vain, the same to its end."""
        self._steps += 1
        now = self._now = self._now or heapq.heappop(self._open)
        further, self._now = self._further(*now), None
        if further is None or further[0] == math.inf:
            self.bounds.append((self.options[now[1]], (further or now)[0]))
        elif further == now:
            self._unfit.append(further)
        elif self.found or self._steps <= FIRST or further[0] >= self.cutoff_seconds:
            heapq.heappush(self._open, further)
        else:
            self._now = further
        while self.found and self._unfit:
            heapq.heappush(self._open, self._unfit.pop())

    def _further(self, bound: float, number: int, rank: int) -> tuple[float, int, int] | None:
        """Bound an option better, or solve it; None where it is done with."""
        cutoff, option = self.cutoff_seconds, self.options[number]
        if rank < 2:
            better = self.search.first_bound(option, cutoff, self.room, on_mesh=rank == 1)
        elif rank == 2:
            staged = self.search.staged(option, self.room)
            if staged is None:
                return None
            self._staged[number] = staged
            better = quick_bound(staged, cutoff)
        elif rank == 3:
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
        found = fastest(self._staged[number], self.cutoff_seconds, bound, closely=bound < best < math.inf)
        if found is not None:
            log.debug("%s: %.6g s, not below %.6g s", found.option, found.seconds, bound)
            known = next((own for own in self.found if own.option is found.option), None)
            if known is not None and known.seconds <= found.seconds:
                return
            self.found = [own for own in self.found if own is not known] + [found]
            keep_from_here()
            self.best_seconds = min(self.best_seconds, found.seconds)
            self.cutoff_seconds = min(self.cutoff_seconds, SLACK * found.seconds)
            report_found(self.best_seconds)
