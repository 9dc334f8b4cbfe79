"""Solve the surrogate for every option of a request, the promising ones first, and keep the best splits of each."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from cost_models.arrays import IntArray
from cost_models.cluster import ClusterSpec
from passes.progress import report_found, report_option
from passes.search.bisect import Bisected, Bisection
from passes.search.bound import whole_ops_bound
from passes.search.layer.beyond import LearnedBytes
from passes.search.layer.cuts import CutProgram
from passes.search.layer.options import (
    DevicePlan,
    DeviceTable,
    ScheduleOption,
    UnitCosts,
    device_plan,
    fullest_moments,
    in_flight,
    unit_costs,
)
from passes.search.layer.problem import LayerProblem, Recompute, StageSplit, evaluate
from passes.search.layer.spaces import Space
from passes.search.layer.table import Geometry, StageTable
from passes.search.layer.together import together
from passes.search.layer.tuning import TUNING
from passes.search.model import LayerModel, smallest_share
from passes.search.words import RecomputeMode
from runtime.schedules import SCHEDULES


@dataclass(frozen=True, eq=False)
class SolvedSplit:
    """A split of one option over one space."""

    option: ScheduleOption
    space: Space
    problem: LayerProblem
    split: StageSplit
    ranks: tuple[int, ...]
    """Rank of each stage."""
    cautious: bool = False
    """Found with slower links than there are."""
    every_block: bool = False
    """Stages that compute blocks again do so with all of theirs, not as few as fit."""
    left_bytes: tuple[float, ...] = ()
    """Bytes of each stage's device that are not for blocks to keep what they saved; empty: none."""

    @property
    def stages(self) -> IntArray:
        """[n ops] the stage of each op."""
        return np.array(self.split.stage_of)[self.space.unit_of]


@dataclass(frozen=True, eq=False)
class OptionResult:
    """The result of one option. No split of its space is below ``bound_seconds``."""

    option: ScheduleOption
    solved: tuple[SolvedSplit, ...]
    bound_seconds: float
    looked_at: bool
    """True if it was solved; else its bound alone ruled it out, or time did."""
    optimal: bool


