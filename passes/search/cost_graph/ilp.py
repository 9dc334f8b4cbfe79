"""The whole free placement as one integer program: what closes the last gap of small graphs.

    x[g,d] ∈ {0,1}, Σ_d x[g,d] = 1       t[e,d] ≥ x[g,d] net e touches d      h[e,d] ≤ x[g,d] d holds e whole, g of e
    T ≥ Σ_g cost[g,d]·x[g,d] + Σ_e weight[e]·(t[e,d] - h[e,d]) of an accelerator, without nets of a CPU
    Σ_g size[g]·x[g,d] ≤ memory of an accelerator        minimize T,  bound ≤ T ≤ value

Devices of a kind are alike, so the i-th costliest group goes to one of the first i accelerators.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pulp

from passes.search.cost_graph.groups import GroupProblem

MOST_CHOICES = 600
"""Groups times devices: beyond, the relaxation is too weak to prove anything in a minute."""


def solve_program(
    problem: GroupProblem, bound: float, value: float, seconds: float
) -> tuple[tuple[int, ...] | None, float]:
    """(a placement better than ``value`` if one was found, proved lower bound)."""
    model = _Program(problem, bound, value)
    return model.solve(seconds)


class _Program:
    def __init__(self, problem: GroupProblem, bound: float, value: float) -> None:
        self.problem, self.bound, self.value = problem, bound, value
        self.scale = 100.0 / value
        machine = problem.machine
        self.lp = pulp.LpProblem("placement", pulp.LpMinimize)
        self.top = pulp.LpVariable("T", lowBound=bound * self.scale * (1 - 1e-9), upBound=100.0 * (1 + 1e-9))
        self.lp.setObjective(pulp.LpAffineExpression({self.top: 1.0}))
        devices = range(len(machine.devices))
        self.x = [
            [pulp.LpVariable(f"x_{g}_{d}", cat=pulp.LpBinary) for d in devices] for g in range(problem.count)
        ]
        for row in self.x:
            self._row(dict.fromkeys(row, 1.0), pulp.LpConstraintEQ, 1.0)
        for d in devices:
            self._device(d, d < machine.accelerators)
        cheapest_last = np.argsort(
            np.where(np.isinf(problem.accelerator_cost), -1.0, -problem.accelerator_cost)
        )
        for i, g in enumerate(cheapest_last.tolist()):
            for d in range(i + 1, machine.accelerators):
                self.x[g][d].upBound = 0

    def _row(self, terms: dict[Any, float], sense: int, value: float) -> None:
        self.lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, rhs=value))

    def _device(self, d: int, accelerator: bool) -> None:
        problem = self.problem
        load: dict[Any, float] = {self.top: -1.0}
        for g, row in enumerate(self.x):
            cost = float((problem.accelerator_cost if accelerator else problem.cpu_cost)[g])
            if cost > self.value:
                row[d].upBound = 0
            else:
                load[row[d]] = cost * self.scale
        if accelerator:
            for e, pins in enumerate(problem.nets):
                weight = float(problem.weight[e]) * self.scale
                touched, whole = pulp.LpVariable(f"t_{e}_{d}", 0, 1), pulp.LpVariable(f"h_{e}_{d}", 0, 1)
                load[touched], load[whole] = weight, -weight
                for g in pins:
                    self._row({touched: 1.0, self.x[g][d]: -1.0}, pulp.LpConstraintGE, 0.0)
                    self._row({whole: 1.0, self.x[g][d]: -1.0}, pulp.LpConstraintLE, 0.0)
            if problem.memory_binds:
                limit = problem.machine.memory_size
                held = {row[d]: float(problem.size[g]) / limit for g, row in enumerate(self.x)}
                self._row(held, pulp.LpConstraintLE, 1.0)
        self._row(load, pulp.LpConstraintLE, 0.0)

    def solve(self, seconds: float) -> tuple[tuple[int, ...] | None, float]:
        """As :func:`solve_program`."""
        self.lp.solve(pulp.HiGHS(msg=False, presolve="off", threads=1, timeLimit=seconds, gapRel=1e-8))
        if self.lp.sol_status == pulp.LpSolutionInfeasible:
            return None, self.value  # nothing is as good as what is known, which then is the best
        proved = float(self.lp.solverModel.getInfo().mip_dual_bound) / self.scale
        proved = min(max(self.bound, proved * (1 - 1e-8)), self.value)
        if self.lp.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return None, proved
        homes = tuple(int(np.argmax([variable.value() or 0.0 for variable in row])) for row in self.x)
        return homes, proved
