"""A proved lower bound of a feature-wise problem, and what it rules out, without a solver.

Dual ascent on the relaxation that the program of ``passes.feature_ilp`` has: costs move between units and the wires
that join them, as messages m, such that every choice costs what it did. Then

    bound = Σ_units min_k (seconds[k] + Σ messages) + Σ_(wire, reader) min_(s,n) (part[s,n] − messages)

whatever the messages are. A wire with several readers gives each a part of its costs, Σ_readers part = seconds, since
paying for a bridge once is paying at least Σ part·(the reader uses it). Units are visited in order and back again (TRW-S:
Kolmogorov, "Convergent tree-reweighted message passing", PAMI 28 (2006)). An option, or a bridge, that would make the
bound larger than a known choice's cost is in no better choice: it is left out exactly.

A multiplier λ [seconds per byte] adds λ·(bytes − capacity): the bound then knows of memory (Lagrange).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_models.compute import FloatArray
from passes.feature_bridges import BridgeTable
from passes.feature_problem import FeatureProblem

FORBIDDEN_SECONDS = 1e7
"""What a pair that is not allowed costs here: more than any step, little enough for sums to stay exact."""


@dataclass(eq=False)
class _End:
    """One end of an edge: the unit, the code index of each of its options, and how to take minima per code."""

    unit: int
    code: NDArray[np.intp]
    order: NDArray[np.intp]
    starts: NDArray[np.intp]
    present: NDArray[np.intp]
    message: FloatArray

    @classmethod
    def of(cls, unit: int, code: NDArray[np.intp], size: int) -> _End:
        order = np.argsort(code, kind="stable")
        present, starts = np.unique(code[order], return_index=True)
        return cls(unit, code, order, starts, present, np.zeros(size))

    def least(self, values: FloatArray) -> FloatArray:
        """Minimum over the options of each code; 0 for codes that no option has."""
        found = np.zeros(len(self.message))
        found[self.present] = np.minimum.reduceat(values[self.order], self.starts)
        return found


@dataclass(eq=False)
class _Edge:
    """A wire and one of its readers. ``part``: [sources, needs of the wire]."""

    wire: int
    part: FloatArray
    producer: _End
    reader: _End

    def to_reader(self) -> FloatArray:
        least: FloatArray = (
            self.part[self.producer.present] - self.producer.message[self.producer.present, None]
        ).min(axis=0) - self.reader.message
        return least

    def to_producer(self) -> FloatArray:
        least: FloatArray = (
            self.part[:, self.reader.present] - self.reader.message[None, self.reader.present]
        ).min(axis=1) - self.producer.message
        return least

    def slack(self) -> FloatArray:
        return self.part - self.producer.message[:, None] - self.reader.message[None, :]

    def least_slack(self) -> float:
        return float(self.slack()[np.ix_(self.producer.present, self.reader.present)].min())


@dataclass(eq=False)
class WireTable:
    """A wire's bridges between the codes that its units have now."""

    sources: list[int]
    needs: list[int]
    table: BridgeTable

    @property
    def seconds(self) -> FloatArray:
        return np.where(self.table.allowed, self.table.seconds, FORBIDDEN_SECONDS)


def wire_tables(problem: FeatureProblem) -> list[WireTable]:
    found = []
    for w, wire in enumerate(problem.space.wires):
        made = problem.units[wire.producer].outputs[wire.output]
        sources = sorted(set(made.tolist()))
        needs = sorted({c for u, i in wire.readers for c in problem.units[u].inputs[i].tolist()})
        found.append(WireTable(sources, needs, problem.table(w, sources, needs)))
    return found


