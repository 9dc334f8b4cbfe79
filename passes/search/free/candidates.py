"""Candidates of the free search, carried through: placement ─► segments ─► list schedule ─► programs ─► simulated step."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from cost_models.cluster import ClusterSpec
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.graph.state import owning_units
from passes.lower.realize import realize_segments
from passes.lower.segment import Segmentation, by_reach, merge
from passes.lower.step import transfer_seconds
from passes.lower.summarize import segment_graph
from passes.search.free.request import FreeCandidate, FreeRequest, SimulatedFree
from passes.search.placed import Realized
from runtime.program.order import quick_makespan
from runtime.program.program import SegmentGraph
from runtime.schedules import SCHEDULES
from runtime.segment.microbatch import microbatch_sizes

LISTS = ("list", "list-split")
"""Free placements revisit devices and branch: no pipeline's order is made for them."""
BOTH_SECONDS = 0.05
"""As long as a simulation takes less, candidates are simulated under both; then under the one that won more often."""
LONG = 20_000
"""Instructions of a step; longer ones are simulated under one schedule from the first on, with backwards in halves."""
MERGE_SECONDS = 5.0
"""How long segments of the chosen placement are merged at most."""
MERGE_TIMES = 3.0
"""Simulations' time that must be left to begin merging: a few trials, and the simulation of what becomes of them."""


@dataclass(frozen=True, eq=False)
class Scheduled:
    """A candidate under one schedule."""

    schedule: str
    realized: Realized

    @property
    def seconds(self) -> float:
        """Of the simulated step."""
        return self.realized.simulation.step_seconds


class FreeCandidates:
    """Realizes the candidates of one search, and keeps the fastest that fits: most likely it will be chosen."""

    def __init__(
        self,
        graph: OpGraph,
        costs: GraphCosts,
        cluster: ClusterSpec,
        request: FreeRequest,
        recomputed: frozenset[str],
    ) -> None:
        self._graph, self._costs, self._cluster, self._request = graph, costs, cluster, request
        self._recomputed = recomputed
        self._unit_of = owning_units(graph, recomputed)
        self._best: tuple[FreeCandidate, Scheduled] | None = None
        self._won: Counter[str] = Counter()
        self._slow = False
        self._each_seconds = 0.0

    def simulate(self, candidate: FreeCandidate) -> SimulatedFree:
        """Step time and peak memory of a candidate, under the better schedule."""
        segmentation = self.segmentation(candidate.rank_of)
        self._slow |= 3 * len(segmentation) * candidate.microbatches > LONG
        names = LISTS if not self._slow else (max(reversed(LISTS), key=lambda name: self._won[name]),)
        started = time.perf_counter()
        found = [self.schedule(candidate, segmentation, name) for name in names]
        self._each_seconds = (time.perf_counter() - started) / len(names)
        self._slow |= self._each_seconds > BOTH_SECONDS
        best = min(found, key=self._rank)
        if len(found) > 1:
            self._won[best.schedule] += 1
        if self._fits(best) and (self._best is None or best.seconds < self._best[1].seconds):
            self._best = candidate, best
        return SimulatedFree(candidate, best.seconds, best.realized.simulation.peak_bytes)

    def realized(self, candidate: FreeCandidate, left_seconds: float = math.inf) -> Scheduled:
        """What ``candidate`` became, under the best schedule; what was simulated is not simulated again."""
        known = [self._best[1]] if self._best is not None and self._best[0] is candidate else []
        if known and (not self._slow or left_seconds < MERGE_TIMES * self._each_seconds):
            return known[0]
        segmentation = known[0].realized.segmentation if known else self.segmentation(candidate.rank_of)
        done = {each.schedule for each in known}
        known += [self.schedule(candidate, segmentation, name) for name in LISTS if name not in done]
        return min(known, key=self._rank)

    def merged(self, candidate: FreeCandidate, found: Scheduled, left_seconds: float = math.inf) -> Scheduled:
        """``found`` with fewer segments where that is not slower: each is a call and, between devices, a wait."""
        if left_seconds < MERGE_TIMES * self._each_seconds:
            return found
        seconds = min(MERGE_SECONDS, max(0.0, left_seconds - self._each_seconds))
        return min((self._merged(candidate, found, seconds), found), key=self._rank)

    def segmentation(self, rank_of: Mapping[str, int]) -> Segmentation:
        """The segments of a placement."""
        groups = {name: (rank,) for name, rank in rank_of.items()}
        return by_reach(self._graph, groups, self._recomputed, self._unit_of)

    def schedule(self, candidate: FreeCandidate, segmentation: Segmentation, schedule: str) -> Scheduled:
        """A candidate's segments under one schedule."""
        request = self._request
        realized = realize_segments(
            self._graph,
            segmentation,
            self._segments(candidate, segmentation, schedule),
            self._cluster,
            schedule,
            batch_size=request.batch_size,
            microbatches=candidate.microbatches,
            optimizer=request.optimizer,
            precision=request.precision,
        )
        return Scheduled(schedule, realized)

    def _rank(self, found: Scheduled) -> tuple[bool, float]:
        """What fits comes first, then what is faster."""
        return not self._fits(found), found.seconds

    def _fits(self, found: Scheduled) -> bool:
        """Whether every device has the memory that its part of the simulated step needs."""
        peaks = found.realized.simulation.peak_bytes
        return all(
            peak <= device.memory_bytes for peak, device in zip(peaks, self._cluster.devices, strict=True)
        )

    def _merged(self, candidate: FreeCandidate, found: Scheduled, limit_seconds: float) -> Scheduled:
        """Fewer segments, by the makespan of the list schedule."""
        seconds = transfer_seconds(self._cluster)

        def makespan(trial: Segmentation) -> float:
            segments = self._segments(candidate, trial, found.schedule)
            order = SCHEDULES[found.schedule].order(
                segments, candidate.microbatches, transfer_seconds=seconds
            )
            return quick_makespan(segments, order, candidate.microbatches, seconds)

        merged = merge(self._graph, found.realized.segmentation, makespan, seconds=limit_seconds)
        if len(merged) == len(found.realized.segmentation):
            return found
        return self.schedule(candidate, merged, found.schedule)

    def _segments(self, candidate: FreeCandidate, segmentation: Segmentation, schedule: str) -> SegmentGraph:
        largest = microbatch_sizes(self._request.batch_size, candidate.microbatches)[0]
        return segment_graph(
            self._graph,
            self._costs,
            segmentation,
            self._cluster,
            largest,
            deferring=SCHEDULES[schedule].splits_backward,
        )
