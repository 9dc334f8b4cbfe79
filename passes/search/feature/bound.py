"""A proved lower bound of a feature-wise problem, and what it rules out, without a solver.

Dual ascent on the relaxation that the program of ``passes.search.feature.ilp`` has: costs move between units and the wires
that join them, as messages m, such that every choice costs what it did. Then

    bound = Σ_units min_k (seconds[k] + Σ messages) + Σ_(wire, reader) min_(s,n) (part[s,n] − hidden[s,n] − messages)

whatever the messages are. A wire with several readers gives each a part of its costs, Σ_readers part = seconds, since
paying for a bridge once is paying at least Σ part·(the reader uses it). Units are visited in order and back again (TRW-S:
Kolmogorov, "Convergent tree-reweighted message passing", PAMI 28 (2006)). An option, or a bridge, that would make the
bound larger than a known choice's cost is in no better choice: it is left out exactly.

A multiplier λ [seconds per byte] adds λ·(bytes − capacity): the bound then knows of memory (Lagrange).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import FloatArray
from passes.search.feature.bridges import BridgeTable
from passes.search.feature.graph import Wire
from passes.search.feature.problem import FeatureProblem
from passes.search.feature.tuning import TUNING


@dataclass(eq=False)
class _EdgeEnd:
    """One end of an edge: the unit, the code index of each of its options, and how to take minima per code.

    Every code is some option's.
    """

    unit: int
    code: NDArray[np.intp]
    order: NDArray[np.intp]
    starts: NDArray[np.intp]
    message: FloatArray

    @classmethod
    def of(cls, unit: int, code: NDArray[np.intp]) -> _EdgeEnd:
        order = np.argsort(code, kind="stable")
        present, starts = np.unique(code[order], return_index=True)
        return cls(unit, code, order, starts, np.zeros(len(present)))

    def least(self, values: FloatArray) -> FloatArray:
        """Minimum over the options of each code."""
        found: FloatArray = np.minimum.reduceat(values[self.order], self.starts)
        return found


@dataclass(eq=False)
class _DualEdge:
    """A wire and one of its readers. ``part``: this reader's part of the wire's costs, [sources, the reader's needs];
    ``hidden``: what its work beside the bridge takes off them; ``slack``: what messages left of both. ``columns``: of the
    wire's needs those of the reader."""

    wire: int
    part: FloatArray
    hidden: FloatArray
    slack: FloatArray
    columns: NDArray[np.intp]
    producer: _EdgeEnd
    reader: _EdgeEnd

    def seen_from(self, *, at_producer: bool) -> tuple[FloatArray, _EdgeEnd]:
        """Return one end, and what is left of the costs as [codes of the other end, codes of this one]."""
        return (self.slack.T, self.producer) if at_producer else (self.slack, self.reader)

    def send(self, seconds: FloatArray, *, at_producer: bool) -> None:
        if at_producer:
            self.producer.message += seconds
            self.slack -= seconds[:, None]
        else:
            self.reader.message += seconds
            self.slack -= seconds

    def give(self, part: FloatArray) -> None:
        """Another part of the wire's costs."""
        self.slack += part - self.part
        self.part = part


class _Visit(NamedTuple):
    """A unit in a sweep. ``ends``: its edges as ``seen_from`` it, of which those ``ahead`` lead to units that are visited
    later; ``share``: the part of what they may take that each of them is given, negative."""

    unit: int
    ends: list[tuple[FloatArray, _EdgeEnd]]
    ahead: list[tuple[FloatArray, _EdgeEnd]]
    share: float


@dataclass(eq=False)
class WireTable:
    """A wire's bridges between the codes that its units have now. ``hidden``: by reader, seconds that it computes while the
    bridge's sum is under way, [sources, needs]; empty where nothing does."""

    sources: list[int]
    needs: list[int]
    table: BridgeTable
    hidden: tuple[FloatArray, ...] = ()

    def part(self, sources: list[int], needs: list[int], largest_buffer_bytes: float) -> WireTable:
        """Make the table of some of the codes, without bridges that have larger buffers."""
        if sources == self.sources and needs == self.needs and math.isinf(largest_buffer_bytes):
            return self
        row, column = np.searchsorted(self.sources, sources), np.searchsorted(self.needs, needs)
        at = np.ix_(row, column)
        own = self.table
        buffers = own.buffers[at]
        allowed = own.allowed[at] & (buffers <= largest_buffer_bytes)
        table = BridgeTable(own.seconds[at], own.copies[at], buffers, allowed)
        return WireTable(sources, needs, table, tuple(hidden[at] for hidden in self.hidden))

    @cached_property
    def seconds(self) -> FloatArray:
        """[sources, needs] of the bridges, those that are not allowed too dear for any choice."""
        return np.where(self.table.allowed, self.table.seconds, TUNING.forbidden_seconds)


def wire_tables(problem: FeatureProblem, larger: Sequence[WireTable] | None = None) -> list[WireTable]:
    """Make the table of every wire; ``larger``: tables of the same problem with more options, to take from."""
    return [
        wire_table(problem, w, None if larger is None else larger[w]) for w in range(len(problem.space.wires))
    ]


def wire_table(problem: FeatureProblem, w: int, larger: WireTable | None = None) -> WireTable:
    """Make the table of one wire; ``larger``: its table with more options, to take from."""
    wire = problem.space.wires[w]
    sources = sorted(set(problem.units[wire.producer].outputs[wire.output].tolist()))
    needs = sorted({c for u, i in wire.readers for c in problem.units[u].inputs[i].tolist()})
    if larger is not None:
        return larger.part(sources, needs, problem.largest_buffer_bytes)
    table, hidden = problem.table(w, sources, needs), problem.hidden(w, sources, needs)
    return WireTable(sources, needs, table, hidden if any(map(np.any, hidden)) else ())


class DualBound:
    """Messages for one problem; ``ascend`` improves them."""

    def __init__(
        self,
        problem: FeatureProblem,
        tables: Sequence[WireTable],
        seconds_per_byte: float = 0.0,
        time_weight: float = 1.0,
        start: DualBound | None = None,
    ) -> None:
        """``time_weight`` 0 and a price of 1: the bound is on bytes beyond the capacity. ``start``: messages of the same
        problem at another price."""
        self.problem, self.tables = problem, tables
        self.price, self.time_weight = seconds_per_byte, time_weight
        self.cost = [time_weight * u.seconds + seconds_per_byte * u.bytes for u in problem.units]
        self.constant = -seconds_per_byte * problem.capacity_bytes if seconds_per_byte else 0.0
        self.edges: list[_DualEdge] = []
        self.groups: list[list[_DualEdge]] = []
        self._of_wire: dict[int, list[_DualEdge]] = {}
        self._wire_costs: dict[int, FloatArray] = {}
        for w, (wire, known) in enumerate(zip(problem.space.wires, tables, strict=True)):
            whole = self.wire_cost(w)
            if not whole.any():
                continue
            row = {code: i for i, code in enumerate(known.sources)}
            column = {code: i for i, code in enumerate(known.needs)}
            made = np.array([row[c] for c in problem.units[wire.producer].outputs[wire.output].tolist()])
            group = []
            for number, (unit, operand) in enumerate(wire.readers):
                code = np.array([column[c] for c in problem.units[unit].inputs[operand].tolist()])
                present, own = np.unique(code, return_inverse=True)
                part = whole[:, present] / len(wire.readers)
                ends = _EdgeEnd.of(wire.producer, made), _EdgeEnd.of(unit, own.reshape(-1))
                hidden = (
                    time_weight * known.hidden[number][:, present] if known.hidden else np.zeros_like(part)
                )
                group.append(_DualEdge(w, part, hidden, part - hidden, present, *ends))
            self.edges += group
            self._of_wire[w] = group
            if len(group) > 1:
                self.groups.append(group)
        self.at: list[list[tuple[_DualEdge, bool]]] = [[] for _ in problem.units]
        for edge in self.edges:
            self.at[edge.producer.unit].append((edge, True))
            self.at[edge.reader.unit].append((edge, False))
        self.order = _visiting_order(problem)
        rank = {u: i for i, u in enumerate(self.order)}
        self._visits = {
            forward: [self._visit(u, rank, forward) for u in self.order] for forward in (True, False)
        }
        if start is not None:
            self._take_messages(start)

    def _take_messages(self, start: DualBound) -> None:
        """Messages hold for any costs; readers' parts stay in proportion."""
        for w, group in self._of_wire.items():
            whole = self.wire_cost(w)
            for edge, other in zip(group, start._of_wire.get(w, ()), strict=False):
                before = start.wire_cost(w)[:, edge.columns]
                equal = np.full_like(before, 1 / len(group))
                share = np.divide(other.part, before, out=equal, where=before > 0)
                edge.give(share * whole[:, edge.columns])
                edge.send(other.producer.message, at_producer=True)
                edge.send(other.reader.message, at_producer=False)

    def wire_cost(self, wire: int) -> FloatArray:
        """[sources, needs] of a wire, what its bridges cost."""
        if wire not in self._wire_costs:
            known = self.tables[wire]
            seconds = np.where(
                known.table.allowed, self.time_weight * known.table.seconds, TUNING.forbidden_seconds
            )
            self._wire_costs[wire] = seconds + self.price * known.table.copies
        return self._wire_costs[wire]

    def _visit(self, unit: int, rank: Mapping[int, int], forward: bool) -> _Visit:
        """Prepare visits of a unit on the way there, or back."""
        ends = [edge.seen_from(at_producer=makes) for edge, makes in self.at[unit]]
        others = [edge.reader if makes else edge.producer for edge, makes in self.at[unit]]
        ahead = [
            end for end, other in zip(ends, others, strict=True) if (rank[other.unit] > rank[unit]) == forward
        ]
        return _Visit(unit, ends, ahead, -1.0 / max(len(ahead), len(ends) - len(ahead), 1))

    def ascend(self, sweeps: int, target: float = np.inf, patience: float = 1e-7) -> float:
        """Up to ``sweeps`` there and back; stops at ``target``, or where a sweep gains less than ``patience``."""
        best = self.bound()
        for _ in range(sweeps):
            self._sweep(self._visits[True])
            self._sweep(self._visits[False][::-1])
            self._share()
            now = self.bound()
            if now >= target or now - best < patience * abs(now):
                return max(now, best)
            best = max(best, now)
        return best

    def bound(self) -> float:
        units = sum(float(self.reduced(u).min()) for u in range(len(self.cost)))
        return units + sum(float(edge.slack.min()) for edge in self.edges) + self.constant

    def reduced(self, unit: int) -> FloatArray:
        """Costs of the unit's options with what messages brought."""
        total = self.cost[unit].copy()
        for edge, makes in self.at[unit]:
            end = edge.producer if makes else edge.reader
            total += end.message[end.code]
        return total

    def _sweep(self, visits: Sequence[_Visit]) -> None:
        for unit, ends, ahead, share in visits:
            for slack, end in ends:  # what an edge is sure to cost comes to the unit
                least = np.minimum.reduce(slack)
                end.message += least
                slack -= least
            if not ahead:
                continue
            total = self.reduced(unit)
            total -= np.minimum.reduce(total)
            for slack, end in ahead:
                given = share * end.least(total)
                end.message += given
                slack -= given

    def _share(self) -> None:
        """Give readers of one wire those parts of its costs that they have use for, as far as the bound does not fall."""
        for group in self.groups:
            whole = self.wire_cost(group[0].wire)
            mean, count = np.zeros_like(whole), np.zeros(whole.shape[1])
            for edge in group:
                mean[:, edge.columns] += edge.slack
                count[edge.columns] += 1
            mean /= np.maximum(count, 1)
            parts = [np.maximum(edge.part + mean[:, edge.columns] - edge.slack, 0.0) for edge in group]
            total = np.zeros_like(whole)
            for edge, part in zip(group, parts, strict=True):
                total[:, edge.columns] += part
            scale = np.minimum(np.divide(whole, total, out=np.zeros_like(whole), where=total > 0), 1.0)
            before = [edge.part for edge in group]
            least = sum(float(edge.slack.min()) for edge in group)
            for step in (1.0, 0.5, 0.1, 0.0):
                for edge, old, part in zip(group, before, parts, strict=True):
                    edge.give(old + step * (part * scale[:, edge.columns] - old) if step else old)
                if sum(float(edge.slack.min()) for edge in group) >= least:
                    break

    def needless(self, known_seconds: float) -> list[NDArray[np.bool_]]:
        """Per unit, which options may be in a choice that costs at most ``known_seconds``."""
        bound = self.bound()
        found = []
        for unit in range(len(self.cost)):
            total = self.reduced(unit)
            rest = bound - float(total.min())
            for edge, makes in self.at[unit]:
                end = edge.producer if makes else edge.reader
                total = total + np.minimum.reduce(edge.slack, axis=1 if makes else 0)[end.code]
                rest -= float(edge.slack.min())
            found.append(rest + total <= known_seconds)
        return found

    def needed_pairs(self, known_seconds: float) -> dict[tuple[int, int], NDArray[np.bool_]]:
        """Per (wire, which reader), which bridges may be in a choice that costs at most ``known_seconds``.

        Shapes [sources, needs of the wire]. What is not here costs nothing.
        """
        bound = self.bound()
        reduced = [self.reduced(u) for u in range(len(self.cost))]
        least = [float(own.min()) for own in reduced]
        found = {}
        for w, group in self._of_wire.items():
            for i, edge in enumerate(group):
                total = edge.slack + (bound - float(edge.slack.min()))
                if edge.producer.unit != edge.reader.unit:
                    for end, axis in ((edge.producer, 1), (edge.reader, 0)):
                        more = end.least(reduced[end.unit]) - least[end.unit]
                        total += np.expand_dims(more, axis)
                found[w, i] = np.zeros((len(total), len(self.tables[w].needs)), dtype=bool)
                found[w, i][:, edge.columns] = total <= known_seconds
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
                cost = edge.part - edge.hidden
                line = cost[:, fixed] if makes else cost[fixed, :]
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
        (u, 1) if unit.kind == "op" else (first.get(u, u), 2 if unit.kind in ("output", "leaving") else 0)
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
    held += max(float(u.working_bytes[k]) for u, k in zip(problem.units, chosen, strict=True))
    buffer = 0.0
    for wire, known in zip(problem.space.wires, tables, strict=True):
        at = bridges_used(problem, wire, known, chosen)
        seconds += bridge_seconds(problem, wire, known, chosen)
        held += float(known.table.copies[at].sum())
        buffer = max(buffer, float(known.table.buffers[at].sum()))
    return Priced(seconds, held + buffer)


def bridge_seconds(problem: FeatureProblem, wire: Wire, known: WireTable, chosen: Sequence[int]) -> float:
    """Seconds that the bridges of a wire take in a choice of one option per unit, but for what is computed beside them."""
    source, needs = bridges_used(problem, wire, known, chosen)
    hidden = sum(
        float(own[source, known.needs.index(int(problem.units[u].inputs[i][chosen[u]]))])
        for own, (u, i) in zip(known.hidden, wire.readers, strict=False)
    )
    return float(known.seconds[source, needs].sum()) - hidden


def bridges_used(
    problem: FeatureProblem, wire: Wire, known: WireTable, chosen: Sequence[int]
) -> tuple[int, list[int]]:
    """Find the bridges that a choice of one option per unit uses, in a wire's table: (source, distinct needs)."""
    made = problem.units[wire.producer].outputs[wire.output][chosen[wire.producer]]
    needs = {int(problem.units[u].inputs[i][chosen[u]]) for u, i in wire.readers}
    return known.sources.index(int(made)), [known.needs.index(need) for need in needs]
