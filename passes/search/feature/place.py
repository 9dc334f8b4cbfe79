"""The feature-wise search: on which mesh, in how many micro-batches, and how every op and parameter is sharded.

    OpGraph ─► units and wires (equal blocks once) ─► for every mesh × micro-batch count: numbers, bound, program
            ─► the cheapest that fits, evaluated anew on the whole graph ─► placement with its proof

Objective, in seconds per step, sums of input gradients beside weight gradients:

    micro-batches · (Σ ops on local shapes + Σ bridges forward and backward) + Σ parameters (summing gradients once, the
    update, gathering what was updated)
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import ClassVar

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, InternalError, TimeLimitError, UsageError
from cost_models.layout import Mesh
from cost_models.units import counted
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.progress import report_found, report_option
from passes.search.certificate import relative_gap
from passes.search.feature.bound import price, wire_tables
from passes.search.feature.bridges import Bridges
from passes.search.feature.evaluate import FeatureCost, evaluate
from passes.search.feature.graph import FeatureGraph, Unit, space_of
from passes.search.feature.infeasible import does_not_fit, equal_counts, least_saved_bytes
from passes.search.feature.meshes import meshes, split_seconds
from passes.search.feature.options import UnitNumbers
from passes.search.feature.pins import Pin, resolve, restricted, unmet_of
from passes.search.feature.problem import FeatureProblem, build_problem
from passes.search.feature.result import SolvedPart, assemble, origins_of
from passes.search.feature.setting import PartPlace, Setting
from passes.search.feature.solve import ProblemSearch, Solved
from passes.search.feature.ties import with_split_batch
from passes.search.feature.tuning import TUNING
from passes.search.microbatches import may_cost_less
from passes.search.outcome import ChoiceOrigins, MeshTried
from passes.search.recomputed import Regions
from passes.search.request import Request
from passes.search.words import RecomputeMode, StrategyName
from passes.shard.discover import Discovery
from passes.shard.words import FeaturePlacement

log = logging.getLogger("partitioner")

OBJECTIVE = "microbatches * (op seconds + bridge seconds) + parameter seconds"


@dataclass(frozen=True)
class FeatureRequest(Request):
    """A sharding of every op over all devices is wanted. ``pins``: see ``passes.search.feature.pins``."""

    strategy: ClassVar[StrategyName] = "feature"

    pins: Mapping[str, str] = field(default_factory=dict)
    time_limit_seconds: float | None = 60.0
    mesh: tuple[int, ...] | None = None
    """The shape of the mesh; None to search it."""
    max_axes: int = 2
    reserved_bytes: float = 0.0
    """Memory of every device that is not to be planned with."""
    part: PartPlace | None = None
    """The place of the part of a model that is searched; None: a whole model, on the whole cluster."""
    recompute: RecomputeMode | None = None
    """All blocks are computed again in backward, or none; None as "auto": all where nothing fits otherwise."""


@dataclass(frozen=True, eq=False)
class MeshProof:
    """The meshes and numbers of micro-batches that were looked at, and the lower bound on any sharding on them."""

    tried: tuple[MeshTried, ...]
    space: str
    bound_seconds: float
    """Infinite where nothing fits."""
    late: bool
    """True where time ended a search that might have found something better."""


@dataclass(frozen=True, eq=False)
class FeatureResult:
    """The sharding that costs least by the search's own count, how sure that is, and what else was looked at."""

    placement: FeaturePlacement
    cost: FeatureCost
    proof: MeshProof
    origins: ChoiceOrigins
    problem: FeatureProblem = field(repr=False)
    options: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True, eq=False)
class MeshSurvey:
    """All meshes searched."""

    proof: MeshProof
    best: FeatureResult | None
    """None where nothing that fits is below what was known."""
    failure: InfeasibleError | TimeLimitError | None
    """The reason, where nothing is known to fit."""


