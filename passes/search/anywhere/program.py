"""A placement problem as an integer program: exact on small problems, and over a few units of larger ones.

    x[u,d] ∈ {0,1}, Σ_d x[u,d] = 1                      unit u on device d
    T ≥ load(d),  Σ memory on d ≤ capacity[d]           minimize T,  bound ≤ T ≤ value

Nets of which each message is paid:

    s[e,a,b] ≥ 0                                        net e is sent from a to b
    s[e,a,b] ≤ x[p,a]                                   only from where its producer p is
    Σ_a s[e,a,b] ≥ x[r,b] - x[p,b]  for its readers r   to where a reader is and the producer is not
    Σ_b s[e,a,b] ≥ x[p,a] - x[r,a]                      implied for whole numbers; tightens the relaxation
    load(d): Σ_e,b pair(e,d,b)·(s[e,d,b] + s[e,b,d])    memory: Σ_e,a received[e]·s[e,a,d]

Nets that are paid once:

    t[e,d] ≥ x[u,d],  h[e,d] ≤ x[u,d]  for its units u  device d has a part of net e, all of it
    load(d): Σ_e bytes[e]·paid_once[d]·(t[e,d] - h[e,d])

Ties, of which device d holds a copy:

    h[i,d] ≥ x[u,d]  for units u of tie i               load(d): Σ_i tie_seconds[d,i]·h[i,d]

The sums of ties' gradients are left out: they only add, so bounds hold, and solutions are valued by ``evaluate``. Among
interchangeable devices, the first takes the heaviest unit that any of them has. Units that are fixed are constants, so a
neighbourhood is a small program. The incumbent is given to the solver as its start.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from cost_models.arrays import FloatArray
from passes.search.anywhere.problem import Home, PlacementProblem
from passes.search.ilp import IntegerProgram, Terms, Variable

MOST_CHOICES = 600
"""Units times devices up to which one program holds everything: beyond, its relaxation is too weak to prove anything in a
minute. A limit of work."""
PROGRAM_SECONDS = 4.0
"""Seconds of a program at most, where it is one of several ways: a limit of work."""


@dataclass(frozen=True)
class ProgramAnswer:
    """``home``: None if nothing better was found. ``bound_seconds``: below it lies no placement of the program's space."""

    home: Home | None
    bound_seconds: float


def program_terms(problem: PlacementProblem, free: Collection[int] | None = None) -> int:
    """Estimate the number of nonzeros of the program."""
    chosen = None if free is None else set(free)
    k, count = problem.devices, 0
    for net in problem.nets:
        touched = [u for u in net.members if chosen is None or u in chosen]
        if touched and problem.paid_once is not None:
            count += 4 * k * (len(touched) + 1)
        elif touched:
            count += len(touched) * k * (k + 2) + 4 * k * k
    return count + 3 * k * (problem.units if chosen is None else len(chosen))


def solve_program(
    problem: PlacementProblem,
    home: Sequence[int],
    value_seconds: float,
    *,
    free: Collection[int] | None = None,
    devices: Sequence[int] | None = None,
    bound_seconds: float = 0.0,
    limit_seconds: float = 10.0,
    gap: float = 1e-6,
) -> ProgramAnswer:
    """Place the ``free`` units (all if None) at best on ``devices`` (all if None), the others as ``home`` says.

    ``home`` is the incumbent, of ``value_seconds``; if it is legal it is the solver's start.
    """
    if value_seconds <= 0 or not math.isfinite(value_seconds):
        return ProgramAnswer(None, bound_seconds)
    program = _PlacementProgram(problem, home, value_seconds, free, devices, bound_seconds)
    return program.solve(limit_seconds, gap)


