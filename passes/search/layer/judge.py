"""Candidates of the layer-wise search before the judge: placement ─► simulated ─► fits, overflows, or cannot win."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from passes.search.layer.lean import all_blocks, fewest_blocks
from passes.search.layer.search import LayerSearch, Solved, busiest_seconds


@dataclass(frozen=True)
class LayerCandidate:
    """A placement. Recomputed ops have no stage."""

    stage_of: Mapping[str, int]
    ranks: tuple[int, ...]
    """Rank of each stage."""
    schedule: str
    microbatches: int
    chunks: int
    recomputed_blocks: tuple[tuple[str, ...], ...] = ()
    """Per stage, the blocks (``passes.graph.blocks``) that it computes again in backward. Empty: none anywhere."""

    @property
    def description(self) -> str:
        """For tables: ``8 stages, 1f1b, 32 micro-batches``."""
        recomputing = sum(map(bool, self.recomputed_blocks))
        more = f", {recomputing} stages recompute" if recomputing else ""
        return f"{len(self.ranks)} stages, {self.schedule}, {self.microbatches} micro-batches{more}"


@dataclass(frozen=True)
class SimulatedCandidate:
    """What the simulation of a candidate's programs says. ``peak_memory_bytes``: per rank."""

    candidate: LayerCandidate
    step_seconds: float
    peak_memory_bytes: Sequence[int]


@dataclass(frozen=True)
class Tried:
    """A split of the search and what its simulation said."""

    solved: Solved
    simulated: SimulatedCandidate
    overflow_bytes: int
    """Of the fullest device; 0 or less if all fit."""

    @property
    def seconds(self) -> float:
        return self.simulated.step_seconds


@dataclass
class Judge:
    """Simulates what may still win, each split once, and remembers by which bound the others cannot."""

    search: LayerSearch
    simulate: Callable[[LayerCandidate], SimulatedCandidate]
    lower_bound: Callable[[LayerCandidate], float] | None
    bounded: list[tuple[Solved, float]] = field(default_factory=list)
    _seen: set[tuple[object, ...]] = field(default_factory=set)

    def __call__(self, solved: Solved, best_seconds: float) -> Tried | None:
        """The candidate simulated; None if it cannot beat ``best_seconds`` or was judged before."""
        split = solved.split
        key = (solved.option, solved.ranks, solved.space.name, split.stage_of, split.recomputed)
        if key in self._seen:
            return None
        self._seen.add(key)
        candidate = candidate_of(self.search, solved)
        bound = busiest_seconds(self.search, solved)
        if self.lower_bound is not None and bound < best_seconds < math.inf:
            bound = max(bound, self.lower_bound(candidate))
        if bound >= best_seconds:
            self.bounded.append((solved, bound))
            return None
        simulated = self.simulate(candidate)
        overflow_bytes = _overflow_bytes(self.search, simulated)
        every = all_blocks(self.search, solved)
        if overflow_bytes > 0 and candidate.recomputed_blocks != every:
            simulated = self.simulate(replace(candidate, recomputed_blocks=every))
            overflow_bytes = _overflow_bytes(self.search, simulated)
        return Tried(solved, simulated, overflow_bytes)


def candidate_of(search: LayerSearch, solved: Solved) -> LayerCandidate:
    """The split as a placement of the model's ops, with as few blocks computed again as fit."""
    model = search.model
    stages = [solved.split.stage_of[unit] for unit in solved.space.unit_of.tolist()]
    return LayerCandidate(
        stage_of=dict(zip(model.names, stages, strict=True)),
        ranks=solved.ranks,
        schedule=solved.option.schedule,
        microbatches=solved.option.microbatches,
        chunks=solved.option.chunks,
        recomputed_blocks=fewest_blocks(search, solved),
    )


def fastest_that_fits(tried: Sequence[Tried]) -> float:
    """Simulated seconds; infinite if none fits."""
    return min((t.seconds for t in tried if t.overflow_bytes <= 0), default=math.inf)


def _overflow_bytes(search: LayerSearch, simulated: SimulatedCandidate) -> int:
    """Bytes that do not fit the fullest device; 0 or less if all fit."""
    devices = search.cluster.devices
    return max(
        peak - device.memory_bytes for peak, device in zip(simulated.peak_memory_bytes, devices, strict=True)
    )


def estimated_bytes(search: LayerSearch, solved: Solved) -> list[float]:
    """What the surrogate thinks that each rank holds."""
    held = [0.0] * len(search.cluster.devices)
    for rank, size in zip(solved.ranks, solved.split.memory_bytes, strict=True):
        held[rank] += size
    return held


def estimated_share(search: LayerSearch, tried: Tried) -> float:
    """Estimated / simulated bytes, the least of all devices that overflow."""
    ranks = zip(
        estimated_bytes(search, tried.solved),
        tried.simulated.peak_memory_bytes,
        search.cluster.devices,
        strict=True,
    )
    return min(held / peak for held, peak, device in ranks if peak > device.memory_bytes)
