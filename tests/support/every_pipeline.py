"""Every pipeline of a hybrid search's space, listed: what its optimum and its bounds are held against.

    piece ─► every recipe at every price, kept or computed again ─► stage: all combinations over all layouts at joints
    stages ─► every way to cut ─► options ─► the least surrogate of those that fit

It shares the recipes with the search, and nothing that composes, bounds or chooses them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.recipes.composed import Composed
from passes.search.hybrid.search import GroupSearch

ROUNDING = 1e-9


@dataclass(frozen=True)
class Way:
    """One way to run a stage, or a part of it. Seconds are per step."""

    seconds: float
    state_bytes: float
    held_bytes: float
    buffer_bytes: float
    again: bool

    def plus(self, other: Way) -> Way:
        return Way(
            self.seconds + other.seconds,
            self.state_bytes + other.state_bytes,
            self.held_bytes + other.held_bytes,
            max(self.buffer_bytes, other.buffer_bytes),
            self.again or other.again,
        )

    def needed(self, held: int, saved_bytes: float) -> float:
        return (
            self.state_bytes
            + held * self.held_bytes
            + self.buffer_bytes
            + (saved_bytes if self.again else 0.0)
        )


@dataclass(eq=False)
class EveryPipeline:
    """Lists the pipelines of a search. ``room``: share of the memory to plan with."""

    search: GroupSearch
    room: float = 1.0
    recompute: str = "auto"
    _ways: dict[tuple[int, int, int, int], list[Way]] = field(default_factory=dict)
    _pieces: dict[tuple[int, int, int], dict[tuple[object, object], list[Way]]] = field(default_factory=dict)

    def of_piece(self, table: Composed, piece: int, held: int) -> dict[tuple[object, object], list[Way]]:
        """List the ways of a piece by its layouts, but for those that are worse in everything."""
        key = id(table), self.search.pieces.kind[piece], held
        if key not in self._pieces:
            found: dict[tuple[object, object], list[Way]] = {}
            block = bool(self.search.pieces.blocks[piece])
            for anew, recipes in enumerate(table.recipes):
                if (anew and (not block or self.recompute == "none")) or (
                    not anew and block and self.recompute == "full"
                ):
                    continue
                own = recipes[self.search.pieces.kind[piece]]
                a = own.amounts
                for p, i, j in np.ndindex(own.least.shape):
                    at = (p, i, j)
                    way = Way(
                        float(a.seconds[at] + a.once_seconds[at]), float(a.state_bytes[at]), float(a.held_bytes[at]),
                        float(a.buffer_bytes[at]), bool(anew),
                    )  # fmt: skip
                    found.setdefault((own.arriving[i], own.leaving[j]), []).append(way)
            self._pieces[key] = {ends: undominated(ways, held) for ends, ways in found.items()}
        return self._pieces[key]

    def of_stage(self, table: Composed, first: int, end: int, held: int) -> list[Way]:
        """List the ways of a stage."""
        key = id(table), first, end, held
        if key not in self._ways:
            at: dict[object, list[Way]] = {}
            for (_, leaving), ways in self.of_piece(table, first, held).items():
                at.setdefault(leaving, []).extend(ways)
            for piece in range(first + 1, end):
                grown: dict[object, list[Way]] = {}
                for (arriving, leaving), ways in self.of_piece(table, piece, held).items():
                    for before, own in itertools.product(at.get(arriving, ()), ways):
                        grown.setdefault(leaving, []).append(before.plus(own))
                at = {layout: undominated(ways, held) for layout, ways in grown.items()}
            self._ways[key] = undominated(itertools.chain.from_iterable(at.values()), held)
        return self._ways[key]

    def saved(self, table: Composed, first: int, end: int) -> float:
        """Return what a block computed again makes anew, as the search counts it: the most of any block."""
        each = self.search.piece_search.saved(table.recipes[0])
        return max(float(each[self.search.pieces.kind[piece]]) for piece in range(first, end))

    def least(self, option: GroupOption) -> float:
        """Return the least surrogate of an option's pipelines that fit; infinite if none does."""
        return min((self._of_cut(option, starts) for starts in self.cuts(option)), default=math.inf)

    def cuts(self, option: GroupOption) -> Iterator[tuple[int, ...]]:
        """Yield where stages may begin."""
        for cut in itertools.combinations(range(1, len(self.search.pieces)), option.stages - 1):
            yield (0, *cut)

    def _of_cut(self, option: GroupOption, starts: tuple[int, ...]) -> float:
        tables = self.search.tables.of_stages(option)
        held = option.in_flight[::-1]
        capacity = [
            self.room * min(self.search.cluster.devices[rank].memory_bytes for rank in ranks) * (1 + ROUNDING)
            for ranks in option.ranks
        ]
        stages = []
        for table, first, end, own in zip(
            tables, starts, [*starts[1:], len(self.search.pieces)], held, strict=True
        ):
            saved = self.saved(table, first, end)
            ways = self.of_stage(table, first, end, own)
            stages.append(fastest_first((way.seconds, way.needed(own, saved)) for way in ways))
        best = math.inf
        for chosen in _choices(stages, option.places, capacity):
            seconds = [way / option.microbatches for way in chosen]
            best = min(best, surrogate(self.search, option, starts, seconds))
        return best


