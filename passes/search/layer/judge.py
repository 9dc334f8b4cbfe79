"""Splits of the layer-wise search before the judge: placement ─► simulated ─► fits, overflows, or cannot win."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from passes.lower.candidate import Candidate
from passes.search.judge import Judge, Simulated
from passes.search.layer.lean import all_blocks, fewest_blocks
from passes.search.layer.search import LayerSearch, SolvedSplit, busiest_seconds


@dataclass(frozen=True, eq=False)
class Judged:
    """A split of the search and what its simulation said."""

    solved: SolvedSplit
    simulated: Simulated


@dataclass
class SplitJudge:
    """Simulates the splits that may still win, each once, and remembers by which bound the others cannot."""

    search: LayerSearch
    judge: Judge
    bounded: list[tuple[SolvedSplit, float]] = field(default_factory=list)
    """Splits that were not simulated, with the seconds that their step takes at least."""
    _seen: set[tuple[object, ...]] = field(default_factory=set)

    def __call__(self, solved: SolvedSplit, best_seconds: float) -> Judged | None:
        """Simulate a split; None if it cannot beat ``best_seconds`` or was judged before."""
        split = solved.split
        key = (solved.option, solved.ranks, solved.space.name, split.stage_of, split.recomputed)
        if key in self._seen:
            return None
        self._seen.add(key)
        candidate = candidate_of(self.search, solved)
        bound = busiest_seconds(self.search, solved)
        if bound < best_seconds < math.inf:
            bound = max(bound, self.judge.lower_bound_seconds(candidate))
        if bound >= best_seconds:
            self.bounded.append((solved, bound))
            return None
        simulated = self.judge.simulate(candidate)
        every = all_blocks(self.search, solved)
        if not simulated.fits and candidate.recomputed_blocks != every:
            simulated = self.judge.simulate(replace(candidate, recomputed_blocks=every))
        return Judged(solved, simulated)


def candidate_of(search: LayerSearch, solved: SolvedSplit) -> Candidate:
    """Make the split a placement of the model's ops, with as few blocks computed again as fit."""
    return Candidate(
        stage_of=dict(zip(search.model.names, solved.stages.tolist(), strict=True)),
        groups=tuple((rank,) for rank in solved.ranks),
        microbatches=solved.option.microbatches,
        schedule=solved.option.schedule,
        recomputed_blocks=fewest_blocks(search, solved),
    )


def fastest_seconds(judged: Sequence[Judged]) -> float:
    """Simulated seconds of the fastest that fits; infinite if none does."""
    return min((j.simulated.step_seconds for j in judged if j.simulated.fits), default=math.inf)


def estimated_bytes(search: LayerSearch, solved: SolvedSplit) -> list[float]:
    """Bytes that each rank holds, as the surrogate counts them."""
    held = [0.0] * len(search.cluster.devices)
    for rank, size in zip(solved.ranks, solved.split.memory_bytes, strict=True):
        held[rank] += size
    return held


def estimated_share(search: LayerSearch, judged: Judged) -> float:
    """Estimated / simulated bytes, the least of all devices that overflow."""
    ranks = zip(
        estimated_bytes(search, judged.solved),
        judged.simulated.peak_bytes,
        search.cluster.devices,
        strict=True,
    )
    return min(held / peak for held, peak, device in ranks if peak > device.memory_bytes)
