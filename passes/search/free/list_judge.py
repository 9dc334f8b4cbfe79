"""The judge of free placements: segments by reach, the better of the list schedules, segments merged in the end.

placement ─► segments ─► list schedule, with whole backwards or halves ─► programs ─► simulated step
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace

from cost_models.cluster import ClusterSpec
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.lower.segment import Segmentation, merge
from passes.search.free.tuning import DEFAULT, FreeTuning
from passes.search.judge import Carried, Judge, Simulated


class ListJudge(Judge):
    """Simulates the candidates of one free search under the list schedules."""

    def __init__(
        self, graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, job: Job, tuning: FreeTuning = DEFAULT
    ) -> None:
        super().__init__(graph, costs, cluster, job)
        self._tuning = tuning
        self._won: Counter[str] = Counter()
        self._slow = False
        self._each_seconds = 0.0

    def measure(self, candidate: Candidate) -> Simulated:
        """Measure step time and peak memory of a candidate under the better schedule."""
        segmentation = self.segmentation(candidate)
        self._slow |= 3 * len(segmentation) * candidate.microbatches > self._tuning.long_step
        lists = self._tuning.schedules
        names = lists if not self._slow else (max(reversed(lists), key=lambda name: self._won[name]),)
        started = time.perf_counter()
        found = [self.schedule(candidate, segmentation, name) for name in names]
        self._each_seconds = (time.perf_counter() - started) / len(names)
        self._slow |= self._each_seconds > self._tuning.both_seconds
        best = min(found, key=self._rank)
        if len(found) > 1:
            self._won[best.candidate.schedule] += 1
        simulated = self.simulated(candidate, best.realized)
        self.keep(candidate, best, simulated.fits)
        return simulated

    def finished(self, candidate: Candidate, left_seconds: float = math.inf) -> Carried:
        """Carry ``candidate`` through under the best schedule; schedules that were simulated are not simulated again."""
        known = [carried for carried in [self.kept(candidate)] if carried is not None]
        if known and (not self._slow or left_seconds < self._tuning.merge_times * self._each_seconds):
            return known[0]
        segmentation = known[0].realized.segmentation if known else self.segmentation(candidate)
        done = {each.candidate.schedule for each in known}
        known += [
            self.schedule(candidate, segmentation, name)
            for name in self._tuning.schedules
            if name not in done
        ]
        return min(known, key=self._rank)

    def merged(self, found: Carried, left_seconds: float = math.inf) -> Carried:
        """Merge segments of ``found`` where that is not slower: each is a call and, between devices, a wait."""
        if left_seconds < self._tuning.merge_times * self._each_seconds:
            return found
        limit_seconds = min(self._tuning.merge_seconds, max(0.0, left_seconds - self._each_seconds))
        candidate, before = found.candidate, found.realized.segmentation
        merged = merge(
            self.graph, before, lambda trial: self.makespan(candidate, trial), seconds=limit_seconds
        )
        if len(merged) == len(before):
            return found
        return min((self.carry(candidate, merged), found), key=self._rank)

    def schedule(self, candidate: Candidate, segmentation: Segmentation, name: str) -> Carried:
        """Carry a candidate's segments through under one schedule."""
        return self.carry(replace(candidate, schedule=name), segmentation)

    def _rank(self, found: Carried) -> tuple[bool, float]:
        """Order what fits first, then what is faster."""
        return not self.simulated(found.candidate, found.realized).fits, found.seconds
