"""Integer programs: what the scaffold reads from the solvers."""

from __future__ import annotations

import math
import random

import pulp
import pytest

from passes.search.ilp import IntegerProgram, Variable


def knapsack() -> tuple[IntegerProgram, dict[str, Variable]]:
    """Worth 10 at most, by b and c."""
    program = IntegerProgram("knapsack")
    worth = {"a": 6.0, "b": 5.0, "c": 5.0}
    size = {"a": 5.0, "b": 4.0, "c": 5.0}
    items = {name: program.binary(name) for name in worth}
    program.minimize({items[name]: -value for name, value in worth.items()})
    program.row({items[name]: value for name, value in size.items()}, "<=", 9.4)
    program.row({items["a"]: 1.0, items["b"]: 1.0}, "<=", 1.0)
    return program, items


def makespan() -> tuple[IntegerProgram, Variable, dict[Variable, float]]:
    """80 jobs of random length on 7 machines, the time of the busiest one, and a solution: all jobs on the first machine.

    Nobody proves such an optimum: the relaxation gives an equal share of the work, and all machines are alike.
    """
    program, dice = IntegerProgram("makespan"), random.Random(0)
    top = program.variable("top")
    program.minimize({top: 1.0})
    jobs = [dice.uniform(1.0, 2.0) for _ in range(80)]
    on = [[program.binary(f"x_{j}_{m}") for m in range(7)] for j in range(80)]
    for row in on:
        program.row(dict.fromkeys(row, 1.0), "==", 1.0)
    for m in range(7):
        program.row({top: -1.0, **{on[j][m]: seconds for j, seconds in enumerate(jobs)}}, "<=", 0.0)
    start = {variable: float(m == 0) for row in on for m, variable in enumerate(row)}
    return program, top, {top: sum(jobs), **start}


def test_optimum() -> None:
    program, items = knapsack()
    found = program.solve(60.0, 1e-9)
    assert found.status == "optimal"
    assert found.values == {items["a"]: 0.0, items["b"]: 1.0, items["c"]: 1.0}
    assert found.bound == pytest.approx(-10.0)
    assert (found.solver, found.variables) == ("HiGHS", 3)


def test_infeasible() -> None:
    program, items = knapsack()
    program.row(dict.fromkeys(items.values(), 1.0), ">=", 3.0)
    found = program.solve()
    assert (found.status, found.values, found.bound) == ("infeasible", None, math.inf)


def test_a_limit_on_a_variable() -> None:
    program, items = knapsack()
    program.limit(items["c"], 0.0)
    found = program.solve()
    assert found.values == {items["a"]: 1.0, items["b"]: 0.0, items["c"]: 0.0}


def test_time_runs_out_with_a_solution_and_a_bound() -> None:
    program, top, start = makespan()
    found = program.solve(1.0, 0.0, start=start)
    assert found.status == "feasible", "PuLP's own status says optimal here"
    assert found.values is not None
    assert -math.inf < found.bound < found.values[top] <= start[top]


def test_time_runs_out_without_a_solution() -> None:
    program, _, _ = makespan()
    found = program.solve(0.0, 0.0)
    assert (found.status, found.values, found.bound) == ("unknown", None, -math.inf)


def test_a_gap_ends_the_search() -> None:
    program, top, start = makespan()
    found = program.solve(60.0, 0.2)
    assert found.status == "optimal", "within the gap that was asked for"
    assert found.values is not None
    assert found.bound <= found.values[top] <= found.bound / (1 - 0.2) * (1 + 1e-6)
    assert found.bound >= start[top] / 7 * (1 - 1e-6), "an equal share of the work"


def test_a_program_without_integers() -> None:
    program = IntegerProgram("linear")
    x, y = program.variable("x", None), program.variable("y", high=2.0)
    program.minimize({x: -1.0, y: -1.0})
    program.row({x: 1.0, y: 2.0}, "==", 3.0)
    found = program.solve()
    assert found.values == {x: 3.0, y: 0.0}
    assert found.bound == pytest.approx(-3.0), "HiGHS itself gives no bound here"


def test_presolve_changes_no_answer() -> None:
    program, _ = knapsack()
    assert program.solve(presolve=True).bound == pytest.approx(-10.0)


def test_cbc_where_highs_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    program, items = knapsack()
    found = program.solve(60.0, 1e-9, start={items["a"]: 1.0, items["b"]: 0.0, items["c"]: 0.0})
    assert (found.status, found.solver) == ("optimal", "CBC")
    assert found.values == {items["a"]: 0.0, items["b"]: 1.0, items["c"]: 1.0}
    assert found.bound == pytest.approx(-10.0)
    program.row(dict.fromkeys(items.values(), 1.0), ">=", 3.0)
    assert program.solve().status == "infeasible"
