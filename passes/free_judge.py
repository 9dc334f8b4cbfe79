"""Simulates the candidates of the free search, each once, and climbs on the simulation itself."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from passes.free_climb import Neighbourhood
from passes.free_search import CountSearch
from passes.free_starts import Home
from passes.free_types import FreeCandidate, SimulatedFree, SimulateFree

log = logging.getLogger("partitioner")

PREDICTED_PER_SIMULATION = 6
"""Neighbours predicted for each that is simulated, while climbing."""
CLIMB_QUIET = 16
"""Simulated neighbours in a row without a better one, after which climbing ends."""


@dataclass
class FreeJudge:
    """What was simulated. ``capacity_bytes``: per rank."""

    simulate: SimulateFree
    capacity_bytes: Sequence[int]
    tried: list[SimulatedFree] = field(default_factory=list)
    homes: dict[int, tuple[CountSearch, Home]] = field(default_factory=dict)
    """By position in ``tried``."""
    _known: dict[object, SimulatedFree] = field(default_factory=dict)
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

    def placement(self, search: CountSearch, home: Home, name: str) -> SimulatedFree:
        """A placement of the search's units."""
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
        """Move units of the best placement while its simulated step gets shorter; how many were simulated."""
        count, silent = 0, 0
        draw = random.Random(seed)
        while silent < CLIMB_QUIET and time.perf_counter() + self.each_seconds < deadline:
            best = self.best()
            at = next(
                (self.homes[i] for i, s in enumerate(self.tried) if s is best and i in self.homes), None
            )
            if best is None or at is None:
                return count
            search, home = at
            around = Neighbourhood(search.problem, search.model.module_of_unit).draw(home, draw)
            drawn: list[Home] = []
            for _ in range(PREDICTED_PER_SIMULATION):
                other = next(around, None)
                if other is not None:
                    drawn.append(other)
                if time.perf_counter() > deadline:
                    break
            if not drawn:
                return count
            known = len(self.tried)
            self.placement(search, min(drawn, key=search.predict), "moved in simulation")
            count += len(self.tried) - known
            silent = 0 if self.best() is not best else silent + 1
        return count
