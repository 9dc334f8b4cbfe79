"""The feature-wise problem as an integer linear program: PuLP states it, HiGHS solves it (CBC where it is absent).

    x[u,k] ∈ {0,1}      unit u runs as its option k;   Σ_k x[u,k] = 1
    X[w,s]              = Σ x[producer, k] over options that make wire w's value as s
    N[w,r,n]            = Σ x[reader r, k] over options that need it as n
    f[w,r,s,n] ≥ 0      Σ_n f = X[w,s],  Σ_s f = N[w,r,n]          which (source, need) reader r is an instance of
    z[w,s,n] ≥ f[w,r,s,n]                                          a bridge, once for all readers with the need
    minimize            Σ seconds·x + Σ seconds·z
    memory              Σ bytes·x + Σ copies·z + b ≤ capacity,     b ≥ Σ_{s,n} buffer·z per wire

With x integral f and z are what they should be; the marginals make the relaxation as tight as pairwise costs allow. A wire
with one reader has z = f. Sources whose rows of costs are equal share their variables, and so do needs of a single reader;
a wire that costs nothing has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pulp
from numpy.typing import NDArray

from passes.search.feature.bridges import BridgeTable
from passes.search.feature.problem import FeatureProblem, UnitNumbers

FREE_SECONDS = 1e-15
"""Costs below are rounding."""


@dataclass(frozen=True)
class IlpResult:
    """``chosen``: an option per unit, as an index into the problem's reduced options; None without a solution.

    ``status``: "optimal", "feasible" (time ran out), "infeasible", "unknown". No choice is below ``bound_seconds``.
    """

    chosen: tuple[int, ...] | None
    status: str
    bound_seconds: float
    solver: str
    variables: int


Pairs: TypeAlias = Mapping[tuple[int, int], NDArray[np.bool_]]
"""Per (wire, which reader), the bridges to be thought of; all of those that are not named. Shapes [sources, needs]."""


def solve(
    problem: FeatureProblem,
    *,
    memory: bool,
    time_limit_seconds: float,
    gap: float = 1e-7,
    tables: Sequence[BridgeTable] | None = None,
    pairs: Pairs | None = None,
) -> IlpResult:
    """The cheapest choice; ``memory``: that fits. Without, the bound holds for every choice that fits all the more.
    ``tables``: of the wires, where they are known.
    """
    model = _Model(problem, memory, tables, pairs or {})
    if model.impossible:
        return IlpResult(None, "infeasible", math.inf, "none", 0)
    return model.solve(time_limit_seconds, gap)


class _Model:
    def __init__(
        self, problem: FeatureProblem, memory: bool, tables: Sequence[BridgeTable] | None, pairs: Pairs
    ) -> None:
        self.problem, self.memory, self.tables, self.pairs = problem, memory, tables, pairs
        self.impossible = any(not len(unit.seconds) for unit in problem.units)
        if self.impossible:
            return
        least = sum(float(unit.seconds.min()) for unit in problem.units)
        self.time_scale = max(least, 1e-9) / 100.0
        self.byte_scale = max(problem.capacity_bytes, 1.0) / 100.0
        self.objective: dict[Any, float] = {}
        self.held: dict[Any, float] = {}
        self.lp = pulp.LpProblem("features", pulp.LpMinimize)
        self.x: list[list[Any]] = []
        self.rows: list[Any] = []
        self.buffer = pulp.LpVariable("b", lowBound=0) if memory else None
        for u, unit in enumerate(problem.units):
            self._unit(u, unit)
        for w in range(len(problem.space.wires)):
            self._wire(w)
        self._finish()

    def _unit(self, u: int, unit: UnitNumbers) -> None:
        own = [pulp.LpVariable(f"x_{u}_{k}", cat=pulp.LpBinary) for k in range(len(unit.seconds))]
        self.x.append(own)
        self._equal(dict.fromkeys(own, 1.0), 1.0)
        for variable, seconds, size in zip(own, unit.seconds.tolist(), unit.bytes.tolist(), strict=True):
            self.objective[variable] = seconds / self.time_scale
            self.held[variable] = size / self.byte_scale

    def _equal(self, terms: dict[Any, float], value: float) -> None:
        self._row(terms, pulp.LpConstraintEQ, value)

    def _row(self, terms: dict[Any, float], sense: int, value: float) -> None:
        self.lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, rhs=value))

    def _wire(self, w: int) -> None:
        wire = self.problem.space.wires[w]
        made = self.problem.units[wire.producer].outputs[wire.output]
        taken = [self.problem.units[u].inputs[i] for u, i in wire.readers]
        sources = sorted(set(made.tolist()))
        needs = sorted({code for codes in taken for code in codes.tolist()})
        table = self.problem.table(w, sources, needs) if self.tables is None else self.tables[w]
        if self._is_free(table):
            return
        rows = group(table, self.memory, by_source=True)
        members = self._members(made, sources, rows, self.x[wire.producer])
        single = len(wire.readers) == 1
        columns = group(table, self.memory, by_source=False) if single else np.arange(len(needs))
        reads = [
            self._members(codes, needs, columns, self.x[u])
            for codes, (u, _) in zip(taken, wire.readers, strict=True)
        ]
        first_row = [int(np.flatnonzero(rows == g)[0]) for g in range(len(members))]
        first_column = [int(np.flatnonzero(columns == g)[0]) for g in range(int(columns.max()) + 1)]
        flows = []
        for i, read in enumerate(reads):
            allowed = table.allowed
            if (w, i) in self.pairs:
                allowed = allowed & self.pairs[w, i]
            grouped = np.zeros((len(members), len(first_column)), dtype=bool)
            np.logical_or.at(grouped, (rows[:, None], columns[None, :]), allowed)
            flows.append(self._flow(f"{w}_{i}", members, read, grouped))
        bridges = flows[0] if single else self._shared(w, flows)
        buffers: dict[Any, float] = {}
        for (s, n), variable in bridges.items():
            at = first_row[s], first_column[n]
            self.objective[variable] = float(table.seconds[at]) / self.time_scale
            if self.memory:
                self.held[variable] = float(table.copies[at]) / self.byte_scale
                buffers[variable] = -float(table.buffers[at]) / self.byte_scale
        if self.buffer is not None and any(buffers.values()):
            self._row({self.buffer: 1.0, **buffers}, pulp.LpConstraintGE, 0.0)

    def _is_free(self, table: BridgeTable) -> bool:
        costly = bool((table.seconds > FREE_SECONDS).any()) or not table.allowed.all()
        return not costly and not (self.memory and (table.copies.any() or table.buffers.any()))

    def _members(
        self, codes: NDArray[np.int64], distinct: Sequence[int], groups: NDArray[np.intp], x: list[Any]
    ) -> list[list[Any]]:
        """Per group of codes, the options' variables."""
        found: list[list[Any]] = [[] for _ in range(int(groups.max()) + 1)]
        at = {code: int(groups[i]) for i, code in enumerate(distinct)}
        for code, variable in zip(codes.tolist(), x, strict=True):
            found[at[code]].append(variable)
        return found

    def _flow(
        self,
        name: str,
        sources: list[list[Any]],
        needs: list[list[Any]],
        allowed: NDArray[np.bool_],
    ) -> dict[tuple[int, int], Any]:
        flow = {
            (s, n): pulp.LpVariable(f"f_{name}_{s}_{n}", 0, 1)
            for s in range(len(sources))
            for n in range(len(needs))
            if needs[n] and allowed[s, n]
        }
        out: list[dict[Any, float]] = [{} for _ in sources]
        into: list[dict[Any, float]] = [{} for _ in needs]
        for (s, n), variable in flow.items():
            out[s][variable] = 1.0
            into[n][variable] = 1.0
        for terms, options in zip((*out, *into), (*sources, *needs), strict=True):
            if options:
                self._equal({**terms, **dict.fromkeys(options, -1.0)}, 0.0)
        return flow

    def _shared(self, w: int, flows: list[dict[tuple[int, int], Any]]) -> dict[tuple[int, int], Any]:
        """One bridge variable per pair that more than one reader may use."""
        bridges: dict[tuple[int, int], Any] = {}
        for pair in sorted({pair for flow in flows for pair in flow}):
            using = [flow[pair] for flow in flows if pair in flow]
            if len(using) == 1:
                bridges[pair] = using[0]
                continue
            bridges[pair] = pulp.LpVariable(f"z_{w}_{pair[0]}_{pair[1]}", 0, 1)
            for variable in using:
                self._row({bridges[pair]: 1.0, variable: -1.0}, pulp.LpConstraintGE, 0.0)
        return bridges

    def _finish(self) -> None:
        self.lp.setObjective(pulp.LpAffineExpression(self.objective))
        if self.memory:
            assert self.buffer is not None
            capacity = self.problem.capacity_bytes / self.byte_scale
            self._row({**self.held, self.buffer: 1.0}, pulp.LpConstraintLE, capacity)

    def solve(self, time_limit_seconds: float, gap: float) -> IlpResult:
        # Without presolve: HiGHS 1.15 takes some continuous variables for implied integers there and then calls a choice
        # optimal that is not (tests/unit/passes/search/feature/test_optimum.py, seed 227: 7% too dear).
        highs = pulp.HiGHS(
            msg=False, timeLimit=time_limit_seconds, gapRel=gap, gapAbs=0.0, threads=1, presolve="off"
        )
        name = "HiGHS" if highs.available() else "CBC"
        if name == "HiGHS":
            self.lp.solve(highs)
        else:
            self.lp.solve(pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit_seconds, gapRel=gap))
        status = {pulp.LpSolutionOptimal: "optimal", pulp.LpSolutionIntegerFeasible: "feasible"}.get(
            self.lp.sol_status, "infeasible" if self.lp.sol_status == pulp.LpSolutionInfeasible else "unknown"
        )
        variables = self.lp.numVariables()
        if status == "infeasible":
            return IlpResult(None, status, math.inf, name, variables)
        bound = self._bound(status)
        if status == "unknown":
            return IlpResult(None, status, bound, name, variables)
        chosen = tuple(int(np.argmax([v.value() or 0.0 for v in own])) for own in self.x)
        return IlpResult(chosen, status, bound, name, variables)

    def _bound(self, status: str) -> float:
        """The solver's proved bound; PuLP hides CBC's, then that of an optimal solution or all units at their least."""
        info = getattr(self.lp.solverModel, "getInfo", None)
        if info is not None:
            bound = float(info().mip_dual_bound)
            if math.isfinite(bound):
                return bound * self.time_scale
        if status == "optimal":
            return float(pulp.value(self.lp.objective)) * self.time_scale
        return sum(float(unit.seconds.min()) for unit in self.problem.units)


def group(table: BridgeTable, memory: bool, *, by_source: bool) -> NDArray[np.intp]:
    """Number rows (or columns) of the table such that equal ones have one number, in the order of appearance."""
    parts = [table.seconds, table.allowed.astype(float)]
    parts += [table.copies, table.buffers] if memory else []
    lines = np.concatenate(parts, axis=1) if by_source else np.concatenate([p.T for p in parts], axis=1)
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(line.tobytes(), len(numbers)) for line in lines], dtype=np.intp)
