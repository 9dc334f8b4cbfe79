"""The best layouts of two kinds, by samples and by features, as a minimum cut: the exact optimum.

Let x = 1 mean features, c the price of an exchange and g that of a gather (``layouts``). A producer u costs

    c·[u and its readers not all alike]              readers that are all channel by channel      a hyperedge (Lawler 1973)
    (g-c)·[some neurons reader is 1] + c·[u or some reader is 1]        with a reader by neurons: terms max(x), prices ≥ 0

(if u = 1 and a neurons reader is 0, that one needs samples; if it is 1, the whole.) Both are submodular, so an auxiliary
node each writes them as arcs of a network whose minimum s–t cut is the optimum (Kolmogorov, Zabih 2004). This holds for any
numbers, as g = n·c ≥ c: of two layouts no search is ever needed. The largest flow is the proof that no choice costs less.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import networkx as nx

from cost_models.errors import InternalError
from passes.search.cost_graph.layouts import (
    LayoutProblem,
    LayoutResult,
    SplitBy,
    evaluate_layouts,
    layout_result,
)

Vertex: TypeAlias = tuple[str, int]
SAMPLES: Vertex = ("samples", -1)
FEATURES: Vertex = ("features", -1)
PROVED = 1e-9
"""Relative distance of value and flow that rounding explains."""
SPACE = "every op on all devices, by samples or by features"


@dataclass(frozen=True)
class _Arc:
    source: Vertex
    target: Vertex
    seconds: float


def cut_layouts(problem: LayoutProblem) -> LayoutResult:
    """Find the layouts whose step is shortest, proved by a flow as large. Where it makes no difference, ops are by samples.

    Floats are fractions of powers of two, so prices become whole numbers without rounding, and the flow is exact.
    """
    started = time.perf_counter()
    arcs = _arcs(problem)
    whole = max((arc.seconds.as_integer_ratio()[1] for arc in arcs if arc.seconds < math.inf), default=1)
    network: nx.DiGraph[Vertex] = nx.DiGraph()
    network.add_nodes_from((SAMPLES, FEATURES))
    for arc in arcs:
        if arc.seconds > 0:
            price = int(Fraction(arc.seconds) * whole) if arc.seconds < math.inf else math.inf
            network.add_edge(arc.source, arc.target, capacity=price)
    # of all minimum cuts, networkx gives the one with the smallest sink side
    flow, (_, by_features) = nx.minimum_cut(network, SAMPLES, FEATURES)
    layouts: tuple[SplitBy, ...] = tuple(
        "features" if ("op", v) in by_features else "samples" for v in range(len(problem.ops))
    )
    costs = evaluate_layouts(problem, layouts)
    value, bound = costs.step_seconds, float(Fraction(int(flow), whole))
    if abs(value - bound) > PROVED * value:
        raise InternalError("layouts do not cost what the cut says", [f"{value!r} s and {bound!r} s"])
    method = f"minimum s–t cut of {len(network)} nodes and {network.number_of_edges()} arcs"
    seconds = time.perf_counter() - started
    return layout_result(layouts, costs, value, space=SPACE, method=method, search_seconds=seconds)


def _arcs(problem: LayoutProblem) -> list[_Arc]:
    """Write every price as arcs; ``i → j`` is cut, and paid, where i is by samples and j by features."""
    arcs = []
    for v, op in enumerate(problem.ops):
        by_features = problem.compute_seconds(v, "features") if problem.can_be(v, "features") else math.inf
        by_samples = problem.compute_seconds(v, "samples") + problem.reduce_seconds(v)
        arcs += [_Arc(SAMPLES, ("op", v), by_features), _Arc(("op", v), FEATURES, by_samples)]
        if op.kind != "input":
            arcs += _output_arcs(problem, v)
    return arcs


def _output_arcs(problem: LayoutProblem, u: int) -> list[_Arc]:
    """Write the price of u's output as arcs. The loss, where there are none, needs samples."""
    exchange, gather = problem.exchange_seconds(u), problem.gather_seconds(u)
    readers = problem.readers[u]
    by_neurons = [v for v in readers if problem.ops[v].kind == "neurons"]
    some, whole, every = ("some", u), ("whole", u), ("every", u)
    arcs = [_Arc(some, ("op", v), math.inf) for v in (u, *readers)]  # if any is by features, so is ``some``
    if by_neurons:
        arcs += [_Arc(whole, ("op", v), math.inf) for v in by_neurons]
        return [*arcs, _Arc(SAMPLES, some, exchange), _Arc(SAMPLES, whole, gather - exchange)]
    if not readers:
        return [*arcs, _Arc(SAMPLES, some, exchange)]
    arcs += [_Arc(("op", v), every, math.inf) for v in (u, *readers)]  # if any is by samples, so is ``every``
    return [*arcs, _Arc(every, some, exchange)]
