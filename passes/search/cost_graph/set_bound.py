"""A proof that no placement's largest load is below a bound, from what one device can hold.

Let π ≥ 0 measure groups, Σ π = 1. Whatever the placement, some accelerator holds at least s of the measure or some CPU more
than 1/ℓ of what is left, for k accelerators and ℓ CPUs. So with V(T) the most measure that one CPU holds under load T,

    largest load ≥ T   if no set of groups with measure ≥ s = (1 - ℓ·V(T)) / k costs an accelerator less than T

The cheapest such set is an integer program over one device: no symmetry between devices, and but for the measure's one row
its relaxation is a minimum cut, so it is tight where the program over all devices is not. The best measure is the dual of
a fractional packing ("cover all groups by k sets that cost less than T"): sets found so far give the measure, the measure
asks for the cheapest set that breaks it (column generation; Gilmore and Gomory 1961 for bin packing).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import numpy as np

from cost_models.arrays import FloatArray
from passes.search.bound import Bound, BoundMethod
from passes.search.cost_graph.groups import GroupProblem
from passes.search.ilp import IntegerProgram, Terms

CLOSE = 1e-7
"""Relative distance of bound and value at which nothing is left to prove."""
SHRINK = 1 - 1e-7
"""Solvers' tolerances: a measure of 1/k is asked for a little less strictly."""
STRETCHES = 100
"""Stretches of a line that the bound begins with, at most."""
LEAST_SHARE = 1e-9
"""A smaller measure is what rounding left over: rows divided by it would have coefficients that HiGHS refuses (1e15)."""


