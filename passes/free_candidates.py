"""Candidates of the free search, carried through: placement ─► segments ─► list schedule ─► programs ─► simulated step."""

from __future__ import annotations

import time
from collections.abc import Mapping

from cost_models.cluster import ClusterSpec
from cost_models.compute import optimizer_seconds
from passes.costs import GraphCosts
from passes.graph import OpGraph
from passes.place_free import FreeCandidate, FreeRequest, SimulatedFree
from passes.placed import Realized
from passes.segment import Segmentation, by_reach, merge
from passes.step import StepCosts, programs_for, simulate_step, transfer_seconds
from passes.summarize import (
    gradient_bytes,
    segment_graph,
    state_of_ranks,
    tied_groups,
    trained_tensors,
)
from runtime.microbatch import microbatch_sizes
from runtime.order import quick_makespan
from runtime.program import SegmentGraph
from runtime.schedules import SCHEDULES

SCHEDULE = "list"
"""Free placements revisit devices and branch: no pipeline's order is made for them."""

MERGE_SECONDS = 5.0
"""How long segments of the chosen placement are merged at most."""


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
        self._best: tuple[FreeCandidate, Realized] | None = None

    def simulate(self, candidate: FreeCandidate) -> SimulatedFree:
        """Step time and peak memory of a candidate."""
        realized = self.realize(candidate, self.segmentation(candidate.rank_of))
        simulation = realized.simulation
        best = self._best[1].simulation.step_seconds if self._best is not None else float("inf")
        if simulation.step_seconds < best and fits(realized, self._cluster):
            self._best = candidate, realized
        return SimulatedFree(candidate, simulation.step_seconds, simulation.peak_bytes)

    def realized(self, candidate: FreeCandidate) -> Realized:
        """What ``candidate`` became, with fewer segments where that is not slower."""
        if self._best is not None and self._best[0] is candidate:
            plain = self._best[1]
        else:
            plain = self.realize(candidate, self.segmentation(candidate.rank_of))
        merged = self.realize(candidate, self._merged(candidate, plain.segmentation))
        better = merged.simulation.step_seconds <= plain.simulation.step_seconds * (1 + 1e-12)
        return merged if better and fits(merged, self._cluster) >= fits(plain, self._cluster) else plain

    def segmentation(self, rank_of: Mapping[str, int]) -> Segmentation:
        """The segments of a placement."""
        return by_reach(self._graph, {name: (rank,) for name, rank in rank_of.items()}, self._recomputed)

    def realize(self, candidate: FreeCandidate, segmentation: Segmentation) -> Realized:
        """Carry segments through schedule, order and simulation."""
        graph, cluster, request = self._graph, self._cluster, self._request
        segments, sizes = self._segments(candidate, segmentation)
        tied = tied_groups(graph, segmentation)
        state = state_of_ranks(graph, segmentation, cluster.world_size, request.optimizer, request.precision)
        tensors = trained_tensors(graph, segmentation, cluster.world_size)
        step = StepCosts(
            state_bytes=tuple(held.total for held in state),
            optimizer_seconds=tuple(
                optimizer_seconds(held, device, request.optimizer, count)
                for held, device, count in zip(state, cluster.devices, tensors, strict=True)
            ),
            tied_bytes={
                name: gradient_bytes(graph, name, request.precision)
                for group in tied
                for name in group.parameters
            },
        )
        programs = programs_for(
            segments, cluster, SCHEDULE, candidate.microbatches, tied, state_bytes=step.state_bytes
        )
        simulation = simulate_step(programs, segments, cluster, step, sizes)
        return Realized(segmentation, segments, tied, programs, state, step, simulation)

    def _merged(self, candidate: FreeCandidate, segmentation: Segmentation) -> Segmentation:
        """Fewer segments, by the makespan of the list schedule; what is tried last may be left as it is."""
        seconds = transfer_seconds(self._cluster)
        deadline = time.perf_counter() + MERGE_SECONDS

        def makespan(trial: Segmentation) -> float:
            if time.perf_counter() > deadline:
                return float("inf")
            segments, _ = self._segments(candidate, trial)
            orders = SCHEDULES[SCHEDULE].order(segments, candidate.microbatches, transfer_seconds=seconds)
            return quick_makespan(segments, orders, candidate.microbatches, seconds)

        return merge(self._graph, segmentation, makespan)

    def _segments(
        self, candidate: FreeCandidate, segmentation: Segmentation
    ) -> tuple[SegmentGraph, tuple[int, ...]]:
        sizes = microbatch_sizes(self._request.batch_size, candidate.microbatches)
        segments = segment_graph(self._graph, self._costs, segmentation, self._cluster, sizes[0])
        return segments, sizes


def fits(realized: Realized, cluster: ClusterSpec) -> bool:
    """Whether every device has the memory that its part of the simulated step needs."""
    peaks = realized.simulation.peak_bytes
    return all(peak <= device.memory_bytes for peak, device in zip(peaks, cluster.devices, strict=True))
