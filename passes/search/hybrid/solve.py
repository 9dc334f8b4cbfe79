"""The best pipeline of one option: cuts by the dynamic program, the ways to run its stages, each walked piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.search.hybrid.bounds import GAP, best_pipeline
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.program import Pipeline, PipelineProgram
from passes.search.hybrid.recipes.composed import Composed
from passes.search.hybrid.recipes.mixes import Fastest, Mixes
from passes.search.hybrid.recipes.walk import Step, seconds_per_step, walk
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


def fastest(staged: Staged[Composed], cutoff_seconds: float, bound_seconds: float) -> SolvedOption | None:
    """Find the best pipeline of an option, None if none is below the cutoff; none is below ``bound_seconds``.

    Stages that share a group have equal parts of its memory or, where that leaves something to gain, what they need: the
    least bottleneck that memory suffices for is bisected.
    """
    best = _in_rooms(staged, staged.equal_rooms, cutoff_seconds)
    if staged.option.chunks == 1:
        return best
    memory = SharedMemory(staged, _mixes(staged))
    limit = cutoff_seconds if best is None else best.seconds
    high = limit / (staged.weight + staged.option.fill)
    low = max(
        memory.least_seconds, (bound_seconds - staged.option.fill * memory.most_seconds) / staged.weight
    )
    while high > low * (1 + GAP) and limit > bound_seconds * (1 + GAP):
        middle = (low + high) / 2
        rooms = memory.rooms(middle)
        found = rooms and _in_rooms(staged, rooms, limit)
        if not found:
            low = middle
            continue
        best, limit = found, found.seconds
        high = min(middle, found.pipeline.bottleneck_seconds)
    return best


def _mixes(staged: Staged[Composed]) -> list[Mixes]:
    m, recompute = staged.option.microbatches, staged.recompute
    nothing = [0.0] * staged.option.stages
    return staged.each(nothing, lambda table, held, _: table.mixes(m, held, recompute))


def _in_rooms(staged: Staged[Composed], rooms: Sequence[float], cutoff_seconds: float) -> SolvedOption | None:
    """Find the best pipeline below the cutoff. ``rooms``: bytes of each stage, from the end."""
    option, m = staged.option, staged.option.microbatches

    def of_stage(table: Mixes, room: float) -> tuple[Mixes, Fastest]:
        return table, table.fastest(room)

    ways = staged.each(
        rooms,
        lambda table, held, room: of_stage(table.mixes(m, held, staged.recompute), room),
    )
    pairs = {id(own): (table, own) for table, (_, own) in zip(staged.tables, ways, strict=True)}
    known = {key: table.plane(own.seconds) for key, (table, own) in pairs.items()}
    planes = [known[id(own)] for _, own in ways]
    program = PipelineProgram(option, planes, staged.links)
    found = best_pipeline(program, cutoff_seconds).found
    if not found:
        return None
    starts = found[0].starts
    steps = []
    for stage, (first, end) in enumerate(zip(starts, [*starts[1:], program.pieces], strict=True)):
        behind = option.stages - 1 - stage
        table, (mixes, own) = staged.tables[behind], ways[behind]
        mix = mixes.mix(own, int(table.number[first, end]))
        steps.append(walk(table, first, end, mix, option.in_flight[behind], rooms[behind]))
    valued = program.valued(starts, [seconds_per_step(each) / m for each in steps])
    return SolvedOption(option, valued, tuple(steps))
