"""The feature-wise search: on which mesh, in how many micro-batches, and how every op and parameter is sharded.

    OpGraph ─► units and wires (equal blocks once) ─► for every mesh × micro-batch count: numbers, bound, program
            ─► the cheapest that fits, evaluated anew on the whole graph ─► placement with its certificate

Objective, in seconds per step, without overlap:

    micro-batches · (Σ ops on local shapes + Σ bridges forward and backward) + Σ parameters (summing gradients once, the
    update, gathering what was updated)
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, UsageError
from cost_models.layout import Mesh, Replicate
from cost_models.precision import Precision
from cost_models.units import format_bytes
from passes.certificate import Certificate, relative_gap
from passes.costs import GraphCosts
from passes.feature_evaluate import FeatureCost, evaluate
from passes.feature_graph import Chooser, FeatureGraph, Unit, feature_graph
from passes.feature_meshes import meshes
from passes.feature_options import Options
from passes.feature_pins import allowed_by_pin, resolve
from passes.feature_problem import FeatureProblem, Setting, build_problem, links_of
from passes.feature_solve import Solved, solve_problem
from passes.graph import OpGraph
from passes.least_samples import least_samples
from passes.shard_rules import choices as rule_choices
from passes.sharding import Choice, FeaturePlacement, Placements

log = logging.getLogger("partitioner")

OBJECTIVE = "microbatches * (op seconds + bridge seconds) + parameter seconds, nothing overlapped"
AGREEMENT = 1e-6
"""How far, relatively, the search's objective and its evaluation on the whole graph may differ."""


@dataclass(frozen=True)
class FeatureRequest:
    """What the user fixed. ``mesh``: its shape; None to search it. ``pins``: see ``passes.feature_pins``."""

    batch_size: int
    microbatches: int | Literal["auto"] = "auto"
    optimizer: str = "adamw"
    precision: Precision = field(default_factory=Precision)
    pins: Mapping[str, str] = field(default_factory=dict)
    mesh: tuple[int, ...] | None = None
    max_axes: int = 2
    time_limit_seconds: float | None = None


@dataclass(frozen=True)
class Tried:
    """One mesh and micro-batch count. ``status`` as in ``passes.feature_solve``; ``seconds`` is infinite where nothing
    better than the best before was found."""

    shape: tuple[int, ...]
    microbatches: int
    status: str
    seconds: float
    bound_seconds: float
    search_seconds: float


@dataclass(frozen=True, eq=False)
class FeatureResult:
    """The chosen placement, what it costs, how sure that is, and what else was looked at."""

    placement: FeaturePlacement
    cost: FeatureCost
    certificate: Certificate
    tried: tuple[Tried, ...]
    replicated_matmul_share: float
    """Of the FLOPs of matrix products, convolutions and attention: those of ops that an axis or more does not split."""
    unruled: tuple[str, ...]
    """Ops that only one way is known of, replicated, on shapes that have more."""
    problem: FeatureProblem = field(repr=False)
    options: tuple[int, ...] = field(repr=False)


def place_features(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    request: FeatureRequest,
    choices: Chooser = rule_choices,
) -> FeatureResult:
    """Search all meshes and micro-batch counts; raises ``UsageError`` for what cannot hold, ``InfeasibleError`` where
    nothing fits."""
    started = time.perf_counter()
    limit = request.time_limit_seconds
    deadline = started + limit if limit is not None else math.inf
    pins = resolve(graph, request.pins)
    space = feature_graph(graph, costs, choices, pins)
    setting = Setting(cluster, request.batch_size, request.optimizer, request.precision)
    search = _Search(space, setting, pins, deadline)
    counts = _counts(graph, request)
    best = search.run(meshes(cluster, request.max_axes, request.mesh), counts)
    if best is None:
        raise search.failure(request)
    problem, solved = best
    assert solved.options is not None
    placement = assemble(problem, solved.options)
    cost = evaluate(graph, costs, placement, problem.bridges.links, setting)
    _check(cost.seconds, solved)
    log.info("feature search: %d problems in %.2f s", len(search.tried), time.perf_counter() - started)
    return FeatureResult(
        placement,
        cost,
        _certificate(search, cost, solved, request, time.perf_counter() - started),
        tuple(search.tried),
        replicated_share(problem, solved.options),
        tuple(u.name for u in space.units if u.kind == "op" and len(u.choices) == 1 and u.operands),
        problem,
        solved.options,
    )


def _check(seconds: float, solved: Solved) -> None:
    """The search's classes and tables against the sum over the whole graph."""
    if abs(seconds - solved.seconds) > AGREEMENT * max(seconds, solved.seconds):
        raise AssertionError(
            f"the search's objective {solved.seconds} s is not the {seconds} s of the whole graph"
        )


