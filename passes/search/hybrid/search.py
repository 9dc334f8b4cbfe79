"""The search over pipelines of sharded stages: every option bounded, the promising ones solved, the best simulated.

options ─► bound ─► recipes, ranges, dynamic program ─► candidates, best first ─► simulated ─► the fastest that fits
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from cost_models.cluster import ClusterSpec
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.search.bisect import Bisected, Bisection
from passes.search.hybrid.composed import Composed, composed
from passes.search.hybrid.decode import Decoded, decoded
from passes.search.hybrid.eliminate import TooWideError
from passes.search.hybrid.joints import Pieces, pieces_of, value_bytes
from passes.search.hybrid.options import GroupOption, options
from passes.search.hybrid.pieces import GroupKind, PieceSearch
from passes.search.hybrid.program import Pipeline, PipelineProgram
from passes.search.layer.tuning import TUNING
from passes.search.microbatches import accepted_counts
from passes.search.model import LayerModel, read_model

log = logging.getLogger("partitioner")

GAP = 1e-3
"""Relative gap to which an option's surrogate is minimized: far below its error against the simulation."""


@dataclass(frozen=True, eq=False)
class SolvedOption:
    """The best pipeline of an option."""

    option: GroupOption
    composed: tuple[Composed, ...]
    """The table of each stage."""
    pipeline: Pipeline
    columns: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Survey:
    """All options, those that may still win solved. ``solved``: best first."""

    solved: tuple[SolvedOption, ...]
    bound_seconds: float
    """No pipeline of any option is below, by the surrogate."""
    options: int
    looked_at: int
    late: bool
    """True where time ran out before the last."""


