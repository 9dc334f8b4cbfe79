"""Ranges on the shards of one replica, which bound those of any number of replicas: cheap tables for a first bound.

No stage takes less for being replicated: gradients are summed, parameters kept in parts are gathered. So the least of
seconds + price · bytes that a micro-batch holds, at a row of prices, bounds all options with so many shards and samples. It
is concave in the price: between two, the line is below it. To that come the cheapest ways to keep the parameters.

Replicas whose samples depend on each other exchange more (experts that sort the tokens of all samples by expert): on a
group's own mesh, however much memory that takes, the whole batch bounds each of its micro-batches in proportion.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from passes.lower.job import Job
from passes.search.feature.problem import FeatureProblem
from passes.search.hybrid.floors import MANY, Floors
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.pools import Run
from passes.search.hybrid.recipes.composed import SCALE
from passes.search.hybrid.recipes.eliminate import TooWideError
from passes.search.hybrid.recipes.kept import Kept, keeping, kept
from passes.search.hybrid.recipes.pieces import GroupKind, Least, PieceSearch, Prices, cheaper
from passes.search.hybrid.recipes.ranges import largest_of_ranges, least_of_ranges
from passes.search.words import RecomputeMode

PRICES = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 1.0, 2.0, 8.0)
"""Prices of all that a micro-batch holds, in times of its work: computing blocks again costs about a third of it."""


@dataclass(frozen=True, eq=False)
class Cover:
    """The ranges of one number of shards and samples, for stages of ``devices`` of a group."""

    number: IntArray
    """[first piece, last + 1] which of the unlike ranges it is; -1: none."""
    least: tuple[FloatArray, ...]
    """Per kind of ways, [unlike ranges, prices] the least seconds and what held bytes cost, per micro-batch."""
    prices: FloatArray
    joints: tuple[IntArray, IntArray]
    """[unlike ranges] the first piece, and the last + 1."""
    kind: Sequence[int]
    """[pieces] the class of each."""
    kept: Sequence[Kept]
    """Per class, the ways to keep its parameters."""
    buffers: FloatArray
    """[unlike ranges] bytes of the largest buffer at least."""
    scale_seconds: float
    """Typical seconds of a stage; divided by its memory, the unit of the prices in ``SCALE``."""
    on_mesh: FloatArray | float = 0.0
    """[unlike ranges] seconds of a micro-batch on all replicas at least, but for what parameters take."""

    def plane(self, seconds: FloatArray) -> FloatArray:
        """[first piece, last + 1] seconds of each range; infinite where there is none."""
        return np.where(self.number >= 0, seconds[self.number], np.inf)

    def priced(
        self,
        microbatches: int,
        held: int,
        room_bytes: float,
        recompute: RecomputeMode = "auto",
        longest: int | None = None,
    ) -> FloatArray:
        """[unlike ranges, kinds of ways, scales of prices] as ``Composed.priced``, or less."""
        price = np.array(SCALE) * self.scale_seconds / room_bytes
        at = np.clip(price * held, 0.0, self.prices[-1])
        right = np.clip(np.searchsorted(self.prices, at), 1, len(self.prices) - 1)
        low, high = self.prices[right - 1], self.prices[right]
        share = (at - low) / (high - low)
        left = self._parameters(microbatches, price) + price * (self.buffers[:, None] - room_bytes)
        each = [(1 - share) * own[:, right - 1] + share * own[:, right] for own in self.least]
        on_mesh = np.reshape(self.on_mesh, (-1, 1))
        return np.stack([np.maximum(own, on_mesh) + left for own in each], axis=1)

    def _parameters(self, microbatches: int, prices: FloatArray) -> FloatArray:
        """[unlike ranges, prices] the least seconds of parameters, with what their bytes cost."""
        each = np.stack([own.least(microbatches, prices) for own in self.kept])[np.array(self.kind)]
        before = np.concatenate([np.zeros((1, len(prices))), each.cumsum(axis=0)])
        first, end = self.joints
        return np.asarray(before[end] - before[first])


@dataclass(eq=False)
class Covers:
    """Composes the tables of options, and keeps them."""

    search: PieceSearch
    job: Job
    floors: Floors
    recompute: RecomputeMode
    _known: dict[Hashable, Cover] = field(default_factory=dict)
    _keeping: dict[Hashable, list[list[FeatureProblem]]] = field(default_factory=dict)
    _kept: dict[Hashable, list[Kept]] = field(default_factory=dict)
    _on_mesh: dict[Hashable, FloatArray] = field(default_factory=dict)

    def of_groups(self, option: GroupOption, *, on_mesh: bool = False) -> list[Cover]:
        """Return a table for each group. ``on_mesh``: it knows what replicas exchange. Raises ``TooWideError``."""
        found: dict[Hashable, Cover] = {}
        kinds = [run.kind(number) for run, number in option.members]
        for kind, (run, number) in zip(kinds, option.members, strict=True):
            samples = option.samples // run.replicas
            key = run.shards_kind(number), samples
            if key not in self._known:
                self._known[key] = self._cover(run, number, samples)
            if kind not in found:
                own, ways = self._known[key], self._ways(run, number, option.samples)
                found[kind] = replace(own, kept=ways, scale_seconds=own.scale_seconds / option.stages)
                if on_mesh and run.replicas > 1:
                    each = self._sample_seconds(run, number)
                    found[kind] = replace(found[kind], on_mesh=each * option.samples)
        return [found[kind] for kind in kinds]

    def _ways(self, run: Run, number: int, samples: int) -> list[Kept]:
        key = run.kind(number)
        if key not in self._keeping:
            group = GroupKind(run.ranks(number), run.replicas, run.tensor)
            self._keeping[key] = [
                [keeping(self.search, kind, group, self.job, again=again) for again in self._again(first)]
                for kind, first in enumerate(self.search.pieces.first)
            ]
        if (key, samples) not in self._kept:
            self._kept[key, samples] = [kept(own, run.tensor, samples) for own in self._keeping[key]]
        return self._kept[key, samples]

    def _again(self, piece: int) -> Sequence[bool]:
        """Tell whether a piece's ops may run again in backward: its gathers are then one collective, and take less."""
        return (False, True) if self.search.pieces.blocks[piece] and self.recompute != "none" else (False,)

    def _sample_seconds(self, run: Run, number: int) -> FloatArray:
        """[unlike ranges] the least seconds of a sample of the whole batch on a group's mesh, parameters at hand."""
        key = run.kind(number)
        if key not in self._on_mesh:
            group = GroupKind(run.ranks(number), run.replicas, run.tensor)
            batch, free = self.job.batch_size, Prices(np.zeros(1), np.zeros(1))
            job = replace(self.job, batch_size=batch * MANY)
            kinds = range(len(self.search.pieces.first))
            each = [self.search.least(kind, group, job, MANY, free, parameters=False) for kind in kinds]
            self._on_mesh[key] = least_of_ranges(self.search.pieces.kind, each)[1][:, 0] / (MANY * batch)
        return self._on_mesh[key]

    def _cover(self, run: Run, number: int, samples: int) -> Cover:
        ranks, kinds = run.ranks(number)[: run.tensor], self.search.pieces.kind
        work = self.floors.work_seconds(run, samples)
        if not work:
            raise TooWideError("no known work")
        saved = [sum(self.search.costs(k).storage_bytes(samples).values()) for k in range(max(kinds) + 1)]
        prices = np.array(PRICES) * work / max(1.0, sum(saved[kind] for kind in kinds) / run.tensor)
        each = self._recipes(GroupKind(ranks, 1, run.tensor), samples, prices)
        found = [least_of_ranges(kinds, own) for own in each]
        unlike, least = found[0][0], tuple(own / MANY for _, own in found)
        buffers = largest_of_ranges(kinds, np.array([own.floor_bytes for own in each[-1]]))
        return Cover(unlike, least, prices, joints_of(unlike), kinds, (), buffers, work)

    def _recipes(self, group: GroupKind, samples: int, prices: FloatArray) -> list[list[Least]]:
        """Return recipes' costs per class of pieces, for each kind of ways."""
        pieces, job = self.search.pieces, replace(self.job, batch_size=samples * MANY)
        per_step = Prices(np.zeros(len(prices)), prices * MANY)
        kept, either = [], []
        for kind, first in enumerate(pieces.first):
            own = self.search.least(kind, group, job, MANY, per_step)
            kept.append(own)
            if pieces.blocks[first] and self.recompute != "none":
                anew = self.search.least(kind, group, job, MANY, per_step, again=True)
                own = anew if self.recompute == "full" else cheaper(own, anew)
            either.append(own)
        return {"none": [kept], "full": [either], "auto": [kept, either]}[self.recompute]


def joints_of(number: IntArray) -> tuple[IntArray, IntArray]:
    """[unlike ranges] the joints at which the last of each begins and ends."""
    first, end = np.nonzero(number >= 0)
    begins, ends = (np.zeros(int(number.max()) + 1, dtype=np.int64) for _ in range(2))
    begins[number[first, end]], ends[number[first, end]] = first, end
    return begins, ends
