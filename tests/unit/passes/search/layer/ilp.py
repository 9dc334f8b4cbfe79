"""The layer-wise problem as an integer linear program: an oracle that the dynamic program is tested against.

An independent formulation, by units instead of cuts; k counts stages from the end.

    z[u,k] ∈ {0,1}      unit u is in stage k
    y[u,k]              = Σ_{k' ≥ k} z[u,k']: the unit is in stage k or before it
    a[k,d] ∈ {0,1}      stage k runs on kind d
    used[k]             = Σ_d a[k,d], without gaps
    y[u,k] ≥ y[v,k]     for every edge u → v: each cut is a downset
    c[i,k]              crossing i passes the cut into stage k:  c[i,k] ≥ y[producer,k+1] - y[reader,k+1]
    h[i,k]              stage k holds storage i:
                        h[i,k] ≥ z[saver,k], z[reader,k] - z[producer,k], z[producer,k] - z[reader,k]
    t[k]                its seconds of work:  t[k] ≥ Σ_u seconds[d,u]·z[u,k] - M(1 - a[k,d])
    x[k]                seconds of sending into it:  x[k] ≥ link(d,e) - M(2 - a[k+1,d] - a[k,e])
    T                   the bottleneck:  T ≥ t[k], x[k], r[k]
                        and, where stages alternate, T ≥ t[k] + later[k] + earlier[k-1]
    o[k] ∈ {0,1}        cut k is charged to its later or its earlier stage:
                        later[k] ≥ x[k] - M·o[k],  earlier[k] ≥ x[k] - M(1 - o[k])
    g[k] ∈ {0,1}        stage k computes its blocks again: t[k] grows by their second forward, and its memory is that of
                        h'[i,k] (as h, over ``structure.recomputed``) and f[k]
    e[k], f[k]          what it holds while its backward runs: e[k] ≥ beside[u]·z[u,k] - Σ_{v > u} freed[v]·z[v,k]
    minimize            fill·Σ(t + x) + (m - fill)·v·T
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pulp

from cost_models.arrays import FloatArray
from passes.search.ilp import IntegerProgram, Variable
from passes.search.layer.problem import LayerProblem, StageSplit, Working, evaluate
from passes.search.touches import Touch


@dataclass(frozen=True)
class IlpResult:
    """``status``: "optimal", "feasible" (time ran out), "infeasible" or "unknown". No split is below
    ``bound_seconds``."""

    split: StageSplit | None
    status: str
    bound_seconds: float
    solver: str


def solve_ilp(problem: LayerProblem, time_limit_seconds: float = 60.0) -> IlpResult:
    """Return the best split over all downsets of the DAG (over the prefixes if the structure names no downsets)."""
    model = _Model(problem)
    found = model.program.solve(time_limit_seconds, 0.0, absolute_gap=0.0, presolve=True)
    if found.values is None:
        bound = math.inf if found.status == "infeasible" else model.floor_seconds()
        return IlpResult(None, found.status, bound, found.solver)
    stage_of, kinds = model.solution(found.values)
    split = evaluate(problem, stage_of, kinds)
    bound = split.objective_seconds
    if found.status == "feasible":
        bound = max(found.bound * model.time_scale, model.floor_seconds())
    return IlpResult(split, found.status, min(bound, split.objective_seconds), found.solver)


class _Model:
    """The program of one problem. Seconds and bytes are scaled to about 1, where solvers' tolerances are
    meant."""

    def __init__(self, problem: LayerProblem) -> None:
        self.problem = problem
        self.units, self.stages, self.kinds = problem.structure.units, problem.max_stages, len(problem.kinds)
        self.time_scale = float(problem.seconds.max()) or 1.0
        sizes = float((problem.forward_bytes + problem.gradient_bytes).sum())
        link = float((problem.link_latency_seconds + problem.link_seconds_per_byte * sizes).max())
        second = 0.0 if problem.recompute is None else float(problem.recompute.seconds.max(axis=0).sum())
        self._longest = (
            float(problem.seconds.max(axis=0).sum()) + second + link * self.stages
        ) / self.time_scale
        self.byte_scale = (
            float(max(sum(problem.storage_bytes), sum(problem.state_bytes), sum(problem.gradient_bytes)))
            or 1.0
        )
        self.program = IntegerProgram("layers")
        self.steps = range(1, self.stages + 1)
        binary, real = self._binary, self._real
        self.z = {(u, k): binary(f"z_{u}_{k}") for u in range(self.units) for k in self.steps}
        self.a = {(k, d): binary(f"a_{k}_{d}") for k in self.steps for d in range(self.kinds)}
        self.used = {k: pulp.lpSum(self.a[k, d] for d in range(self.kinds)) for k in self.steps}
        self.t = {k: real(f"t_{k}") for k in self.steps}
        self.x = {k: real(f"x_{k}") for k in self.steps}
        self.bottleneck = real("T")
        self.program.minimize(
            problem.fill * pulp.lpSum([*self.t.values(), *self.x.values()])
            + problem.bottleneck_weight * self.bottleneck
        )
        self.again = self._again()
        self._stages()
        self._devices()
        self._pins()
        self._times()
        self._charges()
        self.crossed = [
            {k: self._crossed(i, k) for k in range(1, self.stages)}
            for i in range(len(problem.structure.crossings))
        ]
        self._links()
        self._memory()

    def _binary(self, name: str) -> Any:
        return self.program.binary(name)

    def _real(self, name: str, up: float | None = None) -> Any:
        return self.program.variable(name, high=up)

    def _row(self, left: Any, sense: Literal["<=", "==", ">="], right: Any) -> None:
        self.program.row(left - right, sense, 0.0)

    def _before(self, unit: int, k: int) -> Any:
        """y[unit, k]: the unit is in the k-th stage from the end or in an earlier one."""
        return pulp.lpSum(self.z[unit, i] for i in range(k, self.stages + 1))

    def _again(self) -> dict[int, Any]:
        """g[k]: whether the stage computes its blocks again; the number 0 where no stage may, 1 where all must."""
        recompute = self.problem.recompute
        if recompute is None:
            return dict.fromkeys(self.steps, 0)
        if recompute.always:
            return dict.fromkeys(self.steps, 1)
        return {k: self._binary(f"g_{k}") for k in self.steps}

    def _stages(self) -> None:
        structure = self.problem.structure
        for u in range(self.units):
            self._row(pulp.lpSum(self.z[u, k] for k in self.steps), "==", 1)
        edges = set(structure.edges)
        if structure.downsets is None:
            edges |= {(u, u + 1) for u in range(self.units - 1)}
        for u, v in sorted(edges):
            for k in range(2, self.stages + 1):
                self._row(self._before(u, k), ">=", self._before(v, k))
        for k in self.steps:
            self._row(pulp.lpSum(self.z[u, k] for u in range(self.units)), ">=", self.used[k])
            self._row(pulp.lpSum(self.z[u, k] for u in range(self.units)), "<=", self.units * self.used[k])
            self._row(self.used[k], "<=", 1)
            if k > 1:
                self._row(self.used[k], "<=", self.used[k - 1])
        count = pulp.lpSum(self.used.values())
        self._row(count, ">=", self.problem.stage_counts[0])
        self._row(count, "<=", self.problem.stage_counts[1])

    def _devices(self) -> None:
        problem = self.problem
        if problem.assignment == "sequence":
            for k in self.steps:
                for d in range(self.kinds):
                    if d != problem.sequence[-k]:
                        self._row(self.a[k, d], "==", 0)
            return
        for d, kind in enumerate(problem.kinds):
            limit = 1 if problem.assignment == "ordered" else kind.count
            self._row(pulp.lpSum(self.a[k, d] for k in self.steps), "<=", limit)
        if problem.assignment == "ordered":
            place = {k: pulp.lpSum(d * self.a[k, d] for d in range(self.kinds)) for k in self.steps}
            for k in range(1, self.stages):
                self._row(place[k + 1] + 1, "<=", place[k] + (self.kinds + 1) * (1 - self.used[k + 1]))

    def _pins(self) -> None:
        # stage s from the front is k = p - s from the end: used[k + s] holds and used[k + s + 1] does not
        for unit, stage in self.problem.pins.items():
            for k in self.steps:
                self._row(
                    self.z[unit, k], "==", self.used.get(k + stage, 0) - self.used.get(k + stage + 1, 0)
                )

    def _times(self) -> None:
        seconds = self.problem.seconds / self.time_scale
        for k in self.steps:
            self._row(self.bottleneck, ">=", self.t[k])
            self._row(self.bottleneck, ">=", self.x[k])
            held = self.problem.in_flight[k - 1]
            if held < self.problem.microbatches:  # the cut into stage k itself is not on its round trip
                behind = pulp.lpSum([self.t[i] for i in range(1, k + 1)] + [self.x[i] for i in range(1, k)])
                unused = self._longest * (1 - self.used[k])
                self._row(held * self.problem.chunks * self.bottleneck, ">=", behind - unused)
            for d, kind in enumerate(self.problem.kinds):
                row = seconds[kind.row]
                work = pulp.lpSum(float(row[u]) * self.z[u, k] for u in range(self.units))
                self._row(self.t[k], ">=", work - float(row.sum()) * (1 - self.a[k, d]))
                if self.problem.recompute is not None:
                    second = self.problem.recompute.seconds[kind.row] / self.time_scale
                    more = pulp.lpSum(float(second[u]) * self.z[u, k] for u in range(self.units))
                    slack = float((row + second).sum()) * (2 - self.a[k, d] - self.again[k])
                    self._row(self.t[k], ">=", work + more - slack)

    def _charges(self) -> None:
        later: dict[int, Any] = {}
        earlier: dict[int, Any] = {}
        for k in range(1, self.stages):
            if not self.problem.charges_cut(k):
                continue
            side = self._binary(f"o_{k}")
            later[k], earlier[k] = self._real(f"later_{k}"), self._real(f"earlier_{k}")
            self._row(later[k], ">=", self.x[k] - self._longest * side)
            self._row(earlier[k], ">=", self.x[k] - self._longest * (1 - side))
        for k in self.steps if later else ():
            self._row(self.bottleneck, ">=", self.t[k] + later.get(k, 0) + earlier.get(k - 1, 0))

    def _crossed(self, index: int, k: int) -> Any:
        crossing = self.problem.structure.crossings[index]
        variable = self._real(f"c_{index}_{k}", up=1)
        for reader in crossing.readers:
            self._row(variable, ">=", self._before(crossing.producer, k + 1) - self._before(reader, k + 1))
        return variable

    def _links(self) -> None:
        problem = self.problem
        sizes = problem.forward_bytes + problem.gradient_bytes
        for k in range(1, self.stages):
            for d in range(self.kinds):
                for e in range(self.kinds):
                    latency = float(problem.link_latency_seconds[d, e]) / self.time_scale
                    rate = float(problem.link_seconds_per_byte[d, e]) / self.time_scale
                    moved = pulp.lpSum(rate * float(sizes[i]) * c[k] for i, c in enumerate(self.crossed))
                    large = latency + rate * float(sizes.sum())
                    slack = large * (2 - self.a[k + 1, d] - self.a[k, e])
                    self._row(self.x[k], ">=", latency + moved - slack)

    def _memory(self) -> None:
        problem, scale = self.problem, self.byte_scale
        if all(math.isinf(kind.capacity_bytes) for kind in problem.kinds):
            return
        for k in self.steps:
            state = self._touched("s", problem.structure.states, problem.state_bytes / scale, k)
            held = self._touched("h", problem.structure.storages, problem.storage_bytes / scale, k)
            gradients = pulp.lpSum(
                float(problem.gradient_bytes[i]) / scale * c[cut]
                for i, c in enumerate(self.crossed)
                for cut in (k - 1, k)
                if cut in c
            )
            deferred = self._touched("w", problem.structure.deferred, problem.deferred_bytes / scale, k)
            fixed = state + gradients
            kept_beside = fixed + self._working("e", problem.working, k)
            self._fits(k, kept_beside, held, deferred, problem.storage_bytes, self.again[k])
            if problem.recompute is not None:
                kept = problem.recompute.storage_bytes
                inputs = self._touched("i", problem.structure.recomputed, kept / scale, k)
                again_beside = self._working("f", problem.recompute.working, k)
                fixed = fixed + again_beside + (deferred if problem.moments else 0)
                self._fits(k, fixed, inputs, deferred, kept, 1 - self.again[k])

    def _fits(self, k: int, fixed: Any, held: Any, deferred: Any, sizes: FloatArray, unless: Any) -> None:
        """At every moment of stage k, on the kind it has; not asked for where ``unless`` is 1."""
        problem, scale = self.problem, self.byte_scale
        most = problem.state_bytes.sum() + 2 * problem.gradient_bytes.sum() + problem.deferred_bytes.sum()
        most += max(w.beside_bytes.max() for w in (problem.working, *self._again_working()))
        for whole, weights in problem.held_at(k):
            used = fixed + whole * held + weights * deferred
            large = float(most + whole * sizes.sum() + weights * problem.deferred_bytes.sum())
            for d, kind in enumerate(problem.kinds):
                if math.isfinite(kind.capacity_bytes):
                    slack = large / scale * (1 - self.a[k, d] + unless)
                    self._row(used, "<=", kind.capacity_bytes / scale + slack)

    def _again_working(self) -> list[Working]:
        return [] if self.problem.recompute is None else [self.problem.recompute.working]

    def _working(self, prefix: str, working: Working, k: int) -> Any:
        """e[k] or f[k]: what the stage holds while its backward runs."""
        largest = self._real(f"{prefix}_{k}")
        for u in range(self.units):
            freed = (
                float(working.freed_bytes[v]) / self.byte_scale * self.z[v, k]
                for v in range(u + 1, self.units)
            )
            beside = float(working.beside_bytes[u]) / self.byte_scale
            self._row(largest, ">=", beside * self.z[u, k] - pulp.lpSum(freed))
        return largest

    def _touched(self, prefix: str, touches: tuple[Touch, ...], sizes: Any, k: int) -> Any:
        terms = []
        for index, touch in enumerate(touches):
            held = self._real(f"{prefix}_{index}_{k}", up=1)
            for unit in touch.savers:
                self._row(held, ">=", self.z[unit, k])
            for unit in touch.readers if touch.producer >= 0 else ():
                self._row(held, ">=", self.z[unit, k] - self.z[touch.producer, k])
                if touch.keeps_sent:
                    self._row(held, ">=", self.z[touch.producer, k] - self.z[unit, k])
            terms.append(float(sizes[index]) * held)
        return pulp.lpSum(terms)

    def floor_seconds(self) -> float:
        """What no split can be below: all work once, and an equal share of it as the bottleneck."""
        work = float(self.problem.seconds.min(axis=0).sum())
        return self.problem.fill * work + self.problem.bottleneck_weight * work / max(1, self.stages)

    def solution(self, values: Mapping[Variable, float]) -> tuple[list[int], list[int]]:
        """Return the stage of each unit (from the front) and the kind of each stage."""
        on = {key for key, variable in self.z.items() if values[variable] > 0.5}
        p = max(k for _, k in on)
        stage_of = [next(p - k for k in self.steps if (u, k) in on) for u in range(self.units)]
        kinds = [next(d for d in range(self.kinds) if values[self.a[p - s, d]] > 0.5) for s in range(p)]
        return stage_of, kinds
