"""Simulates the candidates of the free search, each once, and climbs on the simulation itself."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from passes.search.free.climb import Neighbourhood
from passes.search.free.request import FreeCandidate, SimulatedFree, SimulateFree
from passes.search.free.search import EXACT_CHOICES, CountSearch
from passes.search.free.starts import Home

MOVED = "moved in simulation"
"""What candidates of the climb are called."""
PREDICTED_PER_SIMULATION = 6
"""Neighbours predicted for each that is simulated, while climbing."""
SLACK = 0.01
"""By how much a neighbour may be slower and still be gone on from, relatively; less with every one that is no better."""
CLIMBED = 3
"""Placements of a large problem that are climbed from, one after the other."""
PATIENCE = 0.4
"""Of the time left, without a better one: then the next is climbed from."""
QUIET_SECONDS, LEAST_QUIET, MOST_QUIET = 2.0, 16, 120
"""Simulations in a row without a better one, after which climbing ends: as many as take this long."""


@dataclass
class FreeJudge:
    """What was simulated. ``capacity_bytes``: per rank."""

    simulate: SimulateFree
    capacity_bytes: Sequence[int]
    tried: list[SimulatedFree] = field(default_factory=list)
    homes: dict[int, tuple[CountSearch, Home]] = field(default_factory=dict)
    """By position in ``tried``."""
    _known: dict[object, SimulatedFree] = field(default_factory=dict)
    _seen: set[object] = field(default_factory=set)
    _spent_seconds: float = 0.0

    def candidate(self, candidate: FreeCandidate) -> SimulatedFree:
        """A candidate as it is."""
        key = (candidate.microbatches, frozenset(candidate.rank_of.items()))
        if key not in self._known:
            started = time.perf_counter()
            self._known[key] = self.simulate(candidate)
            self._spent_seconds += time.perf_counter() - started
            self.tried.append(self._known[key])
        return self._known[key]

    def seen(self, search: CountSearch, home: Home) -> bool:
        """Whether a placement that costs the same was simulated."""
        return (search.microbatches, search.predict.signature(home)) in self._seen

    def placement(self, search: CountSearch, home: Home, name: str) -> SimulatedFree:
        """A placement of the search's units."""
        self._seen.add((search.microbatches, search.predict.signature(home)))
        ranks = search.model.ranks(home)
        known = len(self.tried)
        simulated = self.candidate(FreeCandidate(ranks, search.microbatches, name))
        if len(self.tried) > known:
            self.homes[known] = search, home
        return simulated

    @property
    def each_seconds(self) -> float:
        """What a simulation takes, about."""
        return self._spent_seconds / max(1, len(self.tried))

    def overflow_bytes(self, simulated: SimulatedFree) -> int:
        """Of the fullest device; 0 or less if all fit."""
        return max(
            peak - capacity
            for peak, capacity in zip(simulated.peak_memory_bytes, self.capacity_bytes, strict=True)
        )

    def best(self) -> SimulatedFree | None:
        """The fastest that fits."""
        fitting = [s for s in self.tried if self.overflow_bytes(s) <= 0]
        return min(fitting, key=lambda s: s.step_seconds, default=None)

    def climb(self, deadline: float, seed: int) -> int:
        """Move units of the best placement while its simulated step gets shorter; how many were simulated.

        Of a large problem then of others that were found, and of the best again, while there is time: which moves are
        drawn decides much.
        """
        fitting = [i for i in self.homes if self.overflow_bytes(self.tried[i]) <= 0]
        if not fitting:
            return 0
        ranked = sorted(fitting, key=lambda i: self.tried[i].step_seconds)
        problem = self.homes[ranked[0]][0].problem
        if problem.units * problem.devices <= EXACT_CHOICES:
            return self._climb_from(ranked[0], deadline, seed)
        unlike: dict[str, int] = {}
        for i in ranked:
            unlike.setdefault(self.tried[i].candidate.description, i)
        count = 0
        for number, first in enumerate(list(unlike.values())[:CLIMBED]):
            patience = PATIENCE * (deadline - time.perf_counter())
            count += self._climb_from(first, deadline, seed + number, patience)
        best = min(
            (i for i in self.homes if self.overflow_bytes(self.tried[i]) <= 0),
            key=lambda i: self.tried[i].step_seconds,
        )
        return count + self._climb_from(best, deadline, seed + CLIMBED)

    def _climb_from(
        self, first: int, deadline: float, seed: int, quiet_seconds: float = QUIET_SECONDS
    ) -> int:
        """Threshold accepting, as ``passes.search.free.climb``. Of several neighbours the best predicted is simulated."""
        patience = max(QUIET_SECONDS, quiet_seconds)
        quiet = max(LEAST_QUIET, min(MOST_QUIET, int(patience / max(self.each_seconds, 1e-6))))
        draw = random.Random(seed)
        search, home = self.homes[first]
        seconds = least = self.tried[first].step_seconds
        around = Neighbourhood(search.problem, search.model.module_of_unit)
        count, silent = 0, 0
        while silent < quiet and time.perf_counter() + self.each_seconds < deadline:
            silent += 1
            drawn = list(itertools.islice(around.draw(home, draw), PREDICTED_PER_SIMULATION))
            unknown = [other for other in drawn if not self.seen(search, other)]
            if not drawn:
                break
            if not unknown:
                continue
            other = min(unknown, key=search.predict)
            simulated = self.placement(search, other, MOVED)
            count += 1
            if self.overflow_bytes(simulated) > 0:
                continue
            if simulated.step_seconds < least:
                least, silent = simulated.step_seconds, 0
            if simulated.step_seconds <= seconds * (1 + SLACK * (1 - silent / quiet)):
                home, seconds = other, simulated.step_seconds
        return count
