"""The search over pipelines of sharded stages: its options, the stages of each, and the best pipeline of one.

options ─► pieces ─► recipes ─► ranges ─► stages of an option ─► dynamic program ─► candidate
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal

import numpy as np

from cost_models.arrays import FloatArray
from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.search.feature.pins import Unmet, unmet_of
from passes.search.hybrid.bounds import full_bound, quick_bound
from passes.search.hybrid.cover import Covers
from passes.search.hybrid.decode import Decoded, decoded
from passes.search.hybrid.fixed import Fixed
from passes.search.hybrid.floors import Floors
from passes.search.hybrid.options import GroupOption, options
from passes.search.hybrid.pools import divisions
from passes.search.hybrid.recipes.composed import Composed
from passes.search.hybrid.recipes.eliminate import TooWideError
from passes.search.hybrid.recipes.joints import Pieces, pieces_of, value_bytes
from passes.search.hybrid.recipes.pieces import GroupKind, PieceSearch
from passes.search.hybrid.recipes.ranges import SAVED
from passes.search.hybrid.recipes.walk import Step, needed_bytes
from passes.search.hybrid.request import HybridRequest
from passes.search.hybrid.rooms import Rooms
from passes.search.hybrid.solve import SolvedOption, fastest
from passes.search.hybrid.staged import RangeTableT, Staged
from passes.search.hybrid.tables import Tables
from passes.search.microbatches import accepted_counts, may_cost_less
from passes.search.words import RecomputeMode, of_activations, within_blocks
from passes.timings import phase

log = logging.getLogger("partitioner")


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
    used: Sequence[int] | None = None
    """Ranks that groups are made of, from the first of each node on; None: all."""
    fixed: Fixed | None = None
    """The part of it that is fixed."""
    within: str = ""
    """The part of pieces that backward computes again (``PieceSearch``)."""
    pieces: Pieces = field(init=False)
    _crossing: dict[int, FloatArray] = field(default_factory=dict, init=False)
    _beyond: dict[tuple[int, Composed, int], FloatArray] = field(default_factory=dict, init=False)
    """The bytes of simulated stages beyond what their tables count (``Staged.beyond``)."""

    def __post_init__(self) -> None:
        self.pieces = pieces_of(self.graph) if self.fixed is None else self.fixed.pieces

    @property
    def world_size(self) -> int:
        """The number of devices that groups are made of."""
        return self.cluster.world_size if self.used is None else len(self.used)

    def fixing(self, request: HybridRequest) -> GroupSearch:
        """Search the same with other things fixed. Raises UsageError for what cannot hold."""
        recompute = request.fix.recompute or request.recompute
        return replace(
            self, microbatches=request.microbatches, schedule=request.schedule, recompute=of_activations(recompute),
            fixed=Fixed.of(self.graph, self.cluster, request), within=within_blocks(recompute) or self.within,
        )  # fmt: skip

    def on(self, ranks: Sequence[int]) -> GroupSearch:
        """Search on a part of the cluster, with the same tables, be they made here or before."""
        search = copy.copy(self)
        search.used = ranks
        search.piece_search, search.floors = self.piece_search, self.floors
        search.covers, search.tables = self.covers, self.tables
        return search

    @cached_property
    def piece_search(self) -> PieceSearch:
        """The search of recipes."""
        return PieceSearch(self.pieces, self.cluster, self._shared, within=self.within)

    @cached_property
    def _fixed_searches(self) -> list[PieceSearch]:
        """The search of recipes of each stage, if something is fixed: those with equal pins share one."""
        if self.fixed is None:
            return []
        known: dict[object, PieceSearch] = {}
        for stage, pins in enumerate(self.fixed.pins):
            known.setdefault(
                tuple(pins.items()),
                replace(
                    self.piece_search,
                    fixed=partial(self.fixed.layouts, stage),
                    within=self.within,
                    _spaces={},
                ),
            )
        return [known[tuple(pins.items())] for pins in self.fixed.pins]

    @cached_property
    def _shared(self) -> frozenset[str]:
        """Parameters and buffers that several pieces read."""
        seen: dict[str, int] = {}
        for part in self.pieces.parts:
            for given in part.inputs:
                if given.kind in ("parameter", "buffer"):
                    seen[given.name] = seen.get(given.name, 0) + 1
        return frozenset(name for name, count in seen.items() if count > 1)

    @cached_property
    def counts(self) -> list[int]:
        """The numbers of equal micro-batches that the model allows, rising."""
        if self.fixed is not None:
            return sorted({option.microbatches for option in self.options()})
        batch = self.job.batch_size
        wanted = range(1, batch + 1) if self.microbatches == "auto" else [self.microbatches]
        return sorted(m for m in accepted_counts(self.graph, batch, wanted) if batch % m == 0)

    @phase("options")
    def options(self) -> list[GroupOption]:
        """List all options."""
        if self.fixed is not None:
            return self._fixed_options
        pools, pieces = divisions(self.cluster, self.used), len(self.pieces)
        return list(options(pools, self.job.batch_size, self.counts, pieces, self.floors.rate, self.schedule))

    @cached_property
    def _fixed_options(self) -> list[GroupOption]:
        """The options whose groups can have the layouts that are fixed. Raises UsageError where none can."""
        assert self.fixed is not None
        found, wrong = [], dict[str, None]()
        known: dict[object, Unmet] = {}
        for option in self.fixed.options:
            unmet = Unmet()
            for (run, number), search in {
                (option.members[place], id(search)): (option.members[place], search)
                for place, search in zip(option.places, self._fixed_searches, strict=True)
            }.values():
                key = run.replicas, run.tensor, id(search)
                if run.size > 1 and key not in known:
                    group = GroupKind(run.ranks(number), run.replicas, run.tensor)
                    known[key] = self._unmet(search, group, option.microbatches)
                unmet = unmet | known.get(key, Unmet())
            if unmet.problems:
                mesh = " and ".join(f"{run.replicas}×{run.tensor}" for run in option.runs)
                wrong |= dict.fromkeys(f"on a mesh of {mesh}: {problem}" for problem in unmet.problems)
            else:
                found.append(option)
        if not found:
            raise UsageError(
                "cannot shard any stage so",
                list(wrong)[:8],
                [
                    "a layout names one placement per mesh axis; tensor= and data= fix their number",
                    '"S0?" holds where it can',
                ],
            )
        return found

    def _unmet(self, search: PieceSearch, group: GroupKind, microbatches: int) -> Unmet:
        """Return what no piece can be of what is fixed, or what one cannot that must."""
        unmet, axes = Unmet(), len(group.axes)
        for kind in range(len(self.pieces.first)):
            problem = search.problem(kind, group, self.job, microbatches)
            units = list(zip(problem.space.units, problem.units, strict=True))
            unmet = unmet | unmet_of(units, search.fixed_of(kind, group), axes)
        return unmet

    @cached_property
    def floors(self) -> Floors:
        """The bounds of options before anything is composed for them."""
        return Floors(self.piece_search, self.job, may_cost_less(self.graph, self.microbatches))

    @cached_property
    def rooms(self) -> Rooms:
        """The memory that groups have for tensors."""
        return Rooms(self.cluster)

    @cached_property
    def covers(self) -> Covers:
        """Tables that bound those of the groups."""
        return Covers(self.piece_search, self.job, self.floors, self.recompute)

    @cached_property
    def tables(self) -> Tables:
        """The ranges of the kinds of groups."""
        return Tables(self.piece_search, self.job, self.floors)

    def staged(self, option: GroupOption, room: float = 1.0) -> Staged[Composed] | None:
        """Return the option's stages; None where the tables of its groups would be too large."""
        try:
            staged = self._staged(option, self.tables.of_stages(option, self._fixed_searches), room)
            return replace(staged, beyond=self._beyond)
        except TooWideError as error:
            log.info("%s: not searched, its tables would have %s", option, error)
            return None

    def first_bound(
        self, option: GroupOption, cutoff_seconds: float, room: float = 1.0, *, on_mesh: bool = False
    ) -> float:
        """Lower bound on an option's pipelines, without tables of its own. ``on_mesh``: by what replicas exchange, too."""
        if self.fixed is not None:  # there are few, and shards alone may be held to more than with replicas
            return 0.0
        if on_mesh and (self.floors.cheaper_in_pieces or all(run.replicas == 1 for run in option.runs)):
            return 0.0
        try:
            groups = self.covers.of_groups(option, on_mesh=on_mesh)
            stages = [groups[place] for place in option.places]
            return quick_bound(self._staged(option, stages, room), cutoff_seconds)
        except TooWideError:
            return 0.0

    def _staged(self, option: GroupOption, stages: Sequence[RangeTableT], room: float) -> Staged[RangeTableT]:
        capacity = [room * own for own in self.rooms.of(option)]
        return Staged(option, stages[::-1], self._links(option), capacity, self.recompute)

    @phase("program")
    def solve(self, option: GroupOption, cutoff_seconds: float, room: float = 1.0) -> SolvedOption | None:
        """Find the best pipeline of an option; None where none is below ``cutoff_seconds``."""
        staged = self.staged(option, room)
        if staged is None:
            return None
        bound = max(quick_bound(staged, cutoff_seconds), full_bound(staged, cutoff_seconds))
        return None if bound >= cutoff_seconds else fastest(staged, cutoff_seconds, bound)

    def decode(self, solved: SolvedOption, *, one_queue: bool) -> Decoded:
        """Return the candidate that an option's best pipeline is."""
        return decoded(
            self.pieces,
            solved.option,
            solved.pipeline,
            solved.steps,
            one_queue=one_queue,
            within=self.within,
        )

    def fits(self, solved: SolvedOption, room: float = 1.0) -> bool:
        """Tell whether a pipeline fits as memory is counted: what it takes piece by piece, not what a table says."""
        staged = self.staged(solved.option, room * (1 + 1e-9))
        if staged is None:
            return False
        left = zip(staged.capacity_bytes, _needed(solved, staged), strict=True)
        return all(needed <= own for own, needed in left)

    def learn(self, solved: SolvedOption, peak_bytes: Sequence[int]) -> None:
        """Take in what the stages of a simulated pipeline need beyond what is counted. ``peak_bytes``: by rank.

        Of a group with several stages each has an equal share of it.
        """
        option, devices = solved.option, self.cluster.devices
        staged = self.staged(option)
        if staged is None:
            return
        needed = _needed(solved, staged)
        over = [
            max(peak_bytes[rank] - devices[rank].room_bytes for rank in ranks) + room - size
            for ranks, room, size in zip(option.ranks, staged.capacity_bytes, needed, strict=True)
        ]
        for group, table, number, held, _ in _of_stages(solved, staged):
            key = option.microbatches, table, held
            beyond = self._beyond.setdefault(key, np.zeros(int(table.number.max()) + 1))
            beyond[number] = max(beyond[number], over[group] / option.chunks)

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
        begins = None if self.fixed is None else self.fixed.begins
        for link, joint in zip(found[1:], (begins or ())[:0:-1], strict=False):
            link[np.arange(len(link)) != joint] = np.inf
        return found

    def _cut_bytes(self, samples: int) -> FloatArray:
        """[joints] bytes of the values that cross, and of their gradients."""
        if samples not in self._crossing:
            found = np.zeros(len(self.pieces) + 1)
            for name, last in self.pieces.last_reader.items():
                size = value_bytes(self.graph, name, samples)
                found[self.pieces.piece_of[name] + 1 : last + 1] += size * (
                    2 if name in self.graph.needs_grad else 1
                )
            self._crossing[samples] = found
        return self._crossing[samples]


def _needed(solved: SolvedOption, staged: Staged[Composed]) -> list[float]:
    """Return the bytes of each group, as memory is counted."""
    found = [0.0] * len(staged.capacity_bytes)
    for group, table, number, held, steps in _of_stages(solved, staged):
        again = any(step.again for step in steps)
        anew = float(table.ranges[-1].amounts[SAVED, number, 0]) if again else 0.0
        found[group] += needed_bytes(steps, held) + anew
    return found


def _of_stages(
    solved: SolvedOption, staged: Staged[Composed]
) -> Iterator[tuple[int, Composed, int, int, Sequence[Step]]]:
    """Yield of each stage its group, its table, which of the unlike ranges it is, the micro-batches it holds, its steps."""
    starts = solved.pipeline.starts
    ends = [*starts[1:], len(staged.links[0]) - 1]
    stages = zip(
        staged.groups[::-1], staged.tables[::-1], starts, ends, solved.option.in_flight[::-1], solved.steps,
        strict=True,
    )  # fmt: skip
    for group, table, first, end, held, steps in stages:
        yield group, table, int(table.number[first, end]), held, steps
