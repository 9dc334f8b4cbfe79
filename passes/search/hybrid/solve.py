"""The best pipeline of one option: cuts by the dynamic program, the ways to run its stages, each walked piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.search.hybrid.bounds import GAP, best_pipeline
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.pairs import NEEDED, Pairs
from passes.search.hybrid.program import Pipeline, PipelineProgram
from passes.search.hybrid.recipes.composed import Composed
from passes.search.hybrid.recipes.mixes import Fastest, Mixes
from passes.search.hybrid.recipes.walk import Step, needed_bytes, seconds_per_step, walk
from passes.search.hybrid.shared import SharedMemory
from passes.search.hybrid.staged import Staged


@dataclass(frozen=True, eq=False)
class SolvedOption:
    """The best pipeline of an option that was found."""

    option: GroupOption
    pipeline: Pipeline
    steps: tuple[tuple[Step, ...], ...]
    """The pieces of each stage, one by one."""

    @property
    def seconds(self) -> float:
        """The surrogate of its step."""
        return self.pipeline.objective_seconds


def fastest(
    staged: Staged[Composed], cutoff_seconds: float, bound_seconds: float, *, closely: bool = True
) -> SolvedOption | None:
    """Find the best pipeline of an option, None if none is below the cutoff; none is below ``bound_seconds``.

    Stages that share a group have equal parts of its memory or, where that leaves something to gain, what they need: the
    least bottleneck that memory suffices for is bisected. ``closely``: exactly, where it can be, which takes a second.
    """
    best = _in_rooms(staged, staged.equal_rooms, cutoff_seconds)
    if staged.option.chunks == 1 or not staged.weight:
        return best
    mixes = _mixes(staged)
    memory, needed = SharedMemory(staged, mixes), Pairs(staged).bytes_of(mixes)
    limit = cutoff_seconds if best is None else best.seconds
    high = limit / (staged.weight + staged.option.fill)
    low = max(
        memory.least_seconds, (bound_seconds - staged.option.fill * memory.most_seconds) / staged.weight
    )
    while high > low * (1 + GAP) and limit > bound_seconds * (1 + GAP):
        middle = (low + high) / 2
        rooms = (
            _paired(staged, needed, middle) if closely and staged.option.in_pairs else memory.rooms(middle)
        )
        found = rooms and _in_rooms(staged, rooms, limit)
        if not found or found.seconds >= limit:
            low = middle
            continue
        best, limit = found, found.seconds
        high = min(middle, found.pipeline.bottleneck_seconds)
    return best


def _paired(staged: Staged[Composed], needed: NEEDED, most_seconds: float) -> list[float] | None:
    """Return the bytes of each stage, from the end, with which cuts of at most these seconds fit; None without any."""
    bytes_of = needed(most_seconds)
    starts = Pairs(staged).cuts(most_seconds, bytes_of)
    if starts is None:
        return None
    ends = [*starts[1:], len(bytes_of[0]) - 1]
    used = [float(plane[a, b]) for plane, a, b in zip(bytes_of, starts[::-1], ends[::-1], strict=True)]
    left = list(staged.capacity_bytes)
    for group, size in zip(staged.groups, used, strict=True):
        left[group] -= size
    return [
        size + left[group] / staged.option.chunks for size, group in zip(used, staged.groups, strict=True)
    ]


def _mixes(staged: Staged[Composed]) -> list[Mixes]:
    m, recompute = staged.option.microbatches, staged.recompute
    nothing = [0.0] * staged.option.stages
    return staged.each(nothing, lambda table, held, _: table.mixes(m, held, recompute))


def _in_rooms(staged: Staged[Composed], rooms: Sequence[float], cutoff_seconds: float) -> SolvedOption | None:
    """Find the best pipeline below the cutoff. ``rooms``: bytes of each stage, from the end."""
    option, m = staged.option, staged.option.microbatches
    most = cutoff_seconds / (option.fill + staged.weight)  # of one stage, which is no longer than all of them

    def of_stage(table: Composed, held: int, room: float) -> tuple[Mixes, Fastest]:
        mixes = table.mixes(m, held, staged.recompute)
        return mixes, mixes.fastest(staged.left_of(room, table, held), most)

    ways = staged.each(rooms, of_stage)
    pairs = {id(own): (table, own) for table, (_, own) in zip(staged.tables, ways, strict=True)}
    known = {key: table.plane(own.seconds) for key, (table, own) in pairs.items()}
    planes = [known[id(own)] for _, own in ways]
    program = PipelineProgram(option, planes, staged.links)
    found = best_pipeline(program, cutoff_seconds).pipelines
    if not found:
        return None
    starts = found[0].starts
    steps = []
    for stage, (first, end) in enumerate(zip(starts, [*starts[1:], program.pieces], strict=True)):
        behind = option.stages - 1 - stage
        table, (mixes, own) = staged.tables[behind], ways[behind]
        number, held = int(table.number[first, end]), option.in_flight[behind]
        mix = mixes.mix(own, number)
        left = np.broadcast_to(staged.left_of(rooms[behind], table, held), len(mixes.extra))
        room = float(left[number]) - float(mixes.extra[number]) * (mix.again or mix.first_again)
        walked = walk(table, first, end, mix, held, room)
        # Blocks' shares of what a recipe saves are estimates where other pieces save, too: more of them, if that is short.
        while mix.mixed and mix.count < mixes.blocks[number] and needed_bytes(walked, held) > room:
            mix = replace(mix, count=mix.count + 1)
            walked = walk(table, first, end, mix, held, room)
        steps.append(walked)
    valued = program.valued(starts, [seconds_per_step(each) / m for each in steps])
    return SolvedOption(option, valued, tuple(steps))