def place_features(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    request: FeatureRequest,
    discovery: Discovery | None = None,
    again: Regions = (),
    pins: Mapping[str, Pin] | None = None,
) -> FeatureResult:
    """Return the cheapest sharding; as ``survey_meshes``. Raises InfeasibleError or TimeLimitError where there is none."""
    survey = survey_meshes(graph, costs, cluster, request, discovery, again, pins)
    if survey.failure is not None:
        raise survey.failure
    assert survey.best is not None
    return survey.best


def survey_meshes(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    request: FeatureRequest,
    discovery: Discovery | None = None,
    again: Regions = (),
    pins: Mapping[str, Pin] | None = None,
    known_seconds: float = math.inf,
    closely_seconds: float = math.inf,
) -> MeshSurvey:
    """Search all meshes and micro-batch counts, with the blocks of ``again`` computed again in backward.

    ``discovery``: where the choices of ops without a rule come from. ``pins``: the request's, where they are resolved.
    ``known_seconds``: only what costs less is looked for; ``closely_seconds``: only what may cost less than that is looked
    for with integer programs, beyond it the best of the quick steps will do. Raises ``UsageError`` for what cannot hold.
    """
    started = time.perf_counter()
    limit = request.time_limit_seconds
    deadline = started + limit if limit is not None else math.inf
    pins = resolve(graph, request.pins) if pins is None else pins
    discovery = discovery or Discovery()
    marks = {node: pin.mark for node, pin in pins.items()}
    space = space_of(graph, costs, discovery.choices, tuple(marks.items()), again)
    setting = Setting(cluster, request.job, request.reserved_bytes, again, request.part)
    search = _MeshSearch(space, setting, pins, deadline, known_seconds, closely_seconds)
    counts = equal_counts(graph, request.job.batch_size, request.microbatches)
    search.cheaper_in_pieces = may_cost_less(graph, request.microbatches)
    best = search.run(meshes(cluster, request.max_axes, request.mesh, request.part), counts)
    log.info("feature search: %d problems in %.2f s", len(search.tried), time.perf_counter() - started)
    if best is None:
        return MeshSurvey(search.proof(request), None, search.failure(request))
    problem, solved = best
    assert solved.options is not None
    options = with_split_batch(problem, solved.options)
    placement = assemble(problem, options)
    cost = evaluate(graph, costs, placement, setting)
    check_agreement(problem, options, cost, solved)
    proof = search.proof(request)
    origins = origins_of(discovery, [SolvedPart(problem, options, {})])
    return MeshSurvey(proof, FeatureResult(placement, cost, proof, origins, problem, options), None)


def check_agreement(
    problem: FeatureProblem, options: Sequence[int], cost: FeatureCost, solved: Solved
) -> None:
    """The search's classes and tables against the sum over the whole graph; what was found is not made dearer by ties.

    It may get cheaper where time ran out.
    """
    chosen = [u.index == option for u, option in zip(problem.units, options, strict=True)]
    alone = problem.keep(chosen)
    seconds = price(alone, wire_tables(alone), [0] * len(alone.units)).seconds
    off = TUNING.agreement * max(cost.seconds, seconds)
    if abs(cost.seconds - seconds) > off or seconds > solved.seconds + off:
        raise InternalError(
            "feature search: its objective is not what the whole graph costs",
            [
                f"{cost.seconds!r} s of every op, bridge and parameter: {cost}",
                f"{seconds!r} s by its tables, {solved.seconds!r} s as its solver left it ({solved.status})",
                f"mesh {'×'.join(map(str, problem.mesh.shape))}, {problem.microbatches} micro-batches",
            ],
            ["another mesh=, and a report with the model"],
        )


@dataclass(eq=False)
class _MeshTrial:
    """A mesh and a micro-batch count."""

    mesh: Mesh
    bridges: Bridges
    """Bridges of the mesh: shared by its trials."""
    counts: Sequence[int]
    """This count, then larger ones."""
    floor_seconds: float
    """Seconds that it costs at least, known before it is begun."""
    search: ProblemSearch | None = None
    seconds: float = 0.0
    """Spent on it."""

    def __str__(self) -> str:
        return f"mesh {'×'.join(map(str, self.mesh.shape))}, {counted(self.counts[0], 'micro-batch')}"

    @property
    def bound(self) -> float:
        return self.floor_seconds if self.search is None else self.search.bound


