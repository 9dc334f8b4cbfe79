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
from passes.interrupts import keep_from_here, may_be_lost
from passes.lower.job import Job
from passes.progress import report_found, report_option
from passes.search.bisect import Bisected, Bisection
from passes.search.hybrid.composed import Composed, composed
from passes.search.hybrid.decode import Decoded, decoded
from passes.search.hybrid.eliminate import TooWideError
from passes.search.hybrid.floors import Floors
from passes.search.hybrid.joints import Pieces, pieces_of, value_bytes
from passes.search.hybrid.options import GroupOption, options
from passes.search.hybrid.pieces import GroupKind, PieceSearch
from passes.search.hybrid.pools import Run, divisions
from passes.search.hybrid.program import Pipeline, PipelineProgram, least_sum
from passes.search.microbatches import accepted_counts
from passes.search.words import RecomputeMode
from passes.timings import phase

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
    ways: tuple[tuple[int, int], ...]
    """The price whose layouts each stage takes, and its blocks computed again."""


@dataclass(frozen=True, eq=False)
class Survey:
    """All options, those that may still win solved. ``solved``: best first."""

    solved: tuple[SolvedOption, ...]
    bound_seconds: float
    """No pipeline of any option is below, by the surrogate."""
    options: int
    looked_at: int
    stopped: Literal["", "time limit", "interrupted"]
    """The reason why not all were looked at, if it is none of theirs."""


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
    tables: dict[object, Composed] = field(default_factory=dict)
    """The ranges of each kind of group, composed so far."""

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

    @phase("options")
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
        best, bound, looked_at = math.inf, math.inf, 0
        listed = self.options()
        stopped: Literal["", "time limit", "interrupted"] = ""
        for floor, option in self.floors.by_floor(listed):
            report_option(option, min(bound, floor), len(found), looked_at, len(listed))
            if time.perf_counter() > deadline and found:
                stopped = "time limit"
            elif floor <= best * SLACK:
                try:
                    with may_be_lost():
                        solved, own = self.solve(option, best * SLACK, room)
                except KeyboardInterrupt:
                    if not found:
                        raise
                    stopped = "interrupted"
            if stopped or floor > best * SLACK:
                bound = min(bound, floor)
                break
            bound, looked_at = min(bound, max(floor, own)), looked_at + 1
            if solved is not None:
                log.debug("%s: %.6g s, not below %.6g s", option, solved.pipeline.objective_seconds, own)
                found.append(solved)
                keep_from_here()
                best = min(best, solved.pipeline.objective_seconds)
                report_found(best)
        return Survey(_ranked(found), bound, len(listed), looked_at, stopped)

    @phase("program")
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
        links, m = self._links(option), option.microbatches
        bound = self._least_together(option, tables, room)
        if bound < cutoff_seconds:  # each stage fits its devices alone
            whole = room * option.chunks
            least = self._over_stages(
                option, tables, lambda table, held, share: table.plane(table.least(m, held, share * whole))
            )
            program = PipelineProgram(option, least, links)
            bound = max(bound, _solved(program, cutoff_seconds).bound_seconds)
        if bound >= cutoff_seconds:
            return None, bound
        found = [
            each
            for equally in (True, False)[: option.chunks]
            for each in self._fastest(option, tables, cutoff_seconds, room, equally=equally)
        ]
        return min(found, key=lambda s: s.pipeline.objective_seconds, default=None), bound

    def _fastest(
        self,
        option: GroupOption,
        tables: Sequence[Composed],
        cutoff_seconds: float,
        room: float,
        *,
        equally: bool,
    ) -> list[SolvedOption]:
        """Find the best pipeline of an option, if any is below ``cutoff_seconds``."""
        m = option.microbatches
        fast = self._over_stages(
            option,
            tables,
            lambda table, held, share: table.fastest(m, held, share * room, self.recompute),
            equally=equally,
        )
        planes = [table.plane(own.seconds) for table, own in zip(tables[::-1], fast, strict=True)]
        found = _solved(PipelineProgram(option, planes, self._links(option)), cutoff_seconds).found
        solved = []
        for pipeline in found[:1]:
            ends = [*pipeline.starts[1:], len(self.pieces)]
            ways = []
            for table, own, first, end in zip(tables, fast[::-1], pipeline.starts, ends, strict=True):
                number = int(table.number[first, end])
                ways.append((int(own.price[number]), int(own.again[number])))
            solved.append(SolvedOption(option, tuple(tables), pipeline, tuple(ways)))
        return solved

    def decode(self, solved: SolvedOption, *, one_queue: bool) -> Decoded:
        """Return the candidate that an option's best pipeline is."""
        return decoded(solved.composed, solved.option, solved.pipeline, solved.ways, one_queue=one_queue)

    def _of_group(self, option: GroupOption, run: Run, number: int) -> Composed:
        samples = option.samples // run.replicas
        key = run.kind(number), samples
        if key not in self.tables:
            group = GroupKind(run.ranks(number), run.replicas, run.tensor)
            most = min(option.microbatches, option.groups)
            step = self.floors.work_seconds(run, samples) * option.microbatches / option.groups
            self.tables[key] = composed(self.piece_search, group, self.job, option.microbatches, most, step)
        return self.tables[key]

    def _over_stages(
        self,
        option: GroupOption,
        tables: Sequence[Composed],
        of_stage: Callable[[Composed, int, float], T],
        *,
        equally: bool = True,
    ) -> list[T]:
        """Per stage from the end: what ``of_stage`` says of its table, the micro-batches that it holds, and its memory.

        ``equally``: stages of one device have equal shares of its memory; else they have as much as equal stages need.
        """
        known: dict[tuple[int, int, float], T] = {}
        whole: dict[int, float] = {}
        held = option.in_flight[::-1]
        needs = [1.0 if equally else table.weight_bytes(h) for table, h in zip(tables, held, strict=True)]
        for place, need in zip(option.places, needs, strict=True):
            whole[place] = whole.get(place, 0.0) + need
        found = []
        for table, place, own, need in zip(tables, option.places, held, needs, strict=True):
            key = id(table), own, need / whole[place]
            if key not in known:
                capacity = min(self.cluster.devices[rank].memory_bytes for rank in option.ranks[place])
                known[key] = of_stage(table, own, capacity * key[2])
            found.append(known[key])
        return found[::-1]

    def _least_together(self, option: GroupOption, tables: Sequence[Composed], room: float) -> float:
        """Seconds that an option's surrogate is not below, at one price of memory per group.

        Stages of one group fit it together; the longest stage is at least as long as they are on average. The first
        groups, which hold more, pay more: prices fall from the first to the last, both found by climbing.
        """
        m = option.microbatches
        each = self._over_stages(
            option, tables, lambda table, held, share: table.priced(m, held, share * room)
        )
        behind, planes = option.places[::-1], dict[tuple[int, int], FloatArray]()
        last_group, most = max(1, option.groups - 1), each[0].shape[1] - 1

        def value(first: int, last: int) -> float:
            found = []
            for table, own, place in zip(tables[::-1], each, behind, strict=True):
                key = id(own), round(first + (last - first) * place / last_group)
                if key not in planes:
                    planes[key] = table.plane(own[:, key[1]])
                found.append(planes[key])
            return least_sum(found)

        best, at = max((value(scale, scale), (scale, scale)) for scale in range(most + 1))
        better = option.chunks > 1
        while better:
            first, last = at
            near = [(first + 1, last), (first - 1, last), (first, last + 1), (first, last - 1)]
            found = max((value(*pair), pair) for pair in near if 0 <= min(pair) <= max(pair) <= most)
            better = found[0] > best
            best, at = max((best, at), found)
        return (option.fill + (m - option.fill) * option.chunks / option.stages) * best

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


def _solved(program: PipelineProgram, cutoff_seconds: float) -> Bisected[Pipeline]:
    return Bisection(program, keep=1, relative_gap=GAP, cutoff_seconds=cutoff_seconds).run()


def _ranked(found: Sequence[SolvedOption]) -> tuple[SolvedOption, ...]:
    return tuple(sorted(found, key=lambda s: s.pipeline.objective_seconds))