class DualBound:
    """Messages for one problem; ``ascend`` improves them."""

    def __init__(
        self,
        problem: FeatureProblem,
        tables: Sequence[WireTable],
        seconds_per_byte: float = 0.0,
        time_weight: float = 1.0,
    ) -> None:
        """``time_weight`` 0 and a price of 1: the bound is on bytes beyond the capacity."""
        self.problem, self.tables = problem, tables
        self.price, self.time_weight = seconds_per_byte, time_weight
        self.cost = [time_weight * u.seconds + seconds_per_byte * u.bytes for u in problem.units]
        self.constant = -seconds_per_byte * problem.capacity_bytes if seconds_per_byte else 0.0
        self.edges: list[_Edge] = []
        self.groups: list[list[_Edge]] = []
        for w, (wire, known) in enumerate(zip(problem.space.wires, tables, strict=True)):
            whole = self.wire_cost(w)
            if not whole.any():
                continue
            row = {code: i for i, code in enumerate(known.sources)}
            column = {code: i for i, code in enumerate(known.needs)}
            made = np.array([row[c] for c in problem.units[wire.producer].outputs[wire.output].tolist()])
            group = []
            for unit, operand in wire.readers:
                code = np.array([column[c] for c in problem.units[unit].inputs[operand].tolist()])
                group.append(
                    _Edge(
                        w,
                        whole / len(wire.readers),
                        _End.of(wire.producer, made, len(row)),
                        _End.of(unit, code, len(column)),
                    )
                )
            self.edges += group
            if len(group) > 1:
                self.groups.append(group)
        self.at: list[list[tuple[_Edge, bool]]] = [[] for _ in problem.units]
        for edge in self.edges:
            self.at[edge.producer.unit].append((edge, True))
            self.at[edge.reader.unit].append((edge, False))
        self.order = _visiting_order(problem)
        self.rank = {u: i for i, u in enumerate(self.order)}

    def wire_cost(self, wire: int) -> FloatArray:
        known = self.tables[wire]
        seconds = np.where(known.table.allowed, self.time_weight * known.table.seconds, FORBIDDEN_SECONDS)
        cost: FloatArray = seconds + self.price * known.table.copies
        return cost

    def ascend(self, sweeps: int, target: float = np.inf, patience: float = 1e-7) -> float:
        """Up to ``sweeps`` there and back; stops at ``target``, or where a sweep gains less than ``patience``."""
        best = self.bound()
        for _ in range(sweeps):
            self._sweep(self.order, forward=True)
            self._sweep(self.order[::-1], forward=False)
            self._share()
            now = self.bound()
            if now >= target or now - best < patience * abs(now):
                return max(now, best)
            best = max(best, now)
        return best

    def bound(self) -> float:
        units = sum(float(self.reduced(u).min()) for u in range(len(self.cost)))
        return units + sum(edge.least_slack() for edge in self.edges) + self.constant

    def reduced(self, unit: int) -> FloatArray:
        """Costs of the unit's options with what messages brought."""
        total = self.cost[unit].copy()
        for edge, makes in self.at[unit]:
            end = edge.producer if makes else edge.reader
            total += end.message[end.code]
        return total

    def _sweep(self, order: Sequence[int], *, forward: bool) -> None:
        for unit in order:
            ahead: list[_End] = []
            behind = 0
            for edge, makes in self.at[unit]:
                end, other = (edge.producer, edge.reader) if makes else (edge.reader, edge.producer)
                if (self.rank[other.unit] > self.rank[unit]) == forward:
                    ahead.append(end)
                else:
                    behind += 1
                end.message += edge.to_producer() if makes else edge.to_reader()
            if not ahead:
                continue
            total = self.reduced(unit)
            total -= total.min()
            share = 1.0 / max(len(ahead), behind)
            for end in ahead:
                end.message -= share * end.least(total)

    def _share(self) -> None:
        """Give readers of one wire those parts of its costs that they have use for, as far as the bound does not fall."""
        for group in self.groups:
            whole = self.wire_cost(group[0].wire)
            slacks = [edge.slack() for edge in group]
            mean = sum(slacks) / len(group)
            parts = [np.maximum(edge.part + mean - s, 0.0) for edge, s in zip(group, slacks, strict=True)]
            total = np.sum(parts, axis=0)
            scale = np.minimum(np.divide(whole, total, out=np.zeros_like(whole), where=total > 0), 1.0)
            before = [edge.part for edge in group]
            least = sum(edge.least_slack() for edge in group)
            for step in (1.0, 0.5, 0.1, 0.0):
                for edge, old, part in zip(group, before, parts, strict=True):
                    edge.part = old + step * (part * scale - old) if step else old
                if sum(edge.least_slack() for edge in group) >= least:
                    break

    def needless(self, known_seconds: float) -> list[NDArray[np.bool_]]:
        """Per unit, which options may be in a choice that costs at most ``known_seconds``."""
        bound = self.bound()
        found = []
        for unit in range(len(self.cost)):
            total = self.reduced(unit)
            least = float(total.min())
            rest = bound - least
            for edge, makes in self.at[unit]:
                end = edge.producer if makes else edge.reader
                more = edge.to_producer() if makes else edge.to_reader()
                total = total + more[end.code]
                rest -= edge.least_slack()
            found.append(rest + total <= known_seconds)
        return found

    def decode(self) -> list[int]:
        """A choice that follows the messages: unit after unit, the cheapest with what is decided already."""
        chosen: list[int] = [-1] * len(self.cost)
        for unit in self.order:
            total = self.cost[unit].copy()
            for edge, makes in self.at[unit]:
                end, other = (edge.producer, edge.reader) if makes else (edge.reader, edge.producer)
                if chosen[other.unit] < 0 or other.unit == unit:
                    total += end.message[end.code]
                    continue
                fixed = other.code[chosen[other.unit]]
                line = edge.part[:, fixed] if makes else edge.part[fixed, :]
                total += line[end.code]
            chosen[unit] = int(np.argmin(total))
        return chosen


def _visiting_order(problem: FeatureProblem) -> list[int]:
    """Placeholders just before the first op that reads them; ops in the model's order."""
    units = problem.space.units
    first: dict[int, int] = {}
    for wire in problem.space.wires:
        if units[wire.producer].kind != "op":
            first[wire.producer] = min([first.get(wire.producer, len(units)), *(u for u, _ in wire.readers)])
    place = [
        (u, 1) if unit.kind == "op" else (first.get(u, u), 0 if unit.kind != "output" else 2)
        for u, unit in enumerate(units)
    ]
    return sorted(range(len(units)), key=lambda u: (*place[u], u))


@dataclass(frozen=True)
class Priced:
    """A choice's exact cost in the problem."""

    seconds: float
    bytes: float


def price(problem: FeatureProblem, tables: Sequence[WireTable], chosen: Sequence[int]) -> Priced:
    """Seconds and bytes of one option per unit: bridges once per distinct need."""
    seconds = sum(float(u.seconds[k]) for u, k in zip(problem.units, chosen, strict=True))
    held = sum(float(u.bytes[k]) for u, k in zip(problem.units, chosen, strict=True))
    buffer = 0.0
    for wire, known in zip(problem.space.wires, tables, strict=True):
        s = known.sources.index(int(problem.units[wire.producer].outputs[wire.output][chosen[wire.producer]]))
        needs = {int(problem.units[u].inputs[i][chosen[u]]) for u, i in wire.readers}
        columns = [known.needs.index(n) for n in needs]
        seconds += float(known.seconds[s, columns].sum())
        held += float(known.table.copies[s, columns].sum())
        buffer = max(buffer, float(known.table.buffers[s, columns].sum()))
    return Priced(seconds, held + buffer)
