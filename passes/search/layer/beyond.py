"""Bytes of stages beyond what tables count, as simulations told them: what an allocator reserves follows from a program.

    a split whose tensors fit, but not what is reserved for them ─► bytes of its stages ─► tables of the next searches

A table without them is a relaxation: bounds that were proved with it hold. Each search leaves out at least the stage that
was learned from, so that what is found in the end fits, or nothing does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from passes.search.layer.options import DevicePlan, ScheduleOption
from passes.search.layer.problem import BeyondTables, Held, LayerProblem, StageSplit
from passes.search.layer.spaces import Space

_StageSetting: TypeAlias = tuple[int, int, float, tuple[Held, ...], bool]
"""Micro-batches of the step and samples of each, room of the device, micro-batches that the stage holds at its fullest
moments, and whether it computes blocks again: what the bytes of a stage follow from, but for its ops."""


@dataclass(eq=False)
class LearnedBytes:
    """The bytes of simulated stages of one search, beyond what its tables count."""

    _known: dict[Space, dict[_StageSetting, dict[int, float]]] = field(default_factory=dict)
    """Bytes of each pair of downsets (``Geometry``), by space and setting."""
    _shares: dict[tuple[ScheduleOption, int], float] = field(default_factory=dict)

    def learn_share(self, option: ScheduleOption, size: int, share: float) -> None:
        """Take in how much of the memory an option's tables may fill: of devices with several stages, which share bytes.

        ``size``: samples of a micro-batch.
        """
        self._shares[option, size] = min(share, self.share_of(option, size))

    def share_of(self, option: ScheduleOption, size: int) -> float:
        """Return the share of the memory that an option's tables may fill."""
        return self._shares.get((option, size), 1.0)

    def learn(
        self,
        space: Space,
        problem: LayerProblem,
        size: int,
        split: StageSplit,
        plan: DevicePlan,
        beyond_bytes: Sequence[float],
    ) -> None:
        """Take in what each stage of a split needs beyond ``split.memory_bytes``; of devices with one stage each.

        ``size``: samples of a micro-batch.
        """
        known = self._known.setdefault(space, {})
        pairs = space.geometry.pairs_of(split.stage_of, split.stages)
        stages = zip(pairs, split.kinds, split.recomputed, beyond_bytes, strict=True)
        for stage, (pair, kind, again, beyond) in enumerate(stages):
            moments = problem.held_at(split.stages - stage)
            setting = problem.microbatches, size, plan.kinds[kind].capacity_bytes, moments, again
            of_pairs = known.setdefault(setting, {})
            of_pairs[pair] = max(beyond, of_pairs.get(pair, 0.0))

    def of(self, space: Space, option: ScheduleOption, size: int, plan: DevicePlan) -> BeyondTables:
        """Return what tables of an option leave out, by its kinds of devices; nothing of devices with several stages."""
        if option.chunks > 1:
            return {}
        found: dict[tuple[int, tuple[Held, ...], bool], Mapping[int, float]] = {}
        for (m, samples, room, moments, again), of_pairs in self._known.get(space, {}).items():
            for kind, own in enumerate(plan.kinds):
                if (m, samples, room) == (option.microbatches, size, own.capacity_bytes):
                    found[kind, moments, again] = of_pairs
        return found