@dataclass(eq=False)
class GroupSearch:
    """Everything that the search reads, and caches per kind of group."""

    graph: OpGraph
    costs: GraphCosts
    cluster: ClusterSpec
    job: Job
    pieces: Pieces = field(init=False)
    model: LayerModel = field(init=False)
    _composed: dict[object, Composed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pieces = pieces_of(self.graph)
        self.model = read_model(self.graph, self.costs, self.job.optimizer, self.job.precision)

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
        """List all options, by rising bound."""
        batch = self.job.batch_size
        counts = accepted_counts(self.graph, batch, [m for m in range(1, batch + 1) if batch % m == 0])
        found = options(self.cluster, batch, counts, len(self.pieces))
        return sorted(found, key=lambda o: (self.floor_seconds(o), str(o)))

    def work_seconds(self, samples: int) -> float:
        """Seconds of one replica's micro-batch on one device, each op on the fastest."""
        if samples not in self._work:
            devices = {d.speed_alone: d for d in self.cluster.devices}.values()
            fastest = np.minimum.reduce([self.model.seconds(samples, device) for device in devices])
            self._work[samples] = float(fastest.sum())
        return self._work[samples]

    @cached_property
    def _work(self) -> dict[int, float]:
        return {}

    def floor_seconds(self, option: GroupOption) -> float:
        """Seconds that the option's surrogate is not below: its work in equal shares, nothing sent."""
        work = self.work_seconds(option.samples) / option.tensor
        share = work / option.stages
        return option.fill * work + (option.microbatches - option.fill) * option.chunks * share

    def survey(self, deadline: float, room: float = 1.0) -> Survey:
        """Solve every option whose bound leaves it a chance. ``room``: share of the memory to plan with.

        ``deadline``: value of ``time.perf_counter`` to stop at, once something is found.
        """
        found: list[SolvedOption] = []
        best, bound, looked_at = math.inf, math.inf, 0
        listed = self.options()
        for option in listed:
            floor = self.floor_seconds(option)
            late = time.perf_counter() > deadline and bool(found)
            if late or floor > best * TUNING.slack:
                return Survey(_ranked(found), min(bound, floor), len(listed), looked_at, late)
            solved, own = self.solve(option, best * TUNING.slack, room)
            bound, looked_at = min(bound, max(floor, own)), looked_at + 1
            if solved is not None:
                log.debug("%s: %.6g s, not below %.6g s", option, solved.pipeline.objective_seconds, own)
                found.append(solved)
                best = min(best, solved.pipeline.objective_seconds)
        return Survey(_ranked(found), bound, len(listed), looked_at, False)

    def solve(
        self, option: GroupOption, cutoff_seconds: float, room: float = 1.0
    ) -> tuple[SolvedOption | None, float]:
        """Find the best pipeline of an option, and a bound on all of them; None where none is below ``cutoff_seconds``."""
        try:
            tables = [self._of_group(option, option.ranks[place]) for place in option.places]
        except TooWideError as error:
            log.info("%s: not searched, its tables would have %s", option, error)
            return None, 0.0
        links = self._links(option)
        least = [plane for plane, _ in self._planes(option, tables, room, bound=True)]
        bound = _solved(PipelineProgram(option, least, links), cutoff_seconds).bound_seconds
        if bound >= cutoff_seconds:
            return None, bound
        fast = self._planes(option, tables, room, bound=False)
        found = _solved(PipelineProgram(option, [plane for plane, _ in fast], links), cutoff_seconds).found
        if not found:
            return None, bound
        best = found[0]
        ends = [*best.starts[1:], len(self.pieces)]
        columns = tuple(
            int(fast[option.stages - 1 - s][1][tables[s].number[a, b]])
            for s, (a, b) in enumerate(zip(best.starts, ends, strict=True))
        )
        return SolvedOption(option, tuple(tables), best, columns), bound

    def decode(self, solved: SolvedOption, *, one_queue: bool) -> Decoded:
        """Return the candidate that an option's best pipeline is."""
        return decoded(solved.composed, solved.option, solved.pipeline, solved.columns, one_queue=one_queue)

    def _of_group(self, option: GroupOption, ranks: tuple[int, ...]) -> Composed:
        devices = [self.cluster.devices[rank] for rank in ranks]
        alike = tuple((d.speed_alone, d.memory_bytes, d.node - devices[0].node) for d in devices)
        key = option.replicas, option.tensor, option.samples, alike
        if key not in self._composed:
            group = GroupKind(ranks, option.replicas, option.tensor)
            most = min(option.microbatches, option.groups)
            step = self.work_seconds(option.samples) * option.microbatches / (option.groups * option.tensor)
            self._composed[key] = composed(
                self.piece_search, group, self.job, option.microbatches, most, step
            )
        return self._composed[key]

    def _planes(
        self, option: GroupOption, tables: Sequence[Composed], room: float, *, bound: bool
    ) -> list[tuple[FloatArray, IntArray]]:
        """Per stage from the end: seconds of the stage from each piece to each, and the column of each range."""
        known: dict[tuple[int, int], tuple[FloatArray, IntArray]] = {}
        found = []
        for table, place, held in zip(tables[::-1], option.places[::-1], option.in_flight, strict=True):
            key = id(table), held
            if key not in known:
                capacity = min(self.cluster.devices[rank].memory_bytes for rank in option.ranks[place])
                share = capacity * room * (1 if bound else 1 / option.chunks)
                columns = np.zeros(0, dtype=np.int64)
                if bound:
                    seconds = table.least(option.microbatches, held, share)
                else:
                    seconds, columns = table.fastest(option.microbatches, held, share)
                plane = np.where(table.number >= 0, seconds[table.number], np.inf)
                known[key] = plane, columns
            found.append(known[key])
        return found

    def _links(self, option: GroupOption) -> list[FloatArray]:
        """Per stage from the end: [pieces + 1] seconds of the cut behind it, at each joint."""
        sizes = self._cut_bytes(option.samples * option.replicas)
        groups, places = option.ranks, option.places
        found = [np.zeros(len(sizes))]
        for before, behind in zip(places[-2::-1], places[:0:-1], strict=True):
            path = self.cluster.path(groups[before][-1], groups[behind][0])
            rate = path.bandwidth_bytes_per_second * option.size
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