class SetBound:
    """A search for measures that improves a bound until it meets ``value`` or time runs out."""

    def __init__(self, problem: GroupProblem, value: float) -> None:
        self.problem = problem
        self.value = value
        self.machine = problem.machine
        self.scale = 100.0 / value
        self.sets: dict[tuple[int, ...], float] = {}
        """Groups of an accelerator that are known to cost less than ``value``, with their cost."""
        self.rounds = 0
        work = np.where(np.isinf(problem.accelerator_cost), 0.0, problem.accelerator_cost)
        self.inner: FloatArray | None = work / work.sum() if work.any() else None
        """The measure of the best bound, to begin with that of work: new measures are tried half way towards it, since the
        duals of a packing by few sets lie far apart (in-out separation: Ben-Ameur and Neto 2007)."""
        self.inner_bound = 0.0
        self.failed = math.inf
        """A target that sets found so far cover fractionally: no measure proves it."""

    def know(self, homes: Iterable[int]) -> None:
        """Take note of the sets of a placement."""
        by_device: dict[int, list[int]] = {}
        for g, home in enumerate(homes):
            by_device.setdefault(int(home), []).append(g)
        for home, groups in by_device.items():
            if home < self.machine.accelerators:
                self.sets[tuple(groups)] = self.cost(groups)

    def know_stretches(self, lines: Iterable[Sequence[int]]) -> None:
        """Take note of the longest stretch below ``value`` from every place of a line: sets unlike one another."""
        problem = self.problem
        cost: list[float] = problem.accelerator_cost.tolist()
        weight: list[float] = problem.weight.tolist()
        for line in lines:
            for start in range(0, len(line), max(1, len(line) // STRETCHES)):
                held: dict[int, int] = {}
                work = sent = 0.0
                longest = start
                for i in range(start, len(line)):
                    work += cost[line[i]]
                    if work >= self.value:
                        break
                    for e in problem.nets_of[line[i]]:
                        held[e] = held.get(e, 0) + 1
                        sent += weight[e] * ((held[e] == 1) - (held[e] == len(problem.nets[e])))
                    if work + sent < self.value * (1 - CLOSE):
                        longest = i + 1
                if longest > start:
                    found = tuple(sorted(line[start:longest]))
                    self.sets[found] = self.cost(found)

    def cost(self, groups: Sequence[int]) -> float:
        """Return the load of an accelerator that holds exactly these groups."""
        inside = set(groups)
        nets = {e for g in groups for e in self.problem.nets_of[g]}
        sent: list[float] = [
            float(self.problem.weight[e]) for e in nets if not inside.issuperset(self.problem.nets[e])
        ]
        work: list[float] = self.problem.accelerator_cost[list(groups)].tolist()
        return float(math.fsum(work + sent))

    def _extended(self, groups: tuple[int, ...], measure: FloatArray, target: float) -> tuple[int, ...]:
        """Add to ``groups`` as much measure as fits under load ``target``, greedily."""
        problem = self.problem
        inside = set(groups)
        held = [sum(g in inside for g in pins) for pins in problem.nets]
        load = self.cost(groups)
        cost: list[float] = problem.accelerator_cost.tolist()
        while True:
            best, chosen = -1.0, -1
            for g in range(problem.count):
                if g in inside:
                    continue
                change = problem.growth(g, held, cost[g])
                if load + change < target * (1 - 1e-6):
                    gain = measure[g] / max(change, 1e-9 * target) if change > 0 else 1e30 + measure[g]
                    if gain > best:
                        best, chosen = gain, g
            if chosen < 0 or best <= 0:
                break
            load += problem.growth(chosen, held, cost[chosen])
            inside.add(chosen)
            for e in problem.nets_of[chosen]:
                held[e] += 1
        return tuple(sorted(inside))

    def improve(self, bound: Bound, deadline: float) -> Bound:
        """Return the best bound found until ``deadline``."""
        best = bound
        failed = self.failed if self.failed < self.value else self.value * (1 + CLOSE)
        if failed < self.value:
            target = (best.seconds + failed) / 2
        else:
            # the first step goes half way, the next to the value itself: most often that is the answer
            target = best.seconds + (self.value - best.seconds) / (1 if self.rounds else 2)
        while best.seconds < self.value * (1 - CLOSE) and time.perf_counter() < deadline:
            measure, room = self._measure(target)
            if room <= 1e-9:
                failed = self.failed = min(failed, target)
                if failed - best.seconds <= CLOSE * self.value * 100:
                    break
                target = (best.seconds + failed) / 2
                continue
            mixed = (
                measure
                if self.inner is None
                else self.inner
                if not self.rounds
                else (measure + self.inner) / 2
            )
            found, proved = self._cheapest(mixed, target, deadline)
            self.rounds += 1
            found = [self._extended(groups, w, target) for groups in found for w in (measure, mixed)] + found
            if proved > self.inner_bound:
                self.inner, self.inner_bound = mixed, proved
            if proved > best.seconds:
                best = Bound(min(proved, self.value), BoundMethod.SETS)
            known = len(self.sets)
            for groups in found:
                self.sets[groups] = self.cost(groups)
            if proved >= target * (1 - CLOSE / 10):
                target = self.value if failed > self.value else (best.seconds + failed) / 2
            elif len(self.sets) == known:
                if self.inner is None:
                    break
                self.inner = None
        return best

    def _cpu_part(self, measure: FloatArray, target: float) -> float:
        """Bound from above the measure that all CPUs hold under load ``target``: fractional knapsacks."""
        if not self.machine.cpus:
            return 0.0
        cost = self.problem.cpu_cost
        room, held = target * self.machine.cpus, 0.0
        with np.errstate(divide="ignore", invalid="ignore"):
            value = np.where(cost > 0, measure / cost, np.inf)
        for g in np.argsort(-value).tolist():
            if measure[g] <= 0 or cost[g] > target:
                continue
            part = 1.0 if cost[g] <= room else room / cost[g]
            held += part * float(measure[g])
            room -= part * float(cost[g])
            if room <= 0:
                break
        return min(held, 1.0)

    def _measure(self, target: float) -> tuple[FloatArray, float]:
        """Find the measure under which known sets that cost less than ``target`` hold least; by how much less than 1/k."""
        count, k = self.problem.count, max(1, self.machine.accelerators)
        program = IntegerProgram("measure")
        pi = [program.variable(f"pi_{g}") for g in range(count)]
        room = program.variable("room", None)
        program.minimize({room: -1.0})
        program.row(dict.fromkeys(pi, 1.0), "==", 1.0)
        taken: Terms = {}
        if self.machine.cpus:
            # dual of the fractional knapsack: measure on CPUs ≤ price·ℓ·T + Σ (π - price·cost)+
            price = program.variable("price")
            for g in range(count):
                cpu = program.variable(f"cpu_{g}")
                taken[cpu] = 1.0
                if self.problem.cpu_cost[g] <= target:
                    cost = float(self.problem.cpu_cost[g]) * self.scale
                    program.row({cpu: 1.0, pi[g]: -1.0, price: cost}, ">=", 0.0)
            taken[price] = target * self.scale * self.machine.cpus
        for groups, cost in self.sets.items():
            if cost < target * (1 - 1e-9):
                program.row({**{pi[g]: float(k) for g in groups}, **taken, room: float(k)}, "<=", 1.0)
        program.row({room: 1.0}, "<=", 1.0)
        solution = program.solve()
        values = solution.values
        if solution.status != "optimal" or values is None:
            return np.full(count, 1.0 / count), 0.0
        measure = np.maximum([values[variable] for variable in pi], 0.0)
        return measure / max(measure.sum(), 1e-300), values[room]

    def _cheapest(
        self, measure: FloatArray, target: float, deadline: float
    ) -> tuple[list[tuple[int, ...]], float]:
        """Find cheap sets with enough measure, and the load that no placement's largest one is then below."""
        k = max(1, self.machine.accelerators)
        share = (1.0 - self._cpu_part(measure, target)) / k * SHRINK
        if share <= LEAST_SHARE:
            return [], 0.0  # the CPUs might hold it all
        seconds = max(0.05, deadline - time.perf_counter())
        groups, proved = cheapest_set(self.problem, measure, share, self.scale, seconds)
        proved *= 1 - 1e-9
        if self.machine.cpus:
            proved = min(proved, target)
        return [groups] if groups else [], proved


def cheapest_set(
    problem: GroupProblem, measure: FloatArray, share: float, scale: float, seconds: float
) -> tuple[tuple[int, ...], float]:
    """Find the cheapest set of groups on one accelerator with at least ``share`` of a measure, by an integer program.

    y[g] ∈ {0,1} is in the set     t[e] ≥ y[g] net e is touched     h[e] ≤ y[g] net e is held whole, g of e
    minimize Σ cost[g]·y[g] + Σ weight[e]·(t[e] - h[e])     Σ π[g]·y[g] ≥ share     Σ size[g]·y[g] ≤ memory

    Returns (groups, proved lower bound on their cost); no groups if none was found in ``seconds``.
    """
    program = IntegerProgram("cheapest")
    allowed = ~np.isinf(problem.accelerator_cost)
    y = [program.variable(f"y_{g}", 0, int(allowed[g]), integer=True) for g in range(problem.count)]
    objective: Terms = {}
    for g, variable in enumerate(y):
        objective[variable] = float(problem.accelerator_cost[g]) * scale if allowed[g] else 0.0
    rows: list[Terms] = []
    for e, pins in enumerate(problem.nets):
        weight = float(problem.weight[e]) * scale
        if len(pins) == 2:
            g, h = pins
            cut = program.variable(f"c_{e}", 0, 1)
            objective[cut] = weight
            rows += [{cut: 1.0, y[g]: -1.0, y[h]: 1.0}, {cut: 1.0, y[g]: 1.0, y[h]: -1.0}]
            continue
        touched, whole = program.variable(f"t_{e}", 0, 1), program.variable(f"h_{e}", 0, 1)
        objective[touched], objective[whole] = weight, -weight
        for g in pins:
            rows += [{touched: 1.0, y[g]: -1.0}, {y[g]: 1.0, whole: -1.0}]
    program.minimize(objective)
    for terms in rows:
        program.row(terms, ">=", 0.0)
    program.row({v: float(m) / share for v, m in zip(y, measure, strict=True) if m > 0}, ">=", 1.0)
    if problem.memory_binds:
        size = problem.machine.memory_size
        program.row({v: -float(s) / size for v, s in zip(y, problem.size, strict=True)}, ">=", -1.0)
    found = program.solve(seconds, 1e-9)
    values, bound = found.values, found.bound / scale
    if values is None:
        return (), bound
    return tuple(g for g, variable in enumerate(y) if values[variable] > 0.5), bound