def _choices(
    stages: Sequence[Sequence[tuple[float, float]]], places: Sequence[int], capacity: Sequence[float]
) -> Iterator[list[float]]:
    """Yield the seconds of one way per stage that fit their groups; of groups with one stage only the fastest."""
    if len(set(places)) == len(places):
        fits = [
            [s for s, need in ways if need <= capacity[p]] for ways, p in zip(stages, places, strict=True)
        ]
        if all(fits):
            yield [min(own) for own in fits]
        return
    for chosen in itertools.product(*stages):
        used = [0.0] * len(capacity)
        for (_, need), place in zip(chosen, places, strict=True):
            used[place] += need
        if all(own <= most for own, most in zip(used, capacity, strict=True)):
            yield [seconds for seconds, _ in chosen]


def surrogate(
    search: GroupSearch, option: GroupOption, starts: Sequence[int], seconds: Sequence[float]
) -> float:
    """Return fill · Σ (t + x) + (m - fill) · v · T. ``seconds``: of each stage, per micro-batch."""
    m, links = option.microbatches, search._links(option)
    cuts = [float(links[len(starts) - s][first]) if s else 0.0 for s, first in enumerate(starts)]
    longest = max(*seconds, *cuts)
    for s in range(len(starts)):
        held = option.in_flight[len(starts) - 1 - s]
        if held < m:
            longest = max(longest, (sum(seconds[s:]) + sum(cuts[s + 1 :])) / (held * option.chunks))
    return option.fill * (sum(seconds) + sum(cuts)) + (m - option.fill) * option.chunks * longest


def undominated(ways: Iterable[Way], held: int) -> list[Way]:
    """Leave out ways that another is not worse than in seconds, bytes, buffer and recomputation."""
    kept: list[Way] = []
    for way in sorted(
        set(ways), key=lambda w: (w.seconds, w.state_bytes + held * w.held_bytes, w.buffer_bytes, w.again)
    ):
        size = way.state_bytes + held * way.held_bytes
        if not any(
            k.state_bytes + held * k.held_bytes <= size
            and k.buffer_bytes <= way.buffer_bytes
            and k.again <= way.again
            for k in kept
        ):
            kept.append(way)
    return kept


def fastest_first(ways: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sort (seconds, bytes), without those that need more than a faster one."""
    kept: list[tuple[float, float]] = []
    for seconds, needed in sorted(ways):
        if not kept or needed < kept[-1][1]:
            kept.append((seconds, needed))
    return kept
