"""The judge of every search: simulates candidates as the programs they become, and keeps the fastest that fits.

candidate ─► segments ─► quick bound: cannot win        or        ─► programs ─► simulated step ─► fits, overflows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from cost_models.cluster import ClusterSpec
from cost_models.devices import Device
from cost_models.room import at_risk, chance_of_not_fitting
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.graph.state import owning_units
from passes.lower.candidate import Candidate
from passes.lower.costed import segments_of
from passes.lower.job import Job
from passes.lower.mesh_stages import MeshStages
from passes.lower.realize import Realized, realize, segmented
from passes.lower.reserved import reserved
from passes.lower.segment import Segmentation
from passes.lower.step import transfer_seconds
from passes.progress import report_simulated
from passes.search.infeasible import overflow_bytes
from passes.timings import phase
from runtime.program.timing import quick_makespan
from runtime.schedules import SCHEDULES

MEMORY_ROUNDS = 4
"""Searches with less memory each, while what is simulated overflows: a search's memory is an estimate. By hand: no
benchmark model needs more than two."""

Room = TypeVar("Room")


@dataclass(frozen=True, eq=False)
class Simulated:
    """A candidate and what the simulation of its programs says."""

    candidate: Candidate
    step_seconds: float
    peak_bytes: Sequence[int]
    """Peak memory of each rank."""
    overflow_bytes: int
    """Bytes beyond the room of the fullest device; 0 or less if all fit."""
    chance: float | None = None
    """Chance that a device needs more memory than it has."""
    beside_bytes: Sequence[int] = ()
    """The part of each peak that is no tensors' (``runtime.program.communicators``); empty: nothing of any."""
    allocator_bytes: Sequence[int] = ()
    """The part of that which the allocator reserves; empty where it was not replayed."""

    @property
    def fits(self) -> bool:
        """True if every device has the room that its part of the simulated step needs."""
        return self.overflow_bytes <= 0

    @property
    def most_bytes(self) -> int:
        """The peak of the fullest device, without what the allocator reserves beyond: that comes in segments."""
        return max(self._unreserved_bytes)

    def tensors_fit(self, devices: Sequence[Device]) -> bool:
        """Tell whether all would fit but for what the allocator reserves beyond tensors."""
        return overflow_bytes(self._unreserved_bytes, devices) <= 0

    @property
    def _unreserved_bytes(self) -> list[int]:
        """The peaks without what the allocator reserves beyond tensors."""
        more = self.allocator_bytes or [0] * len(self.peak_bytes)
        return [peak - own for peak, own in zip(self.peak_bytes, more, strict=True)]

    def tensors_of(self, devices: Sequence[Device]) -> Iterator[tuple[int, int]]:
        """Yield of each rank what its tensors hold at the peak, and the room that its device has for them."""
        beside = self.beside_bytes or [0] * len(self.peak_bytes)
        for peak, own, device in zip(self.peak_bytes, beside, devices, strict=True):
            yield peak - own, device.room_bytes - own


@dataclass(frozen=True, eq=False)
class Carried:
    """A candidate carried through to its programs and their simulation."""

    candidate: Candidate
    realized: Realized

    @property
    def seconds(self) -> float:
        """Seconds of the simulated step."""
        return self.realized.simulation.step_seconds


