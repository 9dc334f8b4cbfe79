"""The judges of free placements: segments by reach, list schedules, each placement simulated once, climbing.

placement ─► segments ─► list schedule, with backwards in halves or whole ─► programs ─► simulated step
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from passes.lower.candidate import Candidate, Origin, Trail, anywhere
from passes.lower.segment import Segmentation
from passes.search.anywhere.climb import climb
from passes.search.anywhere.problem import Home
from passes.search.free.search import CountSearch
from passes.search.judge import Carried, Judge, Simulated, fastest_fitting

PREDICTED_PER_SIMULATION = 6
"""Neighbours that are predicted for each that is simulated."""
QUIET_SECONDS, LEAST_QUIET, MOST_QUIET = 2.0, 16, 120
"""Seconds without a better placement that end climbing, as a number of simulations; and the limits of that number."""
CLIMBED_SIMULATING = 3
"""Placements that are climbed from by simulation, which takes much longer than prediction: a limit of work."""


class ListJudge(Judge):
    """Simulates candidates under the list schedule whose backwards are in halves, the chosen one under the plain one too.

    Halves are never slower but by what they cost the executor, so they rank placements (docs/06f-free-placement.md).
    """

    def measure(self, candidate: Candidate) -> Simulated:
        """Measure step time and peak memory of a candidate."""
        carried = self.schedule(candidate, self.segmentation(candidate), "list-split")
        return self.judged(candidate, carried)

    def finished(self, candidate: Candidate, left_seconds: float = math.inf) -> Carried:
        """Carry ``candidate`` through under the better schedule: that with whole backwards, where it takes as long."""
        began = time.perf_counter()
        halves = self.kept(candidate)
        if halves is None:
            halves = self.schedule(candidate, self.segmentation(candidate), "list-split")
        if time.perf_counter() - began > left_seconds:
            return halves
        whole = self.schedule(candidate, halves.realized.segmentation, "list")
        return min(whole, halves, key=self._rank)

    def schedule(self, candidate: Candidate, segmentation: Segmentation, name: str) -> Carried:
        """Carry a candidate's segments through under one schedule."""
        return self.carry(replace(candidate, schedule=name), segmentation)

    def _rank(self, carried: Carried) -> tuple[bool, float]:
        """Order what fits first, then what is faster."""
        return not self.simulated(carried.candidate, carried.realized).fits, carried.seconds


@dataclass(eq=False)
class FreeJudge:
    """Simulates placements of a search's units, each once, and moves units of the best."""

    judge: Judge
    homes: dict[int, tuple[CountSearch, Home]] = field(default_factory=dict)
    """Placements of units, by their position in ``judge.tried``."""
    _known: dict[object, Simulated] = field(default_factory=dict)
    _seen: set[object] = field(default_factory=set)
    _spent_seconds: float = 0.0

    @property
    def tried(self) -> list[Simulated]:
        """Everything that was simulated, in order."""
        return self.judge.tried

    def candidate(self, candidate: Candidate) -> Simulated:
        """Simulate a candidate as it is, unless one like it was simulated."""
        key = (candidate.microbatches, frozenset(candidate.stage_of.items()))
        if key not in self._known:
            started = time.perf_counter()
            self._known[key] = self.judge.simulate(candidate)
            self._spent_seconds += time.perf_counter() - started
        return self._known[key]

    def seen(self, search: CountSearch, home: Home) -> bool:
        """Tell whether a placement that costs the same was simulated."""
        return (search.microbatches, search.predict.signature(home)) in self._seen

    def placement(self, search: CountSearch, home: Home, trail: Trail) -> Simulated:
        """Simulate a placement of the search's units."""
        self._seen.add((search.microbatches, search.predict.signature(home)))
        world = len(search.model.cluster.devices)
        position = len(self.tried)
        simulated = self.candidate(anywhere(search.model.ranks(home), world, search.microbatches, trail))
        if len(self.tried) > position:
            self.homes[position] = search, home
        return simulated

    @property
    def each_seconds(self) -> float:
        """Mean seconds of a simulation."""
        return self._spent_seconds / max(1, len(self.tried))

    def best(self) -> Simulated | None:
        """Choose the fastest that fits."""
        return fastest_fitting(self.tried)

    def climb(self, deadline: float, seed: int) -> int:
        """Move units of the best placements while their simulated steps get shorter; return the number of simulations.

        Of placements that were found in the same way, one is climbed from: which moves are drawn decides much.
        """
        before, dice = len(self.tried), random.Random(seed)
        fitting = [i for i in self.homes if self.tried[i].fits]
        unlike: dict[Trail, int] = {}
        for i in sorted(fitting, key=lambda i: self.tried[i].step_seconds):
            unlike.setdefault(self.tried[i].candidate.trail, i)
        leaders = list(unlike.values())[:CLIMBED_SIMULATING]
        for number, first in enumerate(leaders):
            now = time.perf_counter()
            self._climb_from(*self.homes[first], dice, now + (deadline - now) / (len(leaders) - number))
        return len(self.tried) - before

    def _climb_from(self, search: CountSearch, first: Home, dice: random.Random, deadline: float) -> None:
        """Climb from one placement; the best predicted of several neighbours is simulated."""
        quiet = int(QUIET_SECONDS / max(self.each_seconds, 1e-6))
        quiet = max(LEAST_QUIET, min(MOST_QUIET, quiet))

        def promising(home: Home) -> Iterator[Home]:
            drawn = search.around.draw(home, dice)
            for _ in range(quiet):
                some = list(itertools.islice(drawn, PREDICTED_PER_SIMULATION))
                unknown = [other for other in some if not self.seen(search, other)]
                if unknown:
                    yield min(unknown, key=search.predict)

        def measure(home: Home) -> float:
            simulated = self.placement(search, home, Trail.of(Origin.MOVED_IN_SIMULATION))
            return simulated.step_seconds if simulated.fits else math.inf

        climb(measure, first, promising, quiet=quiet, deadline=deadline - self.each_seconds)
