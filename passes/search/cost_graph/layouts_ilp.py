"""The best layouts of all three kinds: a minimum cut, and an integer program where ops may be split by inputs.

problem ─► minimum cut: the best by samples and features ─► no op can be split by inputs, or one device: done
                                                         └► integer program: the best by samples, features and inputs

With inputs, prices are not submodular, and no cut has them. (Multi-label cuts need an order of every op's layouts under
which the prices of each edge are submodular. Between ops by neurons, a producer needs inputs between samples and features,
a reader features between samples and inputs: what reads and is read has no order.)

    x[v,k] ∈ {0,1}     op v is laid out as k,  Σ_k x[v,k] = 1
    f[u] ∈ {0,1}       the output of producer u is by features:  x[u,features] ≤ f[u] ≤ 1 - x[u,samples]
    w[u] ≥ 0           u is gathered for a reader v by neurons:  w[u] ≥ x[v,features]
    e[u] ≥ 0           u is exchanged:  e[u] ≥ (reader v needs features) - f[u] - w[u]
                                        e[u] ≥ (reader v needs samples) + f[u] - 1 - w[u]
    minimize           Σ seconds[v,k]·x[v,k] + Σ exchange[u]·e[u] + Σ gather[u]·(w[u] + x[u,inputs])

What alone costs more than a known choice is left out, so no coefficient is far above the objective.
"""

from __future__ import annotations

import math
import time

from cost_models.errors import GraphError
from passes.search.cost_graph.layouts import (
    LayoutProblem,
    LayoutResult,
    SplitBy,
    evaluate_layouts,
    layout_result,
)
from passes.search.cost_graph.layouts_cut import cut_layouts
from passes.search.ilp import IntegerProgram, Terms, Variable

PROVED = 1e-7
"""The solver's tolerance, as elsewhere."""
ABSOLUTE = 1e-6
"""The solver's tolerance in scaled units, of 100 for the value known."""
FAR = 0.5
"""Share of the value that a program was scaled to: a step below it is the start of another program."""
LAYOUTS: tuple[SplitBy, ...] = ("samples", "features", "inputs")
SPACE = "every op on all devices, by samples, by features or by inputs"


def place_layouts(
    problem: LayoutProblem, time_limit: float = 60.0, *, by_inputs: bool = True
) -> LayoutResult:
    """Find the best layouts, with proof; with ``by_inputs`` ops may be split by their inputs too."""
    _check_prices(problem)
    found = cut_layouts(problem)
    splits = any(problem.can_be(v, "inputs") for v in range(len(problem.ops)))
    if not (by_inputs and splits) or problem.devices == 1 or found.step_seconds == 0:
        return found
    return improve_layouts(problem, found, time_limit)


def _check_prices(problem: LayoutProblem) -> None:
    problems = [
        f"{op.id}: {op.activation_bytes:g} bytes of output, {op.parameter_bytes:g} of parameters"
        for v, op in enumerate(problem.ops)
        if not math.isfinite(problem.gather_seconds(v) + problem.reduce_seconds(v))
    ]
    if problems:
        raise GraphError(
            f"at {problem.bytes_per_second:g} B/s sending takes longer than numbers can say",
            problems[:5],
            ["give a larger --bandwidth, or correct the file"],
        )


def improve_layouts(problem: LayoutProblem, start: LayoutResult, time_limit: float) -> LayoutResult:
    """Find the best layouts of three kinds, or the best until time is up; ``start`` where nothing is better than it."""
    started = time.perf_counter()
    deadline = started + time_limit
    best, costs = start.layouts, start.costs
    while True:
        known = costs.step_seconds
        model = _LayoutProgram(problem, known)
        layouts, bound, variables = model.solve(max(0.0, deadline - time.perf_counter()))
        if layouts is not None:
            found = evaluate_layouts(problem, layouts)
            if found.step_seconds < known:
                best, costs = layouts, found
        # the solver's tolerances are those of what was known: far below it, it has not looked closely
        if not 0 < costs.step_seconds < FAR * known or time.perf_counter() >= deadline:
            break
    value = costs.step_seconds
    return layout_result(
        best,
        costs,
        value if value - bound <= PROVED * value else bound,
        space=SPACE,
        method=f"integer program of {variables:,} variables (HiGHS), from the {start.certificate.method} without inputs",
        search_seconds=start.certificate.search_seconds + time.perf_counter() - started,
    )


class _LayoutProgram:
    def __init__(self, problem: LayoutProblem, value: float) -> None:
        self.problem = problem
        self.scale, self.most = 100.0 / value, value * (1 + 1e-9)
        self.program = IntegerProgram("layouts")
        self.objective: Terms = {}
        self.x: list[dict[SplitBy, Variable]] = []
        for v in range(len(problem.ops)):
            self._op(v)
        for u, op in enumerate(problem.ops):
            if op.kind != "input":
                self._output(u)
        self.program.minimize(self.objective)

    def _op(self, v: int) -> None:
        problem = self.problem
        row: dict[SplitBy, Variable] = {}
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
        """Add a transfer to the objective; it is excluded where it alone costs more than the best known layouts."""
        variable = self.program.variable(name, 0, 1 if seconds <= self.most else 0)
        self.objective[variable] = min(seconds, self.most) * self.scale
        return variable

    def solve(self, seconds: float) -> tuple[tuple[SplitBy, ...] | None, float, int]:
        """Return layouts, if any were found; a lower bound on the seconds of any; how many variables there are."""
        found = self.program.solve(seconds, 1e-9, absolute_gap=0.0)
        bound = (found.bound - 2 * ABSOLUTE) / self.scale
        bound = max(0.0, bound) if math.isfinite(bound) else 0.0
        values = found.values
        if values is None:
            return None, bound, found.variables
        layouts = tuple(max(row, key=lambda k: values[row[k]]) for row in self.x)
        return layouts, bound, found.variables