class _PlacementProgram:
    def __init__(
        self,
        problem: PlacementProblem,
        home: Sequence[int],
        value: float,
        free: Collection[int] | None,
        devices: Sequence[int] | None,
        bound: float,
    ) -> None:
        self.problem, self.home, self.value, self.bound = problem, list(home), value, bound
        self.scale = 100.0 / value
        self.free = set(range(problem.units)) if free is None else set(free)
        self.whole = free is None and devices is None
        self.devices = range(problem.devices)
        self.open = self.devices if devices is None else devices
        self.heaviest: list[int] = np.argsort(-problem.seconds.min(axis=0), kind="stable").tolist()
        self.groups = alike(problem) if self.whole else []
        for group in self.groups:  # the start must obey ``_symmetry``
            renamed = _first_come(group, self.home, self.heaviest)
            self.home = [renamed.get(d, d) for d in self.home]
        self.program = IntegerProgram("free_placement")
        self.start: dict[Variable, float] = {}
        self.top = self._variable("T", bound * self.scale * (1 - 1e-9), 100.0 * (1 + 1e-7), 100.0)
        self.program.minimize({self.top: 1.0})
        self.x: dict[tuple[int, int], Variable] = {}
        self.load: list[Terms] = [{self.top: -1.0} for _ in self.devices]
        self.fixed_load = [0.0 for _ in self.devices]
        self.memory: list[Terms] = [{} for _ in self.devices]
        self.fixed_memory = [0.0 for _ in self.devices]
        self._units()
        for e in range(len(problem.nets)):
            if problem.paid_once is None:
                self._messages(e)
            else:
                self._parts(e, problem.paid_once)
        for tie in range(len(problem.ties)):
            self._tie(tie)
        if self.whole:
            self._symmetry()
        self._devices()

    def _variable(
        self, name: str, low: float, high: float, start: float, *, integer: bool = False
    ) -> Variable:
        variable = self.program.variable(name, low, high, integer=integer)
        self.start[variable] = start
        return variable

    def _on(self, unit: int, device: int) -> tuple[Variable | None, float]:
        """Return (variable or None, constant) whose sum is 1 if the unit is on the device, else 0."""
        if unit in self.free:
            return self.x.get((unit, device)), 0.0
        return None, float(self.home[unit] == device)

    def _units(self) -> None:
        problem = self.problem
        for u in range(problem.units):
            if u not in self.free:
                d = self.home[u]
                self.fixed_load[d] += float(problem.seconds[d, u]) * self.scale
                self.fixed_memory[d] += float(problem.unit_bytes[u])
                continue
            for d in self.open:
                seconds = float(problem.seconds[d, u])
                possible = bool(problem.allowed[d, u]) and seconds <= self.value * (1 + 1e-9)
                here = float(self.home[u] == d)
                x = self._variable(f"x_{u}_{d}", 0, float(possible), here, integer=True)
                self.x[u, d] = x
                self.load[d][x] = seconds * self.scale
                self.memory[d][x] = float(problem.unit_bytes[u])
            self.program.row({self.x[u, d]: 1.0 for d in self.open}, "==", 1.0)

    def _parts(self, e: int, rates: FloatArray) -> None:
        """Add the parts of a net that is paid once, on every device that may have one."""
        members = self.problem.nets[e].members
        moving = [u for u in members if u in self.free]
        settled = {self.home[u] for u in members if u not in self.free}
        apart = not moving and len(settled) > 1
        for d in {*settled, *self.open} if moving else settled:
            paid = float(self.problem.net_bytes[e] * rates[d]) * self.scale
            if not paid:
                continue
            if d in settled:  # some part is there whatever moves
                self.fixed_load[d] += paid * bool(moving or apart)
            else:
                part = self._variable(f"t_{e}_{d}", 0, 1, float(any(self.home[u] == d for u in moving)))
                self.load[d][part] = paid
                for u in moving:
                    self.program.row({part: 1.0, self.x[u, d]: -1.0}, ">=", 0.0)
            if moving and d in self.open and settled <= {d}:  # all of it may be there
                here = float(all(self.home[u] == d for u in moving))
                complete = self._variable(f"h_{e}_{d}", 0, 1, here)
                self.load[d][complete] = -paid
                for u in moving:
                    self.program.row({complete: 1.0, self.x[u, d]: -1.0}, "<=", 0.0)

    def _messages(self, e: int) -> None:
        """Add the messages of a net that pays for each of them."""
        problem, net = self.problem, self.problem.nets[e]
        if not any(u in self.free for u in net.members):
            source = self.home[net.producer]
            for b in {self.home[r] for r in net.readers} - {source}:
                pair = problem.pair_seconds(e, source, b) * self.scale
                self.fixed_load[source] += pair
                self.fixed_load[b] += pair
                self.fixed_memory[b] += float(problem.received_bytes[e])
            return
        sources = list(self.open) if net.producer in self.free else [self.home[net.producer]]
        targets = self._targets(net.readers)
        sent: dict[tuple[int, int], Variable] = {}
        start_home = self.home[net.producer]
        start_targets = {self.home[r] for r in net.readers}
        for a in sources:
            for b in targets:
                if a == b:
                    continue
                start = float(a == start_home and b in start_targets)
                s = sent[a, b] = self._variable(f"s_{e}_{a}_{b}", 0, 1, start)
                pair = problem.pair_seconds(e, a, b) * self.scale
                self.load[a][s] = self.load[a].get(s, 0.0) + pair
                self.load[b][s] = self.load[b].get(s, 0.0) + pair
                if problem.received_bytes[e]:
                    self.memory[b][s] = float(problem.received_bytes[e])
                if net.producer in self.free:
                    self.program.row({s: 1.0, self.x[net.producer, a]: -1.0}, "<=", 0.0)
        for r in net.readers:
            for d in self.devices:
                self._reader(sent, net.producer, r, d)

    def _targets(self, readers: Sequence[int]) -> list[int]:
        settled = {self.home[r] for r in readers if r not in self.free}
        return sorted({*settled, *self.open} if any(r in self.free for r in readers) else settled)

    def _reader(self, sent: dict[tuple[int, int], Variable], producer: int, reader: int, d: int) -> None:
        """Add the rows of arrivals at d for the reader, and of departures from d for the producer."""
        mine, mine_constant = self._on(reader, d)
        made, made_constant = self._on(producer, d)
        for sign, arcs in (
            (1.0, [s for (_, b), s in sent.items() if b == d]),
            (-1.0, [s for (a, _), s in sent.items() if a == d]),
        ):
            terms: Terms = dict.fromkeys(arcs, 1.0)
            if mine is not None:
                terms[mine] = terms.get(mine, 0.0) - sign
            if made is not None:
                terms[made] = terms.get(made, 0.0) + sign
            constant = sign * (mine_constant - made_constant)
            if mine is None and made is None and constant <= 0:
                continue
            self.program.row(terms, ">=", constant)

    def _tie(self, tie: int) -> None:
        problem, members = self.problem, self.problem.ties[tie]
        fixed = {self.home[u] for u in members if u not in self.free}
        moving = [u for u in members if u in self.free]
        for d in self.devices:
            seconds, held_bytes = float(problem.tie_seconds[d, tie]), float(problem.tie_bytes[tie])
            if d in fixed:
                self.fixed_load[d] += seconds * self.scale
                self.fixed_memory[d] += held_bytes
            elif moving and d in self.open:
                start = float(any(self.home[u] == d for u in moving))
                held = self._variable(f"h_{tie}_{d}", 0, 1, start)
                self.load[d][held] = seconds * self.scale
                self.memory[d][held] = held_bytes
                for u in moving:
                    self.program.row({held: 1.0, self.x[u, d]: -1.0}, ">=", 0.0)

    def _symmetry(self) -> None:
        """Break the symmetry of alike devices: the i-th of them takes none of the first i heaviest units."""
        for group in self.groups:
            for place, u in enumerate(self.heaviest[: len(group) - 1]):
                for d in group[place + 1 :]:
                    self.program.limit(self.x[u, d], 0.0)

    def _devices(self) -> None:
        for d in self.devices:
            self.program.row(self.load[d], "<=", -self.fixed_load[d])
            capacity = float(self.problem.capacity_bytes[d])
            if math.isfinite(capacity) and self.memory[d]:
                size = max(capacity, 1.0)
                terms = {v: used / size for v, used in self.memory[d].items() if used}
                if terms:
                    self.program.row(terms, "<=", (capacity - self.fixed_memory[d]) / size)

    def solve(self, seconds: float, gap: float) -> ProgramAnswer:
        """Carry out :func:`solve_program`."""
        # presolve calls some programs solved that are not (``IntegerProgram.solve``); of messages, it never did
        presolve = self.problem.paid_once is None
        answer = self.program.solve(max(0.05, seconds), gap, presolve=presolve, start=self.start)
        if answer.status == "infeasible":  # nothing is as good as the incumbent, which then is the best
            return ProgramAnswer(None, self.value)
        proved = self.bound
        if math.isfinite(answer.bound):
            proved = min(max(self.bound, answer.bound / self.scale * (1 - 1e-8)), self.value)
        values = answer.values
        if values is None:
            return ProgramAnswer(None, proved)
        home = self.home.copy()
        for u in self.free:
            home[u] = max(self.open, key=lambda d: values[self.x[u, d]])
        return ProgramAnswer(tuple(home), proved)


