"""Candidates of the free search, each simulated once, and climbing on the simulation itself."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, field

from passes.lower.candidate import Candidate, Origin, Trail, anywhere
from passes.search.free.climb import Neighbourhood
from passes.search.free.search import CountSearch
from passes.search.free.starts import Home
from passes.search.free.tuning import FreeTuning
from passes.search.judge import Judge, Simulated, fastest_fitting


@dataclass(eq=False)
class FreeJudge:
    """Simulates placements of a search's units, each once, and moves units of the best."""

    judge: Judge
    tuning: FreeTuning
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
        known = len(self.tried)
        simulated = self.candidate(anywhere(search.model.ranks(home), world, search.microbatches, trail))
        if len(self.tried) > known:
            self.homes[known] = search, home
        return simulated

    @property
    def each_seconds(self) -> float:
        """Mean seconds of a simulation."""
        return self._spent_seconds / max(1, len(self.tried))

    def best(self) -> Simulated | None:
        """Choose the fastest that fits."""
        return fastest_fitting(self.tried)

    def climb(self, deadline: float, seed: int) -> int:
        """Move units of the best placement while its simulated step gets shorter; return the number of simulations.

        A large problem is then climbed from other placements too, and from the best again, while there is time: on such
        problems much depends on the moves that are drawn.
        """
        tuning = self.tuning
        fitting = [i for i in self.homes if self.tried[i].fits]
        if not fitting or tuning.climbed < 1:
            return 0
        ranked = sorted(fitting, key=lambda i: self.tried[i].step_seconds)
        problem = self.homes[ranked[0]][0].problem
        if problem.units * problem.devices <= tuning.exact_choices:
            return self._climb_from(ranked[0], deadline, seed, tuning.quiet_seconds)
        unlike: dict[Trail, int] = {}
        for i in ranked:
            unlike.setdefault(self.tried[i].candidate.trail, i)
        count = 0
        for number, first in enumerate(list(unlike.values())[: tuning.climbed]):
            patience = tuning.patience * (deadline - time.perf_counter())
            count += self._climb_from(first, deadline, seed + number, patience)
        best = min(
            (i for i in self.homes if self.tried[i].fits),
            key=lambda i: self.tried[i].step_seconds,
        )
        if not tuning.climb_best:
            return count
        return count + self._climb_from(best, deadline, seed + tuning.climbed, tuning.quiet_seconds)

    def _climb_from(self, first: int, deadline: float, seed: int, quiet_seconds: float) -> int:
        """Climb by threshold accepting, as in ``passes.search.free.climb``; return the number of simulations.

        The best predicted of several neighbours is simulated.
        """
        tuning = self.tuning
        patience = max(tuning.quiet_seconds, quiet_seconds)
        quiet = max(tuning.least_quiet, min(tuning.most_quiet, int(patience / max(self.each_seconds, 1e-6))))
        draw = random.Random(seed)
        search, home = self.homes[first]
        seconds = least = self.tried[first].step_seconds
        around = Neighbourhood(search.problem, search.model.module_of_unit, tuning)
        count, silent = 0, 0
        while silent < quiet and time.perf_counter() + self.each_seconds < deadline:
            silent += 1
            drawn = list(itertools.islice(around.draw(home, draw), tuning.predicted_per_simulation))
            unknown = [other for other in drawn if not self.seen(search, other)]
            if not drawn:
                break
            if not unknown:
                continue
            other = min(unknown, key=search.predict)
            simulated = self.placement(search, other, Trail.of(Origin.MOVED_IN_SIMULATION))
            count += 1
            if not simulated.fits:
                continue
            if simulated.step_seconds < least:
                least, silent = simulated.step_seconds, 0
            if simulated.step_seconds <= seconds * (1 + tuning.simulated_slack * (1 - silent / quiet)):
                home, seconds = other, simulated.step_seconds
        return count
