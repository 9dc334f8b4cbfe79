"""Integer linear programs: stated row by row through PuLP, solved by HiGHS, or by CBC where HiGHS is absent.

    program = IntegerProgram("example")
    x, y = program.binary("x"), program.variable("y", high=2.5)
    program.minimize({x: -3.0, y: -2.0})
    program.row({x: 1.0, y: 1.0}, "<=", 3.0)
    solution = program.solve(seconds=10.0, gap=1e-6)
    solution.status, solution.values[x], solution.bound          # "optimal", 1.0, -7.0

PuLP sorts columns by the names of the variables; rows stay as they were added. Where several solutions are equally good,
that order decides which of them is found, so a search returns the same placement only under the same names and rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import pulp

Variable: TypeAlias = pulp.LpVariable
"""A column of a program; hashable, to be the key of rows and of values."""
Terms: TypeAlias = dict[Variable, float]
"""Coefficients; PuLP's sums of variables are such dicts too."""
Status: TypeAlias = Literal["optimal", "feasible", "infeasible", "unknown"]

_SENSES = {"<=": pulp.LpConstraintLE, "==": pulp.LpConstraintEQ, ">=": pulp.LpConstraintGE}
_STATUS: dict[int, Status] = {
    pulp.LpSolutionOptimal: "optimal",
    pulp.LpSolutionIntegerFeasible: "feasible",
    pulp.LpSolutionInfeasible: "infeasible",
}
_HIGHS_FEASIBLE = 2
"""``kSolutionStatusFeasible`` of HiGHS: the solution keeps all rows and bounds."""


@dataclass(frozen=True)
class SolverAnswer:
    """The answer of a solver to a program that is minimized."""

    status: Status
    """"feasible": time ran out with a solution, "unknown": without one."""
    values: Mapping[Variable, float] | None
    """The value of every variable; None unless the status is "optimal" or "feasible"."""
    bound: float
    """A number that no solution's objective is below: inf if there is no solution, -inf if nothing is proved."""
    solver: str
    """"HiGHS" or "CBC"."""
    variables: int
    """Columns of the program."""


class IntegerProgram:
    """A minimization over variables and rows."""

    def __init__(self, name: str) -> None:
        self._lp = pulp.LpProblem(name, pulp.LpMinimize)
        self._variables: list[Variable] = []

    def variable(
        self, name: str, low: float | None = 0.0, high: float | None = None, *, integer: bool = False
    ) -> Variable:
        """Add a variable between ``low`` and ``high``; None: without limit. Names must differ."""
        category = pulp.LpInteger if integer else pulp.LpContinuous
        variable = pulp.LpVariable(name, low, high, cat=category)
        self._variables.append(variable)
        return variable

    def binary(self, name: str) -> Variable:
        """Add a variable that is 0 or 1."""
        return self.variable(name, 0.0, 1.0, integer=True)

    def limit(self, variable: Variable, high: float) -> None:
        """Replace the upper limit of a variable."""
        variable.upBound = high

    def minimize(self, terms: Terms) -> None:
        """Set the objective."""
        self._lp.setObjective(pulp.LpAffineExpression(terms))

    def row(self, terms: Terms, sense: Literal["<=", "==", ">="], value: float) -> None:
        """Add the row ``Σ coefficient · variable  sense  value``."""
        self._lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), _SENSES[sense], rhs=value))

    def solve(
        self,
        seconds: float | None = None,
        gap: float | None = None,
        *,
        absolute_gap: float | None = None,
        presolve: bool = False,
        start: Mapping[Variable, float] | None = None,
    ) -> SolverAnswer:
        """Solve on one thread, for at most ``seconds``, until (value - bound) / value is at most ``gap``.

        ``start`` is a known solution, a value for every variable in a row or in the objective. None leaves a limit to the
        solver. ``presolve`` is off unless asked for: HiGHS 1.15 takes some continuous variables for implied integers there
        and then calls a solution optimal that is not (tests/unit/passes/search/feature/test_optimum.py, seed 227: 7 % too
        dear).
        """
        limits = {"timeLimit": seconds, "gapRel": gap, "gapAbs": absolute_gap, "threads": 1, "msg": False}
        solver = pulp.HiGHS(**limits, **({} if presolve else {"presolve": "off"}))
        if solver.available():
            if start is not None:
                solver.callSolver = lambda lp: _run_from(lp, start)
        else:
            for variable, value in (start or {}).items():
                variable.setInitialValue(value)
            solver = pulp.PULP_CBC_CMD(**limits, warmStart=start is not None)
        self._lp.solve(solver)
        return self._solution()

    def _solution(self) -> SolverAnswer:
        """Read the answer.

        After a time limit PuLP's ``status`` still reads "Optimal": ``sol_status`` tells the two apart. PuLP passes no bound
        on: HiGHS itself is asked for it (it keeps one of programs with integers only), CBC's is lost.
        """
        status = _STATUS.get(self._lp.sol_status, "unknown")
        model: Any = self._lp.solverModel
        info = model.getInfo() if hasattr(model, "getInfo") else None
        if status != "infeasible" and info is not None:
            legal = info.primal_solution_status == _HIGHS_FEASIBLE
            status = "unknown" if not legal else "feasible" if status == "unknown" else status
        found = status in ("optimal", "feasible")
        bound = math.inf if status == "infeasible" else -math.inf
        if info is not None and self._lp.isMIP() and math.isfinite(info.mip_dual_bound):
            bound = float(info.mip_dual_bound)
        elif status == "optimal":
            bound = float(pulp.value(self._lp.objective))
        return SolverAnswer(
            status,
            {v: float(v.value() or 0.0) for v in self._variables} if found else None,
            bound,
            "CBC" if info is None else "HiGHS",
            self._lp.numVariables(),
        )


def _run_from(lp: Any, start: Mapping[Variable, float]) -> None:
    """Give HiGHS a known solution of a program that PuLP has built, then run it."""
    values = np.array([start[variable] for variable in lp.variables()])
    lp.solverModel.setSolution(len(values), np.arange(len(values), dtype=np.int32), values)
    lp.solverModel.run()