def alike(problem: PlacementProblem) -> list[list[int]]:
    """Return groups of two or more interchangeable devices: equal seconds, links, memory and pins."""
    groups: list[list[int]] = []
    for d in range(problem.devices):
        for group in groups:
            if _interchangeable(problem, group[0], d):
                group.append(d)
                break
        else:
            groups.append([d])
    return [group for group in groups if len(group) > 1]


def _interchangeable(problem: PlacementProblem, a: int, b: int) -> bool:
    if problem.capacity_bytes[a] != problem.capacity_bytes[b]:
        return False
    swapped = np.arange(problem.devices)
    swapped[[a, b]] = swapped[[b, a]]
    return all(
        np.array_equal(x, y)
        for x, y in (
            (problem.seconds[a], problem.seconds[b]),
            (problem.tie_seconds[a], problem.tie_seconds[b]),
            (problem.allowed[a], problem.allowed[b]),
            (problem.latency, problem.latency[np.ix_(swapped, swapped)]),
            (problem.seconds_per_byte, problem.seconds_per_byte[np.ix_(swapped, swapped)]),
        )
    ) and (problem.paid_once is None or problem.paid_once[a] == problem.paid_once[b])


def _first_come(group: Sequence[int], home: Sequence[int], order: Sequence[int]) -> dict[int, int]:
    """Rename alike devices: the first name for the device that has the earliest unit of ``order``, and so on."""
    taken: list[int] = []
    for u in order:
        if home[u] in group and home[u] not in taken:
            taken.append(home[u])
    taken += [d for d in group if d not in taken]
    return dict(zip(taken, group, strict=True))