@dataclass(eq=False)
class LayerSearch:
    """Everything the search reads, and caches per micro-batch size and kind of schedule."""

    model: LayerModel
    cluster: ClusterSpec
    table: DeviceTable
    spaces: Sequence[Space]
    batch_size: int
    pins: Mapping[int, int]
    max_stages: int
    options: Sequence[ScheduleOption]
    min_stages: int = 1
    """Devices with a stage, at least."""
    recompute: RecomputeMode = "none"
    learned: LearnedBytes = field(default_factory=LearnedBytes)
    """The bytes of simulated stages beyond what is counted here."""
    _numbers: dict[tuple[int, int], UnitCosts] = field(default_factory=dict)
    _plans: dict[tuple[int, bool], DevicePlan] = field(default_factory=dict)

    def numbers(self, space: int, size: int) -> UnitCosts:
        """Costs over the units of a space, cached."""
        key = (space, size)
        if key not in self._numbers:
            self._numbers[key] = unit_costs(self.model, self.spaces[space], self.table, size)
        return self._numbers[key]

    def plan(self, option: ScheduleOption) -> DevicePlan:
        """The ways in which the option may hand out devices, cached."""
        key = (option.chunks, SCHEDULES[option.schedule].folded)
        if key not in self._plans:
            self._plans[key] = device_plan(self.cluster, self.table, *key, self.max_stages)
        return self._plans[key]

    def problem(
        self, space: int, option: ScheduleOption, capacity_scale: float = 1.0, plan: DevicePlan | None = None
    ) -> LayerProblem | None:
        """The option as numbers; None if it cannot have that many stages. ``plan``: other devices than the cluster's."""
        size = option.size(self.batch_size)
        costs, structure = self.numbers(space, size), self.spaces[space].structure
        plan = plan or self.plan(option)
        capacity_scale *= self.learned.share_of(option, size)
        single, schedule = option.chunks == 1, SCHEDULES[option.schedule]
        devices = sum(kind.count for kind in plan.kinds) if single else len(plan.sequence) // option.chunks
        most = min(structure.units, self.max_stages)
        stages = min(devices, most) if single else len(plan.sequence)
        if stages > most or min(stages, devices) < self.min_stages:
            return None
        used = stages if single else devices
        if schedule.check(stages, used, option.microbatches) is not None:
            return None
        return LayerProblem(
            structure=structure,
            seconds=costs.seconds,
            storage_bytes=costs.storage_bytes,
            state_bytes=costs.state_bytes,
            forward_bytes=costs.forward_bytes,
            gradient_bytes=costs.gradient_bytes,
            working=costs.working,
            kinds=tuple(replace(k, capacity_bytes=k.capacity_bytes * capacity_scale) for k in plan.kinds),
            link_latency_seconds=plan.latency_seconds,
            link_seconds_per_byte=plan.seconds_per_byte,
            in_flight=in_flight(option, used, stages),
            microbatches=option.microbatches,
            fill=option.fill(used),
            chunks=option.chunks,
            deferred_bytes=costs.deferred_bytes,
            moments=fullest_moments(option, used, stages),
            alternating=option.schedule == "1f1b",
            assignment=plan.assignment,
            sequence=plan.sequence,
            stage_counts=(self.min_stages, self.max_stages) if single else (stages, stages),
            pins={int(self.spaces[space].unit_of[op]): stage for op, stage in self.pins.items()},
            recompute=self._allowed(costs, schedule.splits_backward),
            beyond=self.learned.of(self.spaces[space], option, size, plan),
        )

    def _allowed(self, costs: UnitCosts, deferring: bool) -> Recompute | None:
        """The recompute that stages may do, under a schedule that defers weight halves or not."""
        if costs.recompute is None or self.recompute == "none":
            return None
        working = costs.beside_deferred if deferring else costs.recompute.working
        return replace(costs.recompute, working=working, always=self.recompute == "full")

    def floor_seconds(self, option: ScheduleOption) -> float:
        """A quick bound on the option's surrogate: equal shares of the work, or the heaviest op."""
        size = option.size(self.batch_size)
        fastest = np.minimum.reduce([self.model.seconds(size, d) for d in self.table.representatives])
        work, world = float(fastest.sum()), len(self.cluster.devices)
        bottleneck = max(work / (world * option.chunks), float(fastest.max()))
        fill = option.fill(2)  # no more devices hide more
        return fill * work + (option.microbatches - fill) * option.chunks * bottleneck

    def solve(
        self, deadline: float, capacity_scale: float = 1.0, known_seconds: float = math.inf
    ) -> list[OptionResult]:
        """Best splits of every option that may still matter, by rising bound. ``known_seconds``: of another plan's step."""
        queue = sorted((self.floor_seconds(option), index) for index, option in enumerate(self.options))
        best = known_seconds
        results = []
        for floor, index in queue:
            option = self.options[index]
            late = time.perf_counter() > deadline and math.isfinite(best)
            if floor > best * TUNING.slack or late:
                results.append(OptionResult(option, (), floor, False, not late))
                continue
            report_option(option, 0.0, sum(bool(r.solved) for r in results), len(results), len(queue))
            result = self.solve_option(option, floor, deadline, best * TUNING.slack, capacity_scale)
            results.append(result)
            best = min([best, *(s.split.objective_seconds for s in result.solved)])
            report_found(best)
        self._second_look(results, deadline)
        return results

    def _second_look(self, results: list[OptionResult], deadline: float) -> None:
        """Add to the best options their optimum under slower links, valued by the real ones."""
        ranking = sorted((r.solved[0].split.objective_seconds, i) for i, r in enumerate(results) if r.solved)[
            : TUNING.cautious_options
        ]
        for _, index in ranking:
            if time.perf_counter() > deadline:
                return
            known = results[index].solved
            first = known[0]
            slower = replace(
                first.problem, link_seconds_per_byte=first.problem.link_seconds_per_byte * TUNING.caution
            )
            for split in self._solve_problem(first.space, slower, deadline, math.inf).pipelines[:1]:
                real = _first_devices(
                    first.problem, evaluate(first.problem, split.stage_of, split.kinds, split.recomputed)
                )
                ranks = self.plan(first.option).ranks_of(real.kinds, first.option.chunks)
                if all(real.stage_of != s.split.stage_of or ranks != s.ranks for s in known):
                    added = replace(first, split=real, ranks=ranks, cautious=True)
                    results[index] = replace(results[index], solved=(*known, added))

    def solve_option(
        self, option: ScheduleOption, floor: float, deadline: float, cutoff: float, capacity_scale: float
    ) -> OptionResult:
        """Find the best splits of an option below ``cutoff``, in seconds; none is below ``floor``."""
        solved: list[SolvedSplit] = []
        bound, optimal = math.inf, True
        for index, space in enumerate(self.spaces):
            problem = self.problem(index, option, capacity_scale)
            if problem is None:
                continue
            result = self._solve_problem(space, problem, deadline, cutoff)
            plan = self.plan(option)
            for split in result.pipelines:
                shifted = _first_devices(problem, split)
                ranks = plan.ranks_of(shifted.kinds, option.chunks)
                solved.append(SolvedSplit(option, space, problem, shifted, ranks))
            bound, optimal = min(bound, result.bound_seconds), optimal and result.optimal
        solved.sort(key=lambda s: s.split.objective_seconds)
        # a run of devices may be as good or better elsewhere than where the program puts it
        bound = min([bound, *(s.split.objective_seconds for s in solved)])
        return OptionResult(option, tuple(solved[: TUNING.keep]), max(bound, floor), True, optimal)

    def _solve_problem(
        self, space: Space, problem: LayerProblem, deadline: float, cutoff: float
    ) -> Bisected[StageSplit]:
        solve = partial(
            solve_dp,
            geometry=space.geometry,
            keep=TUNING.keep,
            relative_gap=TUNING.gap,
            deadline=deadline,
            cutoff_seconds=cutoff,
        )
        result = solve(problem)
        if problem.chunks == 1:
            return result
        fitting = tuple(split for split in result.pipelines if device_overflow(problem, split) <= 0)
        if fitting[:1] == result.pipelines[:1]:
            return replace(result, pipelines=fitting)
        # chunks that fit one by one overflow together: give each an equal share, and bound them together
        optimal = result.optimal
        if not fitting:
            kinds = tuple(replace(k, capacity_bytes=k.capacity_bytes / problem.chunks) for k in problem.kinds)
            strict = solve(replace(problem, kinds=kinds))
            fitting, optimal = strict.pipelines, optimal and strict.optimal
        most = min([cutoff / TUNING.slack, *(split.objective_seconds for split in fitting)])
        bound = result.bound_seconds
        if bound < most and not problem.pins:
            table = StageTable(problem, space.geometry)
            shared, met = together(problem, table, most, deadline)
            bound = max(bound, shared)
            fitting += tuple(split for split in met if device_overflow(problem, split) <= 0)
            fitting = tuple(sorted(fitting, key=lambda split: split.objective_seconds)[: TUNING.keep])
            bound = min([bound, *(split.objective_seconds for split in fitting)])
        return replace(result, pipelines=fitting, bound_seconds=bound, optimal=optimal)

    def lower_bound_seconds(self) -> float:
        """Lower bound on the simulated step of any plan of whole ops, in the micro-batch counts of the options."""
        devices = [self.table.representatives[row] for row in self.table.row_of]
        bounds = {}
        for m in {option.microbatches for option in self.options}:
            bounds[m] = whole_ops_bound(self.model.smallest_times(self.batch_size, m, devices), m)
        return min(bounds.values())


