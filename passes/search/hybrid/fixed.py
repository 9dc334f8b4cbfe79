"""The hybrid search: stages on device groups as the user fixed them, what is open filled in by the other searches.

degrees ─► groups ─► stage borders ─► each stage sharded on its group ─► simulated ─► the fastest that fits

open             filled in by
stage borders    the layer-wise program over groups
a group's mesh, layouts of ops and parameters      the feature-wise search, per stage
micro-batches, ZeRO, recomputation                 a few candidates in order of cost, simulated
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, TimeLimitError, UsageError
from cost_models.units import counted
from passes.costs.costs import GraphCosts
from passes.graph.blocks import GATHERS, block_of, regions_of_stages
from passes.graph.graph import OpGraph
from passes.interrupts import keep_from_here, may_be_lost
from passes.lower.candidate import Candidate
from passes.lower.segment import Segmentation
from passes.lower.summarize import shared_state
from passes.progress import report_option
from passes.search.any_plan import any_plan_bound
from passes.search.certificate import Certificate, relative_gap
from passes.search.feature.pins import Pin, resolve
from passes.search.hybrid.cuts import balanced_stages, stages_at_borders
from passes.search.hybrid.degrees import Degrees, degrees_of, microbatch_counts
from passes.search.hybrid.fix import pins_of_stages
from passes.search.hybrid.relax.fixed_infeasible import fixed_infeasible
from passes.search.hybrid.request import HybridRequest
from passes.search.hybrid.stages import Axes, StageSearch, StageSharded, StageWish
from passes.search.judge import Judge, Simulated
from passes.search.microbatches import accepted_counts
from passes.search.outcome import Label, Outcome, RunnerUp, ShardingDetails
from passes.search.words import BY_HAND, RecomputeMode
from runtime.schedules import SCHEDULES

log = logging.getLogger("partitioner")

OBJECTIVE = "seconds of the simulated step"


@dataclass(frozen=True)
class _FixedFilling:
    """One way to fill in what is open."""

    microbatches: int
    zero: int
    again: bool
    """Stages that do not fit compute their blocks again in backward."""
    gathers: bool = False
    """Parameters that are gathered for a product are gathered again in backward."""

    def __str__(self) -> str:
        again = ", blocks computed again" if self.again else ", gathered again" if self.gathers else ""
        return f"{counted(self.microbatches, 'micro-batch')}, ZeRO-{self.zero}{again}"


@dataclass(frozen=True, eq=False)
class _Cut:
    """A model cut into stages, and the search that shards them."""

    stage_of: Mapping[str, int]
    stages: StageSearch


def place_fixed(
    graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, request: HybridRequest, judge: Judge
) -> Outcome:
    """Plan what ``request`` fixes, filled in.

    Raises UsageError for what cannot hold, InfeasibleError if nothing fits, TimeLimitError if nothing that fits was found.
    """
    started = time.perf_counter()
    search = _Hybrid(graph, costs, cluster, request, judge)
    tried = search.run()
    fitting = [t for t in tried if t[0].fits]
    if not fitting:
        raise fixed_infeasible(
            request, judge, search.degrees, [s for s, _ in tried], search.refused,
            lambda changed, by: [s for s, _ in _Hybrid(graph, costs, by.cluster, changed, by).run()],
        )  # fmt: skip
    best, sharded = min(fitting, key=lambda t: t[0].step_seconds)
    seconds = sum(s.seconds for s in sharded.values())
    details = ShardingDetails(seconds, (), {number: s.origins for number, s in sharded.items()})
    runner_ups = tuple(
        RunnerUp.of(Label.of_stages(simulated.candidate), simulated) for simulated, _ in tried if simulated is not best
    )  # fmt: skip
    certificate = search.certificate(best, time.perf_counter() - started)
    return Outcome(best, judge, certificate, runner_ups, details=details)


class _Hybrid:
    """One search."""

    def __init__(
        self, graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, request: HybridRequest, judge: Judge
    ) -> None:
        self.graph, self.costs, self.cluster, self.request, self.judge = graph, costs, cluster, request, judge
        self.fix = request.fix
        self.recompute: RecomputeMode = self.fix.recompute or request.recompute
        self.degrees = degrees_of(self.fix, cluster.world_size)
        if self.fix.borders is not None and self.fix.interleave is None and self.fix.pipeline is None:
            self.degrees = self._as_many_as_borders()
        self.schedule = self._schedule()
        self.pins = pins_of_stages(request.pins, self.degrees.stages)
        counts = microbatch_counts(self.fix, self.degrees, request.job.batch_size, request.microbatches)
        self.counts = accepted_counts(graph, request.job.batch_size, counts)
        self.one_queue = self.fix.one_queue(cluster)
        self.status = BY_HAND
        self.refused: list[InfeasibleError | TimeLimitError] = []
        """The reasons of ways in which a stage cannot be sharded at all."""
        self._pins: dict[tuple[tuple[str, str], ...], Mapping[str, Pin]] = {}
        self._balanced_cuts: dict[tuple[int, RecomputeMode, bool], Mapping[str, int]] = {}

    def run(self) -> list[tuple[Simulated, dict[int, StageSharded]]]:
        """Simulate the ways of each number of micro-batches; on Ctrl-C no more, once one fits."""
        tried: list[tuple[Simulated, dict[int, StageSharded]]] = []
        for count in self.counts:
            found = any(simulated.fits for simulated, _ in tried)
            try:
                with may_be_lost(found):
                    tried += self._filled_in(count)
            except KeyboardInterrupt:
                if not found:
                    raise
                self.status = "interrupted"
                break
            if any(simulated.fits for simulated, _ in tried):
                keep_from_here()
            if self.degrees.stages == 1 and any(simulated.fits for simulated, _ in tried):
                break  # more micro-batches cost no less where nothing is pipelined
        return tried

    def _filled_in(self, count: int) -> list[tuple[Simulated, dict[int, StageSharded]]]:
        """Simulate the ways of one number of micro-batches, none after the list with the first that fits."""
        tried: list[tuple[Simulated, dict[int, StageSharded]]] = []
        cuts: list[_Cut] = []
        for last_resort in (False, True):
            for ways in self._ways(count):
                found = [
                    f
                    for way in ways
                    for cut in self._cuts(way, cuts, last_resort)
                    for f in self._tried_if_possible(way, cut)
                ]
                tried += found
                if any(simulated.fits for simulated, _ in found):
                    return tried
        return tried

    def _cuts(self, way: _FixedFilling, known: list[_Cut], last_resort: bool) -> list[_Cut]:
        """Return the cuts to try for one choice of degrees; new ones are added to ``known``.

        They balance seconds, those of a way that computes blocks again with all of them computed again; beside these, the
        cuts of the layer-wise program that chooses where to, within memory. That is the last resort of the other ways too.
        """
        wanted: list[Mapping[str, int]]
        if self.fix.borders is not None:
            if last_resort:
                return []
            wanted = [stages_at_borders(self.graph, self.fix.borders, self.degrees.stages)]
        else:
            kinds: list[tuple[RecomputeMode, bool]] = [("full" if way.again else "none", False)]
            if last_resort:
                kinds = [("none" if way.gathers else self.recompute, True)]
            elif way.again and self.recompute == "auto":
                kinds.append(("auto", True))
            wanted = [self._balanced(way.microbatches, recompute, limited) for recompute, limited in kinds]
        cuts = []
        for stage_of in wanted:
            found = [cut for cut in known if cut.stage_of == stage_of]
            if found and last_resort:
                continue  # tried already
            if not found:
                search = StageSearch(
                    self.graph, self.cluster, self.request.job, way.microbatches, self.judge.recomputed,
                    self._shared(stage_of), self.request.time_limit_seconds,
                )  # fmt: skip
                found = [_Cut(stage_of, search)]
                known += found
            cuts += [cut for cut in found if cut not in cuts]
        return cuts

    def _balanced(self, count: int, recompute: RecomputeMode, limited: bool) -> Mapping[str, int]:
        key = (count, recompute, limited)
        if key not in self._balanced_cuts:
            self._balanced_cuts[key] = balanced_stages(
                self.graph, self.costs, self.cluster, self.request.job, self.degrees, self.schedule, count,
                recompute, limited=limited,
            )  # fmt: skip
        return self._balanced_cuts[key]

    def _shared(self, stage_of: Mapping[str, int]) -> frozenset[str]:
        """Name the parameters and buffers that several stages read."""
        return shared_state(self.graph, Segmentation(stage_of, self._groups(), self.judge.recomputed))

    def _ways(self, count: int) -> list[list[_FixedFilling]]:
        """List the ways of one number of micro-batches: those of the next list are tried where none of a list fits.

        ZeRO-3 gathers parameters in every micro-batch, recomputation runs blocks twice: which costs less, only simulating
        both tells.
        """
        replicated = any((self.degrees.replicas(g) or 1) > 1 for g in range(len(self.degrees.groups)))
        zeros = [0, 1, 3] if self.fix.zero is None and replicated else [self.fix.zero or 0]
        kept, gathers, again = (
            [
                _FixedFilling(count, zero, again=more == "full", gathers=more == "gathers")
                for zero in (0, 1, 3)
            ]
            for more in ("none", "gathers", "full")
        )
        allowed = {"none": kept, "gathers": gathers, "full": again, "auto": [*kept, gathers[-1], *again]}
        order = [[kept[0]], [kept[1]], [again[0]], [again[1], kept[2]], [gathers[2]], [again[2]]]
        if self.recompute == "gathers":
            order = [[way] for way in gathers]
        listed = (
            [way for way in ways if way.zero in zeros and way in allowed[self.recompute]] for ways in order
        )
        return [ways for ways in listed if ways]

    def _tried_if_possible(
        self, way: _FixedFilling, cut: _Cut
    ) -> list[tuple[Simulated, dict[int, StageSharded]]]:
        """Simulate a way; nothing, and the reason kept, where no way to share a stage that fits is found."""
        report_option(way)
        try:
            return self._tried(way, cut)
        except (InfeasibleError, TimeLimitError) as error:
            self.refused.append(error)
            return []

    def _tried(self, way: _FixedFilling, cut: _Cut) -> list[tuple[Simulated, dict[int, StageSharded]]]:
        """Simulate a way, more stages computing again until it fits.

        Where only some have to, all are tried too: stages of unlike seconds wait for each other, which in interleaved
        pipelines costs more than computing every block twice.
        """
        everywhere = set(range(self.degrees.stages))
        blocks = block_of(self.graph)
        every: list[tuple[str, ...]] = [
            tuple(
                dict.fromkeys(
                    blocks[op] for op, stage in cut.stage_of.items() if stage == number and op in blocks
                )
            )
            for number in range(self.degrees.stages)
        ]
        again = everywhere if self.recompute == "full" else set[int]()
        if way.gathers:
            shared = tuple((GATHERS,) if len(group) > 1 else () for group in self._groups())
            return [self._simulated(way, cut, shared)]
        while True:
            chosen = tuple(own if number in again else () for number, own in enumerate(every))
            try:
                simulated, sharded = self._simulated(way, cut, chosen)
                more = set() if simulated.fits or not way.again else self._overflowing(simulated) - again
            except (InfeasibleError, TimeLimitError):  # a stage does not fit, however it is shared
                more = everywhere - again if way.again else set()
                if not more:
                    raise
            if not more:
                found = [(simulated, sharded)]
                if set() < again < everywhere:
                    found.append(self._simulated(way, cut, tuple(every)))
                return found
            again = again | more

    def _simulated(
        self, way: _FixedFilling, cut: _Cut, blocks: tuple[tuple[str, ...], ...]
    ) -> tuple[Simulated, dict[int, StageSharded]]:
        """Shard the stages, those with ``blocks`` computing them again, and simulate the step."""
        groups = self._groups()
        ops: list[list[str]] = [[] for _ in groups]
        for name, stage in cut.stage_of.items():
            ops[stage].append(name)
        place = {ranks: number for number, ranks in enumerate(self.degrees.groups)}
        regions = regions_of_stages(self.graph, cut.stage_of, blocks) or ((),) * len(groups)
        wishes = [
            replace(
                self._wish(number, tuple(own), group, self.degrees.axes(place[group], way.zero)), again=again
            )
            for number, (own, group, again) in enumerate(zip(ops, groups, regions, strict=True))
        ]
        sharded = cut.stages.shard(wishes)
        candidate = Candidate(
            stage_of=cut.stage_of,
            groups=groups,
            microbatches=way.microbatches,
            schedule=self.schedule,
            recomputed_blocks=blocks if any(blocks) else (),
            shardings={number: s.placement for number, s in sharded.items()},
            one_queue=self.one_queue,
        )
        return self.judge.simulate(candidate), sharded

    def _wish(
        self, number: int, ops: tuple[str, ...], group: tuple[int, ...], axes: Axes | None
    ) -> StageWish:
        """Say what is fixed of a stage, its degrees as a pattern of everything."""
        pattern = {"*": " ".join(pattern for _, _, pattern in axes)} if axes else {}
        return StageWish(ops, group, axes, self._resolved(tuple({**pattern, **self.pins[number]}.items())))

    def _resolved(self, pins: tuple[tuple[str, str], ...]) -> Mapping[str, Pin]:
        if pins not in self._pins:
            self._pins[pins] = resolve(self.graph, dict(pins))
        return self._pins[pins]

    def _overflowing(self, simulated: Simulated) -> set[int]:
        """Return the stages on devices whose memory does not suffice."""
        devices = zip(self.cluster.devices, simulated.peak_bytes, strict=True)
        short = {device.rank for device, peak in devices if peak > device.memory_bytes}
        return {number for number, group in enumerate(self._groups()) if short & set(group)}

    def _groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each stage."""
        places = SCHEDULES[self.schedule].positions(self.degrees.stages, len(self.degrees.groups))
        return tuple(self.degrees.groups[place] for place in places)

    def _as_many_as_borders(self) -> Degrees:
        """Interleave as the borders say: as many stages as they make, if groups can have equally many."""
        stages = len(self.fix.borders or ()) + 1
        groups = len(self.degrees.groups)
        if self.fix.groups is None and stages > 1 and groups == 1:
            return degrees_of(replace(self.fix, pipeline=stages), self.cluster.world_size)
        return replace(self.degrees, chunks=max(1, stages // groups))

    def _schedule(self) -> str:
        """Choose the schedule, and refuse one that the stages cannot have."""
        chunks = self.degrees.chunks
        name = self.request.schedule
        if name == "auto":
            name = "interleaved" if chunks > 1 else "1f1b"
        if SCHEDULES[name].chunks == 2 and self.fix.interleave is None:
            self.degrees = replace(self.degrees, chunks=2)
        if why := SCHEDULES[name].check(self.degrees.stages, len(self.degrees.groups), 1):
            raise UsageError(
                f"cannot run {counted(self.degrees.stages, 'stage')} under schedule {name}",
                [why.replace("ranks", "groups")],
                ["interleave= is the number of stages of each group"],
            )
        return name

    def certificate(self, best: Simulated, seconds: float) -> Certificate:
        """About the one plan that was fixed: nothing is proved but the bound on every plan."""
        bound = any_plan_bound(self.graph, self.costs, self.cluster, self.request.job)
        return Certificate(
            objective=OBJECTIVE,
            objective_seconds=best.step_seconds,
            bound_seconds=bound,
            gap=relative_gap(best.step_seconds, bound),
            simulated_lower_bound_seconds=0.0,
            space=f"any plan of the step; fixed: {self.fix or 'nothing'}",
            method="stages and layouts filled in by the layer-wise and feature-wise searches, simulated",
            solver_status=self.status,
            search_seconds=seconds,
        )
