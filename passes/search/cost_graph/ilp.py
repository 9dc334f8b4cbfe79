"""The whole free placement as one integer program: what closes the last gap of small graphs.

    x[g,d] ∈ {0,1}, Σ_d x[g,d] = 1       t[e,d] ≥ x[g,d] net e touches d      h[e,d] ≤ x[g,d] d holds e whole, g of e
    T ≥ Σ_g cost[g,d]·x[g,d] + Σ_e weight[e]·(t[e,d] - h[e,d]) of an accelerator, without nets of a CPU
    Σ_g size[g]·x[g,d] ≤ memory of an accelerator        minimize T,  bound ≤ T ≤ value

Devices of a kind are alike, so the i-th costliest group goes to one of the first i accelerators.
"""

from __future__ import annotations

import numpy as np

from passes.search.cost_graph.groups import GroupProblem
from passes.search.ilp import IntegerProgram, Terms


class PlacementProgram:
    """The program that looks for a placement whose largest load is between ``bound`` and ``value``."""

    def __init__(self, problem: GroupProblem, bound: float, value: float) -> None:
        self.problem, self.bound, self.value = problem, bound, value
        self.scale = 100.0 / value
        machine = problem.machine
        self.program = IntegerProgram("placement")
        self.top = self.program.variable("T", bound * self.scale * (1 - 1e-9), 100.0 * (1 + 1e-9))
        self.program.minimize({self.top: 1.0})
        devices = range(len(machine.devices))
        self.x = [[self.program.binary(f"x_{g}_{d}") for d in devices] for g in range(problem.count)]
        for row in self.x:
            self.program.row(dict.fromkeys(row, 1.0), "==", 1.0)
        for d in devices:
            self._device(d, d < machine.accelerators)
        cheapest_last = np.argsort(
            np.where(np.isinf(problem.accelerator_cost), -1.0, -problem.accelerator_cost)
        )
        for i, g in enumerate(cheapest_last.tolist()):
            for d in range(i + 1, machine.accelerators):
                self.program.limit(self.x[g][d], 0.0)

    def _device(self, d: int, accelerator: bool) -> None:
        problem = self.problem
        load: Terms = {self.top: -1.0}
        for g, row in enumerate(self.x):
            cost = float((problem.accelerator_cost if accelerator else problem.cpu_cost)[g])
            if cost > self.value:
                self.program.limit(row[d], 0.0)
            else:
                load[row[d]] = cost * self.scale
        if accelerator:
            for e, pins in enumerate(problem.nets):
                weight = float(problem.weight[e]) * self.scale
                touched = self.program.variable(f"t_{e}_{d}", 0, 1)
                whole = self.program.variable(f"h_{e}_{d}", 0, 1)
                load[touched], load[whole] = weight, -weight
                for g in pins:
                    self.program.row({touched: 1.0, self.x[g][d]: -1.0}, ">=", 0.0)
                    self.program.row({whole: 1.0, self.x[g][d]: -1.0}, "<=", 0.0)
            if problem.memory_binds:
                limit = problem.machine.memory_size
                held = {row[d]: float(problem.size[g]) / limit for g, row in enumerate(self.x)}
                self.program.row(held, "<=", 1.0)
        self.program.row(load, "<=", 0.0)

    def solve(self, seconds: float) -> tuple[tuple[int, ...] | None, float]:
        """Return a placement better than ``value`` if one was found, and a proved lower bound, both of the largest load."""
        found = self.program.solve(seconds, 1e-8)
        if found.status == "infeasible":  # nothing is as good as what is known, which then is the best
            return None, self.value
        proved = min(max(self.bound, found.bound / self.scale * (1 - 1e-8)), self.value)
        values = found.values
        if values is None:
            return None, proved
        return tuple(int(np.argmax([values[variable] for variable in row])) for row in self.x), proved