class Judge:
    """Simulates the candidates of one graph, and keeps the fastest that fits: most likely it will be chosen."""

    def __init__(self, graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, job: Job) -> None:
        self.graph, self.costs, self.job = graph, costs, job
        self.cluster = at_risk(cluster, job.risk)
        """The cluster, whose devices have the room that plans have at the job's risk."""
        self.tried: list[Simulated] = []
        """Everything that was simulated, in order."""
        self._kept: tuple[Candidate, Carried] | None = None
        self._stages = MeshStages(graph, cluster, job)

    @cached_property
    def recomputed(self) -> frozenset[str]:
        """Ops that every segment runs for itself."""
        return recomputed_ops(self.graph)

    def simulate(self, candidate: Candidate) -> Simulated:
        """Simulate a candidate's step."""
        found = self.measure(candidate)
        self.tried.append(found)
        return found

    def measure(self, candidate: Candidate) -> Simulated:
        """Step time and peak memory of a candidate, as its programs have them."""
        return self.judged(candidate, self.carry(candidate))

    def judged(self, candidate: Candidate, carried: Carried) -> Simulated:
        """The figures of what ``candidate`` became, which is kept if nothing that is fits and is faster."""
        found = self.simulated(candidate, carried.realized)
        if found.fits and (self._kept is None or found.step_seconds <= self._kept[1].seconds):
            carried = self.with_allocator(carried)
            found = self.simulated(candidate, carried.realized)
        self.keep(candidate, carried, found.fits)
        return found

    @phase("allocator")
    def with_allocator(self, carried: Carried) -> Carried:
        """Return ``carried`` with what torch's allocator reserves beside its tensors: of what may be chosen, not of all."""
        own, realized = carried.candidate, carried.realized
        if realized.step.allocator_bytes or all(d.kind != "cuda" for d in self.cluster.devices):
            return carried
        more = reserved(self.graph, self.costs, self.cluster, self.job, own, realized, self._stages)
        simulation = realized.simulation.with_allocator(more)
        step = replace(realized.step, allocator_bytes=more)
        return Carried(own, replace(realized, step=step, simulation=simulation))

    def simulated(self, candidate: Candidate, realized: Realized) -> Simulated:
        """The figures of a realized candidate."""
        simulation = realized.simulation
        peak_bytes, beside = simulation.peak_bytes, [sum(own) for own in simulation.process]
        over = overflow_bytes(peak_bytes, self.cluster.devices)
        chance = chance_of_not_fitting(zip(peak_bytes, self.cluster.devices, strict=True))
        more = realized.step.allocator_bytes
        return Simulated(candidate, simulation.step_seconds, peak_bytes, over, chance, beside, more)

    def keep(self, candidate: Candidate, carried: Carried, fits: bool) -> None:
        """Remember what ``candidate`` became, if it fits and nothing faster is kept."""
        if fits and (self._kept is None or carried.seconds < self._kept[1].seconds):
            self._kept = candidate, carried
            report_simulated(carried.seconds)

    def choose(self, carried: Carried) -> None:
        """Keep ``carried``, whatever was kept before: the search is over."""
        self._kept = carried.candidate, self.with_allocator(carried)

    def kept(self, candidate: Candidate) -> Carried | None:
        """Return what ``candidate`` became, if that was kept."""
        return self._kept[1] if self._kept is not None and self._kept[0] is candidate else None

    def carried(self, candidate: Candidate) -> Carried:
        """Return what ``candidate`` became; carried through again only if it is not the one that was kept."""
        return self.with_allocator(self.kept(candidate) or self.carry(candidate))

    @phase("simulation")
    def carry(self, candidate: Candidate, segmentation: Segmentation | None = None) -> Carried:
        """Carry a candidate through to programs and their simulation. ``segmentation``: its segments, if known."""
        segmentation = segmentation or self.segmentation(candidate)
        realized = realize(
            self.graph, self.costs, self.cluster, self.job, candidate, segmentation, self._stages
        )
        return Carried(candidate, realized)

    def lower_bound_seconds(self, candidate: Candidate) -> float:
        """Seconds that simulating the candidate cannot be below: no shared links, no queues, no optimizer.

        20 times as fast as simulating; 0 where micro-batches differ in size.
        """
        sizes = self.job.sizes(candidate.microbatches)
        if sizes[0] != sizes[-1]:
            return 0.0
        return self.makespan(candidate, self.segmentation(candidate))

    def makespan(self, candidate: Candidate, segmentation: Segmentation) -> float:
        """Seconds of the candidate's schedule over these segments, messages without contention."""
        segments = segments_of(
            self.graph, self.costs, self.cluster, self.job, candidate, segmentation, peaks=False
        )
        seconds = transfer_seconds(self.cluster)
        order = SCHEDULES[candidate.schedule].order(
            segments, candidate.microbatches, transfer_seconds=seconds
        )
        return quick_makespan(segments, order, candidate.microbatches, seconds)

    def segmentation(self, candidate: Candidate) -> Segmentation:
        """The segments of a candidate."""
        unit_of = None if candidate.contiguous else self._unit_of
        return segmented(self.graph, candidate, self.recomputed, unit_of)

    @cached_property
    def _unit_of(self) -> dict[str, int]:
        return dict(owning_units(self.graph, self.recomputed))


def fastest_fitting(tried: Sequence[Simulated]) -> Simulated | None:
    """Choose the fastest that fits."""
    return min((s for s in tried if s.fits), key=lambda s: s.step_seconds, default=None)


def memory_rounds(search: Callable[[int, Room], Room | None], room: Room) -> None:
    """Search while too little memory was reckoned with, each time as if devices were smaller.

    ``search(round, room)`` returns the room to search with next, or None when it is content.
    """
    for number in range(MEMORY_ROUNDS):
        smaller = search(number, room)
        if smaller is None:
            return
        room = smaller
