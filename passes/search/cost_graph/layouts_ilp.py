"""The best layouts of all three kinds, as an integer program: with inputs, prices are not submodular and no cut has them.

(Multi-label cuts need an order of every op's layouts under which the prices of each edge are submodular. Between ops by
neurons, a producer needs inputs between samples and features, a reader features between samples and inputs: what reads and
is read has no order.) Per op v and producer u, everything binary but where noted:

    x[v,k]    v is laid out as k,   Σ_k x[v,k] = 1
    f[u]      u's output is by features:   x[u,features] ≤ f[u] ≤ 1 - x[u,samples]
    w[u] ≥ x[v,features]                                    continuous: u is gathered for reader v by neurons
    e[u] ≥ (reader v needs features) - f[u] - w[u]          continuous: u is exchanged
    e[u] ≥ (reader v needs samples) + f[u] - 1 - w[u]
    minimize   Σ seconds[v,k]·x[v,k] + Σ exchange[u]·e[u] + Σ gather[u]·(w[u] + x[u,inputs])

What alone costs more than a known choice is left out, so no coefficient is far above the objective.
"""

from __future__ import annotations

import math
import time

from passes.search.cost_graph.layouts import Layout, Sharded, ShardedProblem, evaluate_layouts
from passes.search.ilp import Program, Terms, Variable

PROVED = 1e-7
"""The solver's tolerance, as elsewhere."""
FAR = 0.5
"""Of the value that a program was scaled to: what is found below it is the start of another program."""
ABSOLUTE = 1e-6
"""The solver's tolerance in scaled units, of 100 for the value known."""
LAYOUTS: tuple[Layout, ...] = ("samples", "features", "inputs")
SPACE = "every op on all devices, by samples, by features or by inputs"


def improve_layouts(problem: ShardedProblem, start: Sharded, time_limit: float) -> Sharded:
    """The best layouts of three kinds, or the best that were found; ``start`` where nothing is better than it."""
    started = time.monotonic()
    deadline = started + time_limit
    best, costs = start.layouts, start.costs
    while True:
        known = costs.step_seconds
        model = _Program(problem, known)
        layouts, bound, variables = model.solve(max(0.0, deadline - time.monotonic()))
        if layouts is not None:
            found = evaluate_layouts(problem, layouts)
            if found.step_seconds < known:
                best, costs = layouts, found
        # the solver's tolerances are those of what was known: far below it, it has not looked closely
        if not 0 < costs.step_seconds < FAR * known or time.monotonic() >= deadline:
            break
    value = costs.step_seconds
    proved = value - bound <= PROVED * value
    size = f"integer program of {variables:,} variables (HiGHS)"
    return Sharded(
        best,
        costs,
        value if proved else bound,
        SPACE,
        f"{size}, from the {start.method} without inputs",
        "optimal" if proved else "time limit",
        start.search_seconds + time.monotonic() - started,
    )


class _Program:
    def __init__(self, problem: ShardedProblem, value: float) -> None:
        self.problem = problem
        self.scale, self.most = 100.0 / value, value * (1 + 1e-9)
        self.program = Program("layouts")
        self.objective: Terms = {}
        self.x: list[dict[Layout, Variable]] = []
        for v in range(len(problem.ops)):
            self._op(v)
        for u, op in enumerate(problem.ops):
            if op.kind != "input":
                self._output(u)
        self.program.minimize(self.objective)

    def _op(self, v: int) -> None:
        problem = self.problem
        row: dict[Layout, Variable] = {}
        for k in LAYOUTS:
            if not problem.can_be(v, k):
                continue
            seconds = problem.compute_seconds(v, k)
            seconds += problem.reduce_seconds(v) if k == "samples" else 0.0
            seconds += problem.gather_seconds(v) if k == "inputs" else 0.0
            if seconds <= self.most:
                row[k] = self.program.binary(f"x_{v}_{k}")
                self.objective[row[k]] = seconds * self.scale
        self.x.append(row)
        self.program.row(dict.fromkeys(row.values(), 1.0), "==", 1.0)

    def _output(self, u: int) -> None:
        problem, row = self.problem, self.x[u]
        exchange, gather = problem.exchange_seconds(u), problem.gather_seconds(u)
        if gather <= 0:
            return
        form = self.program.binary(f"f_{u}")
        whole, sent = self._paid(f"w_{u}", gather), self._paid(f"e_{u}", exchange)
        if "samples" in row:
            self.program.row({form: 1.0, row["samples"]: 1.0}, "<=", 1.0)
        if "features" in row:
            self.program.row({form: 1.0, row["features"]: -1.0}, ">=", 0.0)
        for v in problem.readers[u]:
            reads = dict(self.x[v])
            if problem.ops[v].kind == "neurons" and "features" in reads:
                self.program.row({whole: 1.0, reads.pop("features"): -1.0}, ">=", 0.0)
            split = [reads[k] for k in reads if k != "samples"]
            if split:
                terms = {sent: 1.0, form: 1.0, whole: 1.0, **dict.fromkeys(split, -1.0)}
                self.program.row(terms, ">=", 0.0)
            if "samples" in reads:
                terms = {sent: 1.0, form: -1.0, whole: 1.0, reads["samples"]: -1.0}
                self.program.row(terms, ">=", -1.0)
        if not problem.readers[u]:  # the loss
            self.program.row({sent: 1.0, form: -1.0}, ">=", 0.0)

    def _paid(self, name: str, seconds: float) -> Variable:
        """A transfer, in the objective; not to be had where it alone costs more than what is known."""
        variable = self.program.variable(name, 0, 1 if seconds <= self.most else 0)
        self.objective[variable] = min(seconds, self.most) * self.scale
        return variable

    def solve(self, seconds: float) -> tuple[tuple[Layout, ...] | None, float, int]:
        """Return layouts, if any were found; seconds that no choice is below; how many variables there are."""
        found = self.program.solve(seconds, 1e-9, absolute_gap=0.0)
        bound = (found.bound - 2 * ABSOLUTE) / self.scale
        bound = max(0.0, bound) if math.isfinite(bound) else 0.0
        values = found.values
        if values is None:
            return None, bound, found.variables
        layouts = tuple(max(row, key=lambda k: values[row[k]]) for row in self.x)
        return layouts, bound, found.variables