class _MeshSearch:
    """All meshes and micro-batch counts, always on with what has the lowest bound."""

    def __init__(
        self, space: FeatureGraph, setting: Setting, pins: Mapping[str, Pin], deadline: float,
        cutoff_seconds: float = math.inf, closely_seconds: float = math.inf,
    ) -> None:  # fmt: skip
        self.cutoff_seconds, self.closely_seconds = cutoff_seconds, closely_seconds
        self.space, self.setting, self.pins, self.deadline = space, setting, pins, deadline
        self.tried: list[MeshTried] = []
        self.best: tuple[FeatureProblem, Solved] | None = None
        self.open: list[tuple[float, int, _MeshTrial]] = []
        self.started = 0
        self._order = itertools.count()
        self.broken: dict[tuple[int, ...], list[str]] = {}
        """Per shape of mesh, the pins that it does not allow."""
        self.least_bytes = math.inf
        self.cheaper_in_pieces = False
        """Several micro-batches may take less than one."""

    @cached_property
    def _floor_seconds(self) -> float:
        """Lower bound on any sharding: its equal share of all ops, on the fastest kind of device."""
        if self.cheaper_in_pieces:
            return 0.0
        setting = self.setting
        work = self.space.costs.least_work_seconds(setting.job.batch_size, setting.devices)
        return work / len(setting.sharing)

    @property
    def known_seconds(self) -> float:
        return self.cutoff_seconds if self.best is None else self.best[1].seconds

    def run(self, shapes: Sequence[Mesh], counts: Sequence[int]) -> tuple[FeatureProblem, Solved] | None:
        for mesh in shapes:
            bridges = Bridges(mesh.shape, self.setting.links(mesh))
            self._push(_MeshTrial(mesh, bridges, counts, self._floor_seconds))
        while self.open:
            _, _, trial = heapq.heappop(self.open)
            solved = sum(math.isfinite(t.seconds) for t in self.tried)
            report_option(trial, trial.bound, solved, len(self.tried))
            late = self.known_seconds < math.inf and time.perf_counter() > self.deadline
            began = time.perf_counter()
            search = trial.search
            if search is None:
                self._begin(trial, late)
            elif late:
                search.out_of_time = True
                self._close(trial, search)
            elif search.is_over(self.known_seconds) or search.will_do(self.closely_seconds):
                self._close(trial, search)
            else:
                search.advance(self.known_seconds, self.deadline)
                self._note(trial, search)
                trial.seconds += time.perf_counter() - began
                self._push(trial)
        return self.best

    def _push(self, trial: _MeshTrial) -> None:
        heapq.heappush(self.open, (trial.bound, next(self._order), trial))

    def _begin(self, trial: _MeshTrial, late: bool) -> None:
        """Make the problem, unless it is plain already that it has nothing to give."""
        began = time.perf_counter()
        shape, count = trial.mesh.shape, trial.counts[0]
        if trial.floor_seconds >= self.known_seconds or late:
            status = "time limit" if late and trial.floor_seconds < self.known_seconds else "bounded"
            self.tried.append(MeshTried(shape, count, status, math.inf, trial.floor_seconds, 0.0))
            return
        least = least_saved_bytes(self.space, math.prod(shape), self.setting.job.batch_size // count)
        if least > self.setting.capacity_bytes(trial.mesh):
            self.started += 1
            self.least_bytes = min(self.least_bytes, least)
            self.tried.append(MeshTried(shape, count, "infeasible", math.inf, math.inf, 0.0))
            self._more_microbatches(trial, trial.floor_seconds)
            return
        floor = 0.0 if self.cheaper_in_pieces else split_seconds(self.space, self.setting, shape, count)
        if floor >= self.known_seconds:
            self.tried.append(MeshTried(shape, count, "bounded", math.inf, floor, 0.0))
            return
        problem = build_problem(
            self.space,
            trial.mesh,
            count,
            self.setting,
            trial.bridges,
            partial(self._restrict, len(shape)) if self.pins else None,
        )
        units = list(zip(self.space.units, problem.units, strict=True))
        wrong = unmet_of(units, self.pins, len(shape)).problems
        if wrong:
            self.broken[shape] = wrong
        else:
            self.started += 1
            trial.search = ProblemSearch(problem)
            trial.seconds = time.perf_counter() - began
            self._push(trial)
            self._note(trial, trial.search)

    def _note(self, trial: _MeshTrial, search: ProblemSearch) -> None:
        """Keep its better choice, if any: all trials know it at once."""
        self.least_bytes = min(self.least_bytes, search.least_bytes)
        if search.best is not None and search.best[0].seconds < self.known_seconds:
            self.best = search.problem, search.result(self.known_seconds)
            report_found(self.known_seconds)
        # More micro-batches cost no less (docs/06c-feature-wise.md) but save memory: tried only where that is short.
        if self.cheaper_in_pieces:
            self._more_microbatches(trial, 0.0)
        elif search.short_of_memory or not search.possible:
            self._more_microbatches(trial, search.free_bound)

    def _more_microbatches(self, trial: _MeshTrial, floor_seconds: float) -> None:
        if len(trial.counts) > 1:
            self._push(_MeshTrial(trial.mesh, trial.bridges, trial.counts[1:], floor_seconds))
            trial.counts = trial.counts[:1]

    def _close(self, trial: _MeshTrial, search: ProblemSearch) -> None:
        mine = self.best is not None and self.best[0] is search.problem
        if mine:
            self.best = search.problem, search.result(math.inf)
        solved = search.result(math.inf if mine else self.known_seconds)
        self.tried.append(
            MeshTried(
                trial.mesh.shape,
                search.problem.microbatches,
                solved.status,
                solved.seconds,
                max(solved.bound_seconds, min(trial.floor_seconds, solved.seconds)),
                trial.seconds,
            )
        )

    def _restrict(self, axes: int, unit: Unit, numbers: UnitNumbers) -> UnitNumbers:
        pin = self.pins.get(unit.name)
        return numbers if pin is None else restricted(unit, numbers, pin, axes)

    def proof(self, request: FeatureRequest) -> MeshProof:
        """Return what is proved about all meshes and micro-batch counts together."""
        possible = [t.bound_seconds for t in self.tried if t.status != "infeasible"]
        best = [] if self.best is None else [self.best[1].seconds]
        bound = min([*best, *possible], default=math.inf)
        text = ", ".join("×".join(map(str, shape)) for shape in dict.fromkeys(t.shape for t in self.tried))
        again = "; all blocks computed again in backward" if self.setting.again else ""
        space = (
            f"every choice of the rules for every op and parameter, equal blocks alike; meshes {text}; "
            f"micro-batches that divide {request.job.batch_size}; memory counted per device{again}"
        )
        proved = relative_gap(self.known_seconds, bound) < TUNING.proved
        late = any(t.status == "time limit" for t in self.tried) and not proved
        return MeshProof(tuple(self.tried), space, bound, late)

    def failure(self, request: FeatureRequest) -> InfeasibleError | TimeLimitError | None:
        """Return the reason why nothing is known to fit; None where something does, though not below what is known.

        Raises ``UsageError`` where no mesh allows the pins.
        """
        if not self.started and self.broken:
            raise UsageError(
                "no mesh allows these pins",
                [
                    f"on a mesh of {'×'.join(map(str, shape))}: {problem}"
                    for shape, problems in self.broken.items()
                    for problem in problems[:3]
                ],
                [
                    "a layout names one placement per mesh axis; mesh= fixes their number",
                    '"S0?" holds where it can',
                ],
            )
        if any(t.status == "bounded" for t in self.tried):
            return None
        if any(t.status == "time limit" for t in self.tried):
            return TimeLimitError(
                f"no sharding that fits was found within {request.time_limit_seconds:g} s",
                ["some meshes were not searched to the end"],
                ["more time, or a fixed mesh="],
            )
        most = max((tried.microbatches for tried in self.tried), default=1)
        return does_not_fit(self.space, self.setting, self.least_bytes, most)
