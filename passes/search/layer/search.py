"""Solve the surrogate for every option of a request, the promising ones first, and keep the best splits of each."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cost_models.cluster import ClusterSpec
from cost_models.devices import Device
from passes.search.bound import simulated_lower_bound
from passes.search.layer.dp import DpResult, solve_dp
from passes.search.layer.options import (
    DevicePlan,
    DeviceTable,
    Numbers,
    Option,
    RecomputeMode,
    device_plan,
    layer_problem,
    numbers,
)
from passes.search.layer.problem import LayerProblem, Split, evaluate
from passes.search.layer.spaces import Space
from passes.search.layer.tuning import TUNING
from passes.search.model import LayerModel, smallest_share
from passes.search.touches import FloatArray
from runtime.schedules import SCHEDULES


@dataclass(frozen=True, eq=False)
class Solved:
    """A split of one option over one space."""

    option: Option
    space: Space
    problem: LayerProblem
    split: Split
    ranks: tuple[int, ...]
    """Rank of each stage."""
    cautious: bool = False
    """Found with slower links than there are."""


@dataclass(frozen=True, eq=False)
class OptionResult:
    """The result of one option. No split of its space is below ``bound_seconds``."""

    option: Option
    solved: tuple[Solved, ...]
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
    options: Sequence[Option]
    min_stages: int = 1
    """Devices with a stage, at least."""
    recompute: RecomputeMode = "none"
    _numbers: dict[tuple[int, int], Numbers] = field(default_factory=dict)
    _op_seconds: dict[tuple[int, Device], FloatArray] = field(default_factory=dict)
    _plans: dict[tuple[int, bool], DevicePlan] = field(default_factory=dict)

    def numbers(self, space: int, size: int) -> Numbers:
        """Costs over the units of a space, cached."""
        key = (space, size)
        if key not in self._numbers:
            self._numbers[key] = numbers(self.model, self.spaces[space], self.table, size)
        return self._numbers[key]

    @property
    def stage_counts(self) -> tuple[int, int]:
        """Fewest and most."""
        return self.min_stages, self.max_stages

    def plan(self, option: Option) -> DevicePlan:
        """The ways in which the option may hand out devices, cached."""
        key = (option.chunks, SCHEDULES[option.schedule].folded)
        if key not in self._plans:
            self._plans[key] = device_plan(self.cluster, self.table, *key, self.max_stages)
        return self._plans[key]

    def problem(self, space: int, option: Option, capacity_scale: float = 1.0) -> LayerProblem | None:
        """The option as numbers; None if it cannot be used on this cluster."""
        costs = self.numbers(space, option.size(self.batch_size))
        return layer_problem(
            self.spaces[space],
            costs,
            self.plan(option),
            option,
            self.pins,
            self.stage_counts,
            capacity_scale,
            self.recompute,
        )

    def fastest_seconds(self, size: int) -> FloatArray:
        """[n ops] forward + backward seconds on the fastest device for each."""
        return np.asarray(np.minimum.reduce([self.op_seconds(size, d) for d in self.table.representatives]))

    def op_seconds(self, size: int, device: Device) -> FloatArray:
        """[n ops] forward + backward seconds on ``device``, cached."""
        key = (size, device)
        if key not in self._op_seconds:
            self._op_seconds[key] = self.model.seconds(size, device)
        return self._op_seconds[key]

    def floor_seconds(self, option: Option) -> float:
        """A quick bound on the option's surrogate: equal shares of the work, or the heaviest op."""
        size = option.size(self.batch_size)
        fastest = self.fastest_seconds(size)
        work, world = float(fastest.sum()), len(self.cluster.devices)
        bottleneck = max(work / (world * option.chunks), float(fastest.max()))
        return option.fill * work + (option.microbatches - option.fill) * option.chunks * bottleneck

    def solve(self, deadline: float, capacity_scale: float = 1.0) -> list[OptionResult]:
        """Best splits of every option that may still matter, by rising bound."""
        queue = sorted((self.floor_seconds(option), index) for index, option in enumerate(self.options))
        best = math.inf
        results = []
        for floor, index in queue:
            option = self.options[index]
            late = time.perf_counter() > deadline and math.isfinite(best)
            if floor > best * TUNING.slack or late:
                results.append(OptionResult(option, (), floor, False, not late))
                continue
            result = self._solve_option(option, floor, deadline, best * TUNING.slack, capacity_scale)
            results.append(result)
            best = min([best, *(s.split.objective_seconds for s in result.solved)])
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
            found = self._solve_problem(first.space, slower, deadline, math.inf).splits[:1]
            added = []
            for split in found:
                real = _first_devices(
                    first.problem, evaluate(first.problem, split.stage_of, split.kinds, split.recomputed)
                )
                ranks = self.plan(first.option).ranks_of(real.kinds, first.option.chunks)
                if all(real.stage_of != s.split.stage_of or ranks != s.ranks for s in known):
                    added.append(replace(first, split=real, ranks=ranks, cautious=True))
            results[index] = replace(results[index], solved=(*known, *added))

    def _solve_option(
        self, option: Option, floor: float, deadline: float, cutoff: float, capacity_scale: float
    ) -> OptionResult:
        solved: list[Solved] = []
        bound, optimal = math.inf, True
        for index, space in enumerate(self.spaces):
            problem = self.problem(index, option, capacity_scale)
            if problem is None:
                continue
            result = self._solve_problem(space, problem, deadline, cutoff)
            plan = self.plan(option)
            for split in result.splits:
                shifted = _first_devices(problem, split)
                ranks = plan.ranks_of(shifted.kinds, option.chunks)
                solved.append(Solved(option, space, problem, shifted, ranks))
            bound, optimal = min(bound, result.bound_seconds), optimal and result.optimal
        solved.sort(key=lambda s: s.split.objective_seconds)
        # a run of devices may be as good or better elsewhere than where the program puts it
        bound = min([bound, *(s.split.objective_seconds for s in solved)])
        return OptionResult(option, tuple(solved[: TUNING.keep]), max(bound, floor), True, optimal)

    def _solve_problem(self, space: Space, problem: LayerProblem, deadline: float, cutoff: float) -> DpResult:
        def run(candidate: LayerProblem) -> DpResult:
            return solve_dp(
                candidate,
                geometry=space.geometry,
                keep=TUNING.keep,
                relative_gap=TUNING.gap,
                deadline=deadline,
                cutoff_seconds=cutoff,
            )

        result = run(problem)
        if problem.chunks == 1:
            return result
        fitting = tuple(split for split in result.splits if device_overflow(problem, split) <= 0)
        if fitting or not result.splits:
            return replace(result, splits=fitting)
        # chunks that fit one by one overflow together: give each an equal share, and keep the weaker
        # problem's bound
        kinds = tuple(replace(k, capacity_bytes=k.capacity_bytes / problem.chunks) for k in problem.kinds)
        strict = run(replace(problem, kinds=kinds))
        return replace(result, splits=strict.splits, optimal=result.optimal and strict.optimal)

    def lower_bound_seconds(self) -> float:
        """Seconds that no layer-wise plan of any option simulates below."""
        devices = [self.table.representatives[row] for row in self.table.row_of]
        bounds = {}
        for m in {option.microbatches for option in self.options}:
            bounds[m] = simulated_lower_bound(self.model.smallest_times(self.batch_size, m, devices), m)
        return min(bounds.values())