def solve_dp(
    problem: LayerProblem,
    *,
    geometry: Geometry | None = None,
    keep: int = 8,
    relative_gap: float = 1e-10,
    deadline: float = math.inf,
    cutoff_seconds: float = math.inf,
) -> Bisected[StageSplit]:
    """Find the best split by the surrogate, and up to ``keep`` good ones of other bottlenecks and stage counts.

    The other arguments are those of ``Bisection``: bottlenecks are bisected over ``CutProgram``.
    """
    table = StageTable(problem, geometry or Geometry(problem.structure))
    problems = [problem]
    if problem.pins:
        # a pin counts stages from the front, the program counts from the end: one search per number of stages
        first = max(problem.stage_counts[0], max(problem.pins.values()) + 1)
        problems = [replace(problem, stage_counts=(p, p)) for p in range(first, problem.max_stages + 1)]
    results: list[Bisected[StageSplit]] = []
    for each in problems:
        if each.max_stages < each.stage_counts[0]:
            results.append(Bisected((), math.inf, True, 0))
            continue
        bisection = Bisection(
            CutProgram(each, table),
            keep=keep,
            relative_gap=relative_gap,
            deadline=deadline,
            cutoff_seconds=cutoff_seconds,
        )
        results.append(bisection.run())
        best = min((r.pipelines[0].objective_seconds for r in results if r.pipelines), default=math.inf)
        cutoff_seconds = min(cutoff_seconds, best * (1 + 1e-9)) if keep == 1 else cutoff_seconds
    splits = sorted((s for r in results for s in r.pipelines), key=lambda s: s.objective_seconds)
    bound = min((r.bound_seconds for r in results), default=math.inf)
    return Bisected(
        tuple(splits[:keep]), bound, all(r.optimal for r in results), sum(r.thresholds for r in results)
    )


def busiest_seconds(search: LayerSearch, solved: SolvedSplit) -> float:
    """Compute seconds of the busiest rank in one step: no simulation of the candidate is below it.

    Counted at the smallest micro-batch, because the last ones may be smaller; in proportion to the largest one's, as
    simulated.
    """
    m = solved.option.microbatches
    size = solved.option.size(search.batch_size)
    stages = solved.stages
    busy = np.zeros(len(search.cluster.devices))
    for stage, rank in enumerate(solved.ranks):
        device = search.table.device(rank)
        busy[rank] += float(search.model.seconds(size, device)[stages == stage].sum())
    return m * smallest_share(search.batch_size, m) * float(busy.max())


def device_overflow(problem: LayerProblem, split: StageSplit) -> float:
    """Bytes that do not fit the fullest device when all its chunks are counted together."""
    used = split.bytes_on(split.kinds, len(problem.kinds))
    room = np.array([kind.capacity_bytes * (1 + TUNING.memory_tolerance) for kind in problem.kinds])
    return float((used - room).max())


def _first_devices(problem: LayerProblem, split: StageSplit) -> StageSplit:
    """The same split on the first devices of a run of identical ones (the program counts from the end), if
    as good."""
    identical = len({(kind.row, kind.capacity_bytes) for kind in problem.kinds}) == 1
    if problem.assignment != "sequence" or problem.chunks > 1 or not identical:
        return split
    moved = evaluate(problem, split.stage_of, problem.sequence[: split.stages], split.recomputed)
    return moved if moved.objective_seconds <= split.objective_seconds * (1 + 1e-9) else split
