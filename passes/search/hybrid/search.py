"""The search over pipelines of sharded stages: every option bounded, the promising ones solved, the best simulated.

options ─► bound ─► recipes, ranges, dynamic program ─► candidates, best first ─► simulated ─► the fastest that fits
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np

from cost_models.arrays import FloatArray
from cost_models.cluster import ClusterSpec
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.search.bisect import Bisected, Bisection
from passes.search.hybrid.composed import Composed, composed, families_of
from passes.search.hybrid.decode import Decoded, decoded
from passes.search.hybrid.eliminate import TooWideError
from passes.search.hybrid.floors import Floors
from passes.search.hybrid.joints import Pieces, pieces_of, value_bytes
from passes.search.hybrid.mixes import Fastest, Mixes
from passes.search.hybrid.options import GroupOption, options
from passes.search.hybrid.pieces import GroupKind, PieceSearch
from passes.search.hybrid.pools import Run, divisions
from passes.search.hybrid.program import Pipeline, PipelineProgram
from passes.search.hybrid.ranges import SAVED
from passes.search.hybrid.shared import SharedMemory
from passes.search.hybrid.together import CLOSE, Together
from passes.search.hybrid.walk import Step, needed_bytes, seconds_per_step, walk
from passes.search.microbatches import accepted_counts
from passes.search.words import RecomputeMode

log = logging.getLogger("partitioner")

T = TypeVar("T")

SLACK = 1.05
"""Options whose bound is above the best surrogate by this factor are not solved: the surrogate was at most 4% off the
simulated step on Llama-8B and 70B (docs/06g-hybrid.md), on either side."""
GAP = 1e-3
"""Relative gap to which an option's surrogate is minimized: far below its error against the simulation."""


@dataclass(frozen=True, eq=False)
class SolvedOption:
    """The best pipeline of an option."""

    option: GroupOption
    composed: tuple[Composed, ...]
    """The table of each stage."""
    pipeline: Pipeline
    steps: tuple[tuple[Step, ...], ...]
    """The pieces of each stage, one by one."""


@dataclass(frozen=True, eq=False)
class Survey:
    """All options, those that may still win solved. ``solved``: best first."""

    solved: tuple[SolvedOption, ...]
    options: int
    bounds: tuple[tuple[GroupOption, float], ...]
    """Each option that was looked at, and the seconds that none of its pipelines is below."""
    rest_seconds: float
    """Seconds that no pipeline of any other option is below."""
    stopped: Literal["", "time limit", "interrupted"]
    """The reason why not all were looked at, if it is none of theirs."""

    @property
    def bound_seconds(self) -> float:
        """No pipeline of any option is below, by the surrogate."""
        return min([self.rest_seconds, *(seconds for _, seconds in self.bounds)])