def busiest_seconds(search: LayerSearch, solved: Solved) -> float:
    """Compute seconds of the busiest rank in one step: no simulation of the candidate is below it.

    Counted at the smallest micro-batch, because the last ones may be smaller; in proportion to the largest one's, as
    simulated.
    """
    m = solved.option.microbatches
    size = solved.option.size(search.batch_size)
    stages = np.array(solved.split.stage_of)[solved.space.unit_of]
    busy = np.zeros(len(search.cluster.devices))
    for stage, rank in enumerate(solved.ranks):
        device = search.table.representatives[search.table.row_of[rank]]
        busy[rank] += float(search.op_seconds(size, device)[stages == stage].sum())
    return m * smallest_share(search.batch_size, m) * float(busy.max())


def device_overflow(problem: LayerProblem, split: Split) -> float:
    """Bytes that do not fit the fullest device when all its chunks are counted together."""
    used = np.zeros(len(problem.kinds))
    np.add.at(used, list(split.kinds), split.memory_bytes)
    room = np.array([kind.capacity_bytes * (1 + TUNING.memory_tolerance) for kind in problem.kinds])
    return float((used - room).max())


def _first_devices(problem: LayerProblem, split: Split) -> Split:
    """The same split on the first devices of a run of identical ones (the program counts from the end), if
    as good."""
    identical = len({(kind.row, kind.capacity_bytes) for kind in problem.kinds}) == 1
    if problem.assignment != "sequence" or problem.chunks > 1 or not identical:
        return split
    moved = evaluate(problem, split.stage_of, problem.sequence[: split.stages], split.recomputed)
    return moved if moved.objective_seconds <= split.objective_seconds * (1 + 1e-9) else split