def _counts(graph: OpGraph, request: FeatureRequest) -> list[int]:
    """Micro-batch counts: divisors of the batch size, so that all micro-batches are alike, fewest first."""
    least, reason = least_samples(graph)
    size = request.batch_size
    wanted = range(1, size + 1) if request.microbatches == "auto" else [request.microbatches]
    counts = [m for m in wanted if m >= 1 and size % m == 0 and size // m >= least]
    if not counts:
        raise UsageError(
            f"cannot train {graph.model_name} on {size} samples in {request.microbatches} micro-batches",
            [
                f"a micro-batch has the same whole number of samples as the others, at least {least} ({reason})"
            ],
        )
    return counts


class _Search:
    """All meshes and micro-batch counts, best bound first."""

    def __init__(
        self, space: FeatureGraph, setting: Setting, pins: Mapping[str, str], deadline: float
    ) -> None:
        self.space, self.setting, self.pins, self.deadline = space, setting, pins, deadline
        self.tried: list[Tried] = []
        self.best: tuple[FeatureProblem, Solved] | None = None
        self.unpinned = 0
        """Meshes on which the pins leave every unit an option."""
        self.least_bytes = math.inf

    @property
    def known_seconds(self) -> float:
        return math.inf if self.best is None else self.best[1].seconds

    def run(self, shapes: Sequence[Mesh], counts: Sequence[int]) -> tuple[FeatureProblem, Solved] | None:
        for mesh in shapes:
            links = links_of(mesh, self.setting.cluster)
            for count in counts:
                if self.best is not None and time.perf_counter() > self.deadline:
                    self._skip(mesh, count)
                    break
                if not self._solve(mesh, links, count):
                    break
        return self.best

    def _skip(self, mesh: Mesh, count: int) -> None:
        self.tried.append(Tried(mesh.shape, count, "time limit", math.inf, 0.0, 0.0))

    def _solve(self, mesh: Mesh, links: tuple, count: int) -> bool:  # type: ignore[type-arg]
        """Returns whether more micro-batches on this mesh could be better."""
        started = time.perf_counter()
        problem = self._pinned(build_problem(self.space, mesh, links, count, self.setting))
        if any(not len(unit.seconds) for unit in problem.units):
            return False
        self.unpinned += 1
        solved = solve_problem(problem, self.known_seconds, self.deadline)
        self.tried.append(
            Tried(
                mesh.shape,
                count,
                solved.status,
                solved.seconds,
                solved.bound_seconds,
                time.perf_counter() - started,
            )
        )
        self.least_bytes = min(self.least_bytes, solved.least_bytes)
        if solved.options is not None:
            self.best = problem, solved
        # More micro-batches cost no less (docs/06c-feature-wise.md) but save memory: worth it only where that is short.
        return solved.short_of_memory and solved.free_bound_seconds < self.known_seconds

    def _pinned(self, problem: FeatureProblem) -> FeatureProblem:
        if not self.pins:
            return problem
        units = list(problem.units)
        axes = len(problem.mesh.shape)
        for u, unit in enumerate(self.space.units):
            layout = self.pins.get(unit.name)
            if layout is not None:
                units[u] = units[u].keep(allowed_by_pin(unit, units[u], layout, axes))
        return replace(problem, units=tuple(units))

    def failure(self, request: FeatureRequest) -> Exception:
        if not self.unpinned:
            return UsageError(
                "no mesh allows these pins",
                ["on every mesh some pinned tensor has no such layout, or does not divide"],
                ["a layout names one placement per mesh axis; give mesh= to fix their number"],
            )
        capacity = min(device.memory_bytes for device in self.setting.cluster.devices)
        return InfeasibleError(
            f"{self.space.graph.model_name} does not fit feature-wise on {self.setting.cluster.name}",
            [
                f"the smallest sharding found needs {format_bytes(self.least_bytes)} on a device of "
                f"{format_bytes(capacity)}"
            ],
            ["a smaller batch, more devices, an optimizer with less state, or the layer-wise strategy"],
        )


def assemble(problem: FeatureProblem, options: Sequence[int]) -> FeaturePlacement:
    """The placement that one option per unit (indices into ``detail``) says."""
    graph = problem.space.graph
    ops: dict[str, tuple[Choice, ...]] = {}
    stored: dict[str, Placements] = {}
    state: dict[str, Placements] = {}
    batch: dict[str, Placements] = {}
    for unit, numbers, option in zip(problem.space.units, problem.units, options, strict=True):
        detail = numbers.detail
        if unit.kind == "output":
            continue
        if isinstance(detail, Options):
            per_axis = detail.per_axis(option)
            if unit.kind == "op":
                ops |= dict.fromkeys(unit.members, per_axis)
                continue
            layout = tuple(choice.outputs[0] for choice in per_axis)
            target = batch if unit.kind == "batch" else stored
            target |= {graph.input_of[node].name: layout for node in unit.members}
            continue
        kept = tuple(choice.stored for choice in detail[option])
        owned = tuple(choice.state for choice in detail[option])
        for node in unit.members:
            name = graph.input_of[node].name
            stored[name] = kept
            if owned != kept:
                state[name] = owned
    order = {node.name: i for i, node in enumerate(graph.ops)}
    ops = dict(sorted(ops.items(), key=lambda item: order[item[0]]))
    whole = (Replicate(),) * len(problem.mesh.shape)
    for given in graph.inputs:
        if given.kind == "batch":
            batch.setdefault(given.name, whole)
        elif given.kind in ("parameter", "buffer"):
            stored.setdefault(given.name, whole)
    return FeaturePlacement(problem.mesh, ops, stored, batch, problem.microbatches, state)


def replicated_share(problem: FeatureProblem, options: Sequence[int]) -> float:
    """Share of the FLOPs of matrix products, convolutions and attention in ops that some axis does not split."""
    costs = problem.space.costs.exact(problem.samples)
    table = costs.at(problem.samples)
    flops = table.forward_flops + table.backward_input_flops + table.backward_weight_flops
    ranks = math.prod(problem.mesh.shape)
    total = whole = 0.0
    for unit, numbers, option in zip(problem.space.units, problem.units, options, strict=True):
        if unit.kind != "op" or not isinstance(numbers.detail, Options):
            continue
        index = problem.space.op_index[unit.name]
        if costs.op_class(index) == "memory":
            continue
        own = float(flops[index]) * len(unit.members)
        total += own
        whole += own if numbers.detail.work_share[option] > 1.001 / ranks else 0.0
    return whole / total if total else 0.0


def _certificate(
    search: _Search, cost: FeatureCost, solved: Solved, request: FeatureRequest, seconds: float
) -> Certificate:
    """About all meshes and micro-batch counts of the search together."""
    bound = min([cost.seconds, *(t.bound_seconds for t in search.tried if t.status != "infeasible")])
    gap = relative_gap(cost.seconds, bound)
    optimal = all(t.status != "time limit" for t in search.tried)
    assert search.best is not None
    problem = search.best[0]
    shapes = dict.fromkeys(t.shape for t in search.tried)
    least = sum(float(np.min(u.seconds)) for u in problem.units)
    text = ", ".join("×".join(map(str, shape)) for shape in shapes)
    return Certificate(
        objective=OBJECTIVE,
        objective_seconds=cost.seconds,
        bound_seconds=bound,
        gap=gap,
        simulated_lower_bound_seconds=min(least, bound),
        space=(
            f"every choice of the rules for every op and parameter, equal blocks alike; meshes {text}; "
            f"micro-batches that divide {request.batch_size}; memory counted per device"
        ),
        method="dual ascent, then integer program over what it leaves",
        solver_status="optimal" if optimal else "time limit",
        search_seconds=seconds,
    )


@dataclass(frozen=True)
class OtherLayout:
    """A layout that an op, parameter or batch leaf could have had, with everything else left as it is."""

    layout: str
    step_seconds: float
    memory_bytes: float
    chosen: bool


def explain(result: FeatureResult, name: str) -> tuple[OtherLayout, ...]:
    """Every layout that ``name`` could have had, cheapest first; what else was chosen is fixed, equal ops change alike."""
    from passes.feature_bound import price, wire_tables

    problem = result.problem
    unit = next((u for u in problem.space.units if _is_named(problem, u, name)), None)
    if unit is None:
        raise UsageError(f"there is no op, parameter or batch leaf {name!r} to explain")
    tables = wire_tables(problem)
    chosen = [n.index.tolist().index(k) for n, k in zip(problem.units, result.options, strict=True)]
    found = []
    own = problem.units[unit.index]
    for k in range(len(own.seconds)):
        other = [*chosen[: unit.index], k, *chosen[unit.index + 1 :]]
        cost = price(problem, tables, other)
        found.append(
            OtherLayout(
                _words(own.detail, int(own.index[k])), cost.seconds, cost.bytes, k == chosen[unit.index]
            )
        )
    return tuple(sorted(found, key=lambda o: (o.step_seconds, not o.chosen, o.layout)))


def _is_named(problem: FeatureProblem, unit: Unit, name: str) -> bool:
    inputs = problem.space.graph.input_of
    return any(
        member == name or (member in inputs and inputs[member].name == name) for member in unit.members
    )


def _words(detail: object, option: int) -> str:
    if isinstance(detail, Options):
        return " | ".join(map(str, detail.per_axis(option)))
    assert isinstance(detail, tuple)
    return " | ".join(str(choice) for choice in detail[option])