@dataclass(eq=False)
class GroupSearch:
    """Everything that the search reads, and caches per kind of group."""

    graph: OpGraph
    costs: GraphCosts
    cluster: ClusterSpec
    job: Job
    microbatches: int | Literal["auto"] = "auto"
    schedule: str = "auto"
    recompute: RecomputeMode = "auto"
    pieces: Pieces = field(init=False)
    _composed: dict[object, Composed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pieces = pieces_of(self.graph)

    @cached_property
    def piece_search(self) -> PieceSearch:
        """The search of recipes."""
        return PieceSearch(self.pieces, self.cluster, self._shared)

    @cached_property
    def _shared(self) -> frozenset[str]:
        """Parameters and buffers that several pieces read."""
        seen: dict[str, int] = {}
        for part in self.pieces.parts:
            for given in part.inputs:
                if given.kind in ("parameter", "buffer"):
                    seen[given.name] = seen.get(given.name, 0) + 1
        return frozenset(name for name, count in seen.items() if count > 1)

    def options(self) -> list[GroupOption]:
        """List all options."""
        batch = self.job.batch_size
        wanted = range(1, batch + 1) if self.microbatches == "auto" else [self.microbatches]
        counts = [m for m in accepted_counts(self.graph, batch, wanted) if batch % m == 0]
        pools, pieces = divisions(self.cluster), len(self.pieces)
        return list(options(pools, batch, counts, pieces, self.floors.rate, self.schedule))

    @cached_property
    def floors(self) -> Floors:
        """The bounds of options that are not solved."""
        return Floors(self.piece_search, self.job)

    def survey(self, deadline: float, room: float = 1.0) -> Survey:
        """Solve every option whose bound leaves it a chance. ``room``: share of the memory to plan with.

        ``deadline``: value of ``time.perf_counter`` to stop at, once something is found. Ctrl-C stops it likewise.
        """
        found: list[SolvedOption] = []
        bounds: list[tuple[GroupOption, float]] = []
        best, rest = math.inf, math.inf
        listed = self.options()
        stopped: Literal["", "time limit", "interrupted"] = ""
        for floor, option in self.floors.by_floor(listed):
            if time.perf_counter() > deadline and found:
                stopped = "time limit"
            elif floor <= best * SLACK:
                try:
                    solved, own = self.solve(option, best * SLACK, room)
                except KeyboardInterrupt:
                    if not found:
                        raise
                    stopped = "interrupted"
            if stopped or floor > best * SLACK:
                rest = floor
                break
            bounds.append((option, max(floor, own)))
            if solved is not None:
                log.debug("%s: %.6g s, not below %.6g s", option, solved.pipeline.objective_seconds, own)
                found.append(solved)
                best = min(best, solved.pipeline.objective_seconds)
        return Survey(_ranked(found), len(listed), tuple(bounds), rest, stopped)

    def solve(
        self, option: GroupOption, cutoff_seconds: float, room: float = 1.0
    ) -> tuple[SolvedOption | None, float]:
        """Find the best pipeline of an option, and a bound on all of them; None where none is below ``cutoff_seconds``."""
        try:
            groups = [self._of_group(option, run, number) for run, number in option.members]
        except TooWideError as error:
            log.info("%s: not searched, its tables would have %s", option, error)
            return None, 0.0
        tables = [groups[place] for place in option.places]
        bound = self._bound(option, tables, cutoff_seconds, room)
        if bound >= cutoff_seconds:
            return None, bound
        capacity = self._capacity(option, room)
        found = self._fastest(option, tables, self._equal_rooms(option, capacity), cutoff_seconds)
        if option.chunks > 1:
            found = self._sharing(option, tables, capacity, found, cutoff_seconds)
        return found, bound

    def _bound(
        self, option: GroupOption, tables: Sequence[Composed], cutoff_seconds: float, room: float
    ) -> float:
        """Seconds that no pipeline of an option is below; anything above the cutoff where it is above that."""
        links, m, recompute = self._links(option), option.microbatches, self.recompute
        rooms = self._equal_rooms(option, self._capacity(option, room))
        weight = (m - option.fill) * option.chunks

        def together(longest: int | None) -> Together:
            priced = self._over_stages(
                option, tables, rooms, lambda table, held, own: table.priced(m, held, own, recompute, longest)
            )
            return Together(option, tables[::-1], priced, links)

        def alone(longest: int | None) -> list[FloatArray]:
            """Planes of stages that have their devices for themselves."""
            whole = [own * option.chunks for own in rooms]
            return self._over_stages(
                option,
                tables,
                whole,
                lambda table, held, own: table.plane(
                    table.priced(m, held, own, recompute, longest).max(axis=-1).min(axis=1)
                ),
            )

        quick = together(None)
        bound = quick.quick_seconds()
        if bound < cutoff_seconds:
            bound = max(
                bound, _solved(PipelineProgram(option, alone(None), links), cutoff_seconds).bound_seconds
            )
        if bound < cutoff_seconds:
            most = (cutoff_seconds - option.fill * quick.least(math.inf)) / weight if weight > 0 else math.inf
            longest = max(table.longest(m, most) for table in tables)
            planes = alone(longest)
            bound = max(bound, _solved(PipelineProgram(option, planes, links), cutoff_seconds).bound_seconds)
            if bound < cutoff_seconds and option.chunks > 1:
                bound = max(bound, together(longest).seconds(planes, cutoff_seconds))
        return bound

    def _sharing(
        self,
        option: GroupOption,
        tables: Sequence[Composed],
        capacity: Sequence[float],
        best: SolvedOption | None,
        cutoff_seconds: float,
    ) -> SolvedOption | None:
        """Find a better pipeline, the memory of each group handed out to its stages as they need it."""
        m = option.microbatches
        behind, held = tables[::-1], option.in_flight
        known: dict[tuple[int, int], Mixes] = {}
        for table, own in zip(behind, held, strict=True):
            if (id(table), own) not in known:
                known[id(table), own] = table.mixes(m, own, self.recompute)
        mixes = [known[id(table), own] for table, own in zip(behind, held, strict=True)]
        memory = SharedMemory(option, behind, mixes, self._links(option), capacity)
        weight = (m - option.fill) * option.chunks
        least = min(float(own.seconds.min()) for own in mixes)
        limit = cutoff_seconds if best is None else best.pipeline.objective_seconds
        low, high = least, limit / (weight + option.fill)
        while high > low * (1 + CLOSE):
            middle = (low + high) / 2
            rooms = memory.rooms(middle)
            found = rooms and self._fastest(option, tables, rooms[::-1], limit)
            if not found:
                low = middle
                continue
            best, limit = found, found.pipeline.objective_seconds
            high = min(middle, found.pipeline.bottleneck_seconds)
        return best

    def _fastest(
        self,
        option: GroupOption,
        tables: Sequence[Composed],
        rooms: Sequence[float],
        cutoff_seconds: float,
    ) -> SolvedOption | None:
        """Find the best pipeline of an option, if any is below ``cutoff_seconds``. ``rooms``: bytes of each stage."""
        m, held = option.microbatches, option.in_flight[::-1]
        fast = self._over_stages(
            option,
            tables,
            rooms,
            lambda table, own, room: _Ways.of(table.mixes(m, own, self.recompute), room),
        )
        planes = [table.plane(own.fastest.seconds) for table, own in zip(tables[::-1], fast, strict=True)]
        program = PipelineProgram(option, planes, self._links(option))
        found = _solved(program, cutoff_seconds).found
        if not found:
            return None
        starts = found[0].starts
        stages = zip(tables, fast[::-1], starts, [*starts[1:], len(self.pieces)], held, rooms, strict=True)
        steps = [
            walk(
                table, first, end, own.mixes.mix(own.fastest, int(table.number[first, end])), in_flight, room
            )
            for table, own, first, end, in_flight, room in stages
        ]
        valued = program.valued(starts, [seconds_per_step(each) / m for each in steps])
        return SolvedOption(option, tuple(tables), valued, tuple(steps))

    def decode(self, solved: SolvedOption, *, one_queue: bool) -> Decoded:
        """Return the candidate that an option's best pipeline is."""
        return decoded(self.pieces, solved.option, solved.pipeline, solved.steps, one_queue=one_queue)

    def fits(self, solved: SolvedOption, room: float = 1.0) -> bool:
        """Tell whether a pipeline fits as the search counts memory: what it takes piece by piece, not what a table says."""
        option, starts = solved.option, solved.pipeline.starts
        left = self._capacity(option, room * (1 + 1e-9))
        ends, held = [*starts[1:], len(self.pieces)], option.in_flight[::-1]
        stages = zip(solved.composed, solved.steps, starts, ends, held, option.places, strict=True)
        for table, steps, first, end, own, place in stages:
            again = any(step.again for step in steps)
            anew = float(table.ranges[-1].amounts[SAVED, table.number[first, end], 0]) if again else 0.0
            left[place] -= needed_bytes(steps, own) + anew
        return min(left) >= 0

    def _of_group(self, option: GroupOption, run: Run, number: int) -> Composed:
        samples = option.samples // run.replicas
        families = families_of(option.in_flight[-1])
        key = run.kind(number), samples, families
        if key not in self._composed:
            group = GroupKind(run.ranks(number), run.replicas, run.tensor)
            step = self.floors.work_seconds(run, samples) * option.microbatches / option.groups
            self._composed[key] = composed(
                self.piece_search, group, self.job, option.microbatches, families, step
            )
        return self._composed[key]

    def _over_stages(
        self,
        option: GroupOption,
        tables: Sequence[Composed],
        rooms: Sequence[float],
        of_stage: Callable[[Composed, int, float], T],
    ) -> list[T]:
        """Per stage from the end: what ``of_stage`` says of its table, the micro-batches that it holds, and its room."""
        known: dict[tuple[int, int, float], T] = {}
        found = []
        for table, own, room_bytes in zip(tables, option.in_flight[::-1], rooms, strict=True):
            key = id(table), own, room_bytes
            if key not in known:
                known[key] = of_stage(table, own, room_bytes)
            found.append(known[key])
        return found[::-1]

    def _capacity(self, option: GroupOption, room: float) -> list[float]:
        """Return the bytes to plan with on each device of each group."""
        devices = self.cluster.devices
        return [room * min(devices[rank].memory_bytes for rank in ranks) for ranks in option.ranks]

    @staticmethod
    def _equal_rooms(option: GroupOption, capacity: Sequence[float]) -> list[float]:
        """Return equal shares of its devices' memory for each stage."""
        return [capacity[place] / option.chunks for place in option.places]

    def _links(self, option: GroupOption) -> list[FloatArray]:
        """Per stage from the end: [pieces + 1] seconds of the cut behind it, at each joint."""
        sizes = self._cut_bytes(option.samples)
        groups, places = option.ranks, option.places
        found = [np.zeros(len(sizes))]
        for before, behind in zip(places[-2::-1], places[:0:-1], strict=True):
            path = self.cluster.path(groups[before][-1], groups[behind][0])
            ports = min(len(groups[before]), len(groups[behind]))
            rate = path.bandwidth_bytes_per_second * ports
            found.append(2 * path.latency_seconds + sizes / rate)
        return found

    def _cut_bytes(self, samples: int) -> FloatArray:
        """[joints] bytes of the values that cross, and of their gradients."""
        found = np.zeros(len(self.pieces) + 1)
        for name, last in self.pieces.last_reader.items():
            size = value_bytes(self.graph, name, samples)
            found[self.pieces.piece_of[name] + 1 : last + 1] += size * (
                2 if name in self.graph.needs_grad else 1
            )
        return found


@dataclass(frozen=True, eq=False)
class _Ways:
    """The ways to run stages, and the fastest of those that fit."""

    mixes: Mixes
    fastest: Fastest

    @classmethod
    def of(cls, mixes: Mixes, room_bytes: float) -> _Ways:
        return cls(mixes, mixes.fastest(room_bytes))


def _solved(program: PipelineProgram, cutoff_seconds: float) -> Bisected[Pipeline]:
    return Bisection(program, keep=1, relative_gap=GAP, cutoff_seconds=cutoff_seconds).run()


def _ranked(found: Sequence[SolvedOption]) -> tuple[SolvedOption, ...]:
    return tuple(sorted(found, key=lambda s: s.pipeline.objective_seconds))
