"""A request that does not fit, changed: the same search for another job or cluster, cheaply, as much as can be shared.

The tables that a search composes are nine tenths of its time (Llama-70B on 8 devices: 10 of 12.6 s), and do not depend on
memory, schedule and recomputation: what changes only these is searched in full. Other jobs need tables of their own, of
which no more are composed than the first search made.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from cost_models.cluster import ClusterSpec
from cost_models.units import format_seconds
from passes.lower.job import Job
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.recipes.composed import Composed
from passes.search.hybrid.search import GroupSearch
from passes.search.hybrid.solve import SolvedOption
from passes.search.hybrid.survey import SLACK, survey
from passes.search.judge import Judge, Simulated, fastest_fitting

NEAR = 1.01
"""Factor to which the least memory is found: finer than the search's count of it, which simulations correct."""
SIMULATIONS = 3
"""Candidates that are simulated at most: the search ranks the best of them among its first three (``found``)."""

Fit = Callable[[GroupSearch, Judge, SolvedOption, float], Simulated]
"""Simulates an option's best pipeline; solves it anew with less than this share of the memory while it overflows."""


@dataclass(eq=False)
class Allowance:
    """The number of tables that may still be composed."""

    left: int


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A search, and the judge of its candidates."""

    search: GroupSearch
    judge: Judge
    fit: Fit
    allowance: Allowance
    deadline: float
    """Value of ``time.perf_counter`` at which what is found so far has to do."""

    def allowing(
        self, *, microbatches: bool = False, schedule: bool = False, recompute: bool = False
    ) -> Relaxed:
        """Leave to the search what was asked for: the same job on the same devices, so all tables are shared."""
        search = copy.copy(self.search)
        for name in ("counts", "covers"):  # these depend on what is left open now
            vars(search).pop(name, None)
        search.microbatches = "auto" if microbatches else search.microbatches
        search.schedule = "auto" if schedule else search.schedule
        search.recompute = "auto" if recompute else search.recompute
        return replace(self, search=search)

    def on(self, cluster: ClusterSpec) -> Relaxed:
        """Search on more nodes of the same kinds: groups within the old ones have the tables that they had."""
        judge = self.judge
        return self._anew(Judge(judge.graph, judge.costs, cluster, judge.job), self.search.tables.known)

    def doing(self, job: Job) -> Relaxed:
        """Search for another job: all tables are new."""
        judge = self.judge
        return self._anew(Judge(judge.graph, judge.costs, judge.cluster, job), {})

    def _anew(self, judge: Judge, tables: Mapping[Hashable, Composed]) -> Relaxed:
        search = replace(self.search, cluster=judge.cluster, job=judge.job)
        if search.fixed is not None:
            search = search.fixing(replace(search.fixed.request, job=judge.job))
        search.tables.known.update(tables)
        return replace(self, search=search, judge=judge)

    def surveyed(self, room: float = 1.0) -> tuple[SolvedOption, ...]:
        """Solve all options with this share of the memory, the fastest first."""
        return survey(self.search, self.deadline, room).solved

    def solved(self, options: Sequence[GroupOption], room: float = 1.0) -> list[SolvedOption]:
        """Solve these options, as long as tables may be composed; the fastest first."""
        found: list[SolvedOption] = []
        best = math.inf
        for option in options:
            if self.allowance.left <= 0 or not self.is_in_time:
                break
            known = len(self.search.tables.known)
            solved = self.search.solve(option, best * SLACK, room)
            self.allowance.left -= len(self.search.tables.known) - known
            if solved is not None:
                found.append(solved)
                best = min(best, solved.seconds)
        return sorted(found, key=lambda s: s.seconds)

    def fastest(self, solved: Sequence[SolvedOption]) -> Simulated | None:
        """Simulate the first of them; return the fastest that fits, if any does."""
        near = [each for each in solved[:SIMULATIONS] if each.seconds <= SLACK * solved[0].seconds]
        return fastest_fitting([self.fit(self.search, self.judge, each, 1.0) for each in near])

    def least_room(self, most: float) -> float | None:
        """Find the least share of the memory with which an option can be solved; some can with ``most``.

        None where time runs out before.
        """
        least = most
        for option in self.search.options():
            if not self.is_in_time:
                return None
            if not self._fits(option, least / NEAR):
                continue
            low, least = 0.0, least / NEAR
            while low * NEAR < least:
                middle = math.sqrt(low * least) if low else least / 2
                if self._fits(option, middle):
                    least = middle
                else:
                    low = middle
        return least

    @property
    def is_in_time(self) -> bool:
        """Tell whether there is time left."""
        return time.perf_counter() < self.deadline

    def _fits(self, option: GroupOption, room: float) -> bool:
        return self.search.solve(option, math.inf, room) is not None


def priced(found: Simulated) -> str:
    """Say what it costs."""
    return f"step {format_seconds(found.step_seconds)}"
