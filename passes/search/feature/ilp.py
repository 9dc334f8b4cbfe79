"""The feature-wise problem as an integer linear program.

    x[u,k] ∈ {0,1}      unit u runs as its option k;   Σ_k x[u,k] = 1
    X[w,s]              = Σ x[producer, k] over options that make wire w's value as s
    N[w,r,n]            = Σ x[reader r, k] over options that need it as n
    f[w,r,s,n] ≥ 0      Σ_n f = X[w,s],  Σ_s f = N[w,r,n]          which (source, need) reader r is an instance of
    z[w,s,n] ≥ f[w,r,s,n]                                          a bridge, once for all readers with the need
    minimize            Σ seconds·x + Σ seconds·z − Σ hidden·f    what readers compute beside their bridge
    memory              Σ bytes·x + Σ copies·z + b + w ≤ capacity
                        b ≥ Σ_{s,n} buffer·z per wire,   w ≥ Σ_k working·x per unit

With x integral f and z are what they should be; the marginals make the relaxation as tight as pairwise costs allow. A wire
with one reader has z = f. Sources whose rows of costs are equal share their variables, and so do needs of a single reader;
a wire that costs nothing has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from passes.search.feature.bound import WireTable
from passes.search.feature.bridges import BridgeTable
from passes.search.feature.options import UnitNumbers
from passes.search.feature.problem import FeatureProblem
from passes.search.feature.tuning import TUNING
from passes.search.ilp import IntegerProgram, Status, Terms, Variable

GAP = 1e-7
"""Relative gap to which programs are solved."""


@dataclass(frozen=True)
class IlpResult:
    """``chosen``: an option per unit, as an index into the problem's reduced options; None without a solution.

    ``status``: "optimal", "feasible" (time ran out), "infeasible", "unknown". No choice is below ``bound_seconds``.
    """

    chosen: tuple[int, ...] | None
    status: Status
    bound_seconds: float


AllowedBridges: TypeAlias = Mapping[tuple[int, int], NDArray[np.bool_]]
"""Per (wire, which reader), the bridges to be thought of; all of those that are not named. Shapes [sources, needs]."""


class FeatureProgram:
    """The program of one problem, each of whose units has an option; ``memory``: what is chosen must fit.

    Without, the bound holds for every choice that fits all the more.
    """

    def __init__(
        self,
        problem: FeatureProblem,
        tables: Sequence[WireTable],
        *,
        memory: bool,
        pairs: AllowedBridges | None = None,
    ) -> None:
        self.problem, self.tables, self.pairs = problem, tables, pairs or {}
        self.least_seconds = sum(float(unit.seconds.min()) for unit in problem.units)
        self.time_scale = max(self.least_seconds, 1e-9) / 100.0
        self.byte_scale = max(problem.capacity_bytes, 1.0) / 100.0
        self.objective: Terms = {}
        self.held: Terms = {}
        self.program = IntegerProgram("features")
        self.x: list[list[Variable]] = []
        self.buffer = self.program.variable("b") if memory else None
        for u, unit in enumerate(problem.units):
            self._unit(u, unit)
        for w in range(len(problem.space.wires)):
            self._wire(w)
        self.program.minimize(self.objective)
        if self.buffer is not None:
            capacity = self.problem.capacity_bytes / self.byte_scale
            self.program.row({**self.held, self.buffer: 1.0, **self._working()}, "<=", capacity)

    def solve(self, time_limit_seconds: float) -> IlpResult:
        """The cheapest choice."""
        found = self.program.solve(time_limit_seconds, GAP, absolute_gap=0.0)
        bound = self.least_seconds if found.bound == -math.inf else found.bound * self.time_scale
        values, chosen = found.values, None
        if values is not None:
            chosen = tuple(int(np.argmax([values[v] for v in own])) for own in self.x)
        return IlpResult(chosen, found.status, bound)

    def _unit(self, u: int, unit: UnitNumbers) -> None:
        own = [self.program.binary(f"x_{u}_{k}") for k in range(len(unit.seconds))]
        self.x.append(own)
        self.program.row(dict.fromkeys(own, 1.0), "==", 1.0)
        for variable, seconds, size in zip(own, unit.seconds.tolist(), unit.bytes.tolist(), strict=True):
            self.objective[variable] = seconds / self.time_scale
            self.held[variable] = size / self.byte_scale

    def _working(self) -> Terms:
        """Make w, with a row for each unit that may need a larger buffer than every solution has."""
        more = self.program.variable("w")
        for own, unit in zip(self.x, self.problem.units, strict=True):
            beyond = unit.working_bytes / self.byte_scale
            if beyond.any():
                terms = {x: -size for x, size in zip(own, beyond.tolist(), strict=True)}
                self.program.row({more: 1.0, **terms}, ">=", 0.0)
        return {more: 1.0}

    def _wire(self, w: int) -> None:
        wire = self.problem.space.wires[w]
        made = self.problem.units[wire.producer].outputs[wire.output]
        taken = [self.problem.units[u].inputs[i] for u, i in wire.readers]
        known, memory = self.tables[w], self.buffer is not None
        table = known.table
        if self._is_free(table):
            return
        rows = group(known, memory, by_source=True)
        members = self._members(made, known.sources, rows, self.x[wire.producer])
        single = len(wire.readers) == 1
        columns = group(known, memory, by_source=False) if single else np.arange(len(known.needs))
        reads = [
            self._members(codes, known.needs, columns, self.x[u])
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
        buffers: Terms = {}
        for (s, n), variable in bridges.items():
            at = first_row[s], first_column[n]
            self.objective[variable] = float(table.seconds[at]) / self.time_scale
            if memory:
                self.held[variable] = float(table.copies[at]) / self.byte_scale
                buffers[variable] = -float(table.buffers[at]) / self.byte_scale
        for hidden, flow in zip(known.hidden, flows, strict=False):
            for (s, n), variable in flow.items():
                less = float(hidden[first_row[s], first_column[n]]) / self.time_scale
                self.objective[variable] = self.objective.get(variable, 0.0) - less
        if self.buffer is not None and any(buffers.values()):
            self.program.row({self.buffer: 1.0, **buffers}, ">=", 0.0)

    def _is_free(self, table: BridgeTable) -> bool:
        costly = bool((table.seconds > TUNING.free_seconds).any()) or not table.allowed.all()
        return not costly and not (self.buffer is not None and (table.copies.any() or table.buffers.any()))

    def _members(
        self, codes: NDArray[np.int64], distinct: Sequence[int], groups: NDArray[np.intp], x: list[Variable]
    ) -> list[list[Variable]]:
        """Per group of codes, the options' variables."""
        found: list[list[Variable]] = [[] for _ in range(int(groups.max()) + 1)]
        at = {code: int(groups[i]) for i, code in enumerate(distinct)}
        for code, variable in zip(codes.tolist(), x, strict=True):
            found[at[code]].append(variable)
        return found

    def _flow(
        self,
        name: str,
        sources: list[list[Variable]],
        needs: list[list[Variable]],
        allowed: NDArray[np.bool_],
    ) -> dict[tuple[int, int], Variable]:
        flow = {
            (s, n): self.program.variable(f"f_{name}_{s}_{n}", 0, 1)
            for s in range(len(sources))
            for n in range(len(needs))
            if needs[n] and allowed[s, n]
        }
        out: list[Terms] = [{} for _ in sources]
        into: list[Terms] = [{} for _ in needs]
        for (s, n), variable in flow.items():
            out[s][variable] = 1.0
            into[n][variable] = 1.0
        for terms, options in zip((*out, *into), (*sources, *needs), strict=True):
            if options:
                self.program.row({**terms, **dict.fromkeys(options, -1.0)}, "==", 0.0)
        return flow

    def _shared(
        self, w: int, flows: list[dict[tuple[int, int], Variable]]
    ) -> dict[tuple[int, int], Variable]:
        """One bridge variable per pair that more than one reader may use."""
        bridges: dict[tuple[int, int], Variable] = {}
        for pair in sorted({pair for flow in flows for pair in flow}):
            using = [flow[pair] for flow in flows if pair in flow]
            if len(using) == 1:
                bridges[pair] = using[0]
                continue
            bridges[pair] = self.program.variable(f"z_{w}_{pair[0]}_{pair[1]}", 0, 1)
            for variable in using:
                self.program.row({bridges[pair]: 1.0, variable: -1.0}, ">=", 0.0)
        return bridges


def group(known: WireTable, memory: bool, *, by_source: bool) -> NDArray[np.intp]:
    """Number rows (or columns) of the table such that equal ones have one number, in the order of appearance."""
    table = known.table
    parts = [table.seconds, table.allowed.astype(float), *known.hidden]
    parts += [table.copies, table.buffers] if memory else []
    lines = np.concatenate(parts, axis=1) if by_source else np.concatenate([p.T for p in parts], axis=1)
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(line.tobytes(), len(numbers)) for line in lines], dtype=np.intp)
