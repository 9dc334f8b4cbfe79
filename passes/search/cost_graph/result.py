"""The answer of a search over placements of a cost graph, and the question before it: can anything fit."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from cost_models.errors import InfeasibleError, InternalError
from cost_models.units import listed
from passes.search.certificate import Certificate, relative_gap
from passes.search.cost_graph.graph import PlacementGraph, broken_rules
from passes.search.cost_graph.groups import GroupProblem

PROVED = 1e-7
"""Relative distance of value and bound at which a placement counts as optimal: the solvers' tolerance."""


LARGEST_LOAD = "largest load of a device"


@dataclass(frozen=True)
class PlacementResult:
    """A placement of a cost graph and how good it is known to be."""

    placement: tuple[int, ...]
    """A device for every node, as a position in ``GraphMachine.devices``."""
    certificate: Certificate
    """The proof, in cost units of the graph but for ``search_seconds``."""

    @property
    def value(self) -> float:
        """The objective of the placement, in cost units of the graph."""
        return self.certificate.objective_seconds

    @property
    def bound(self) -> float:
        """A number that the objective of no placement of the space is below."""
        return self.certificate.bound_seconds


def certified(
    graph: PlacementGraph,
    placement: tuple[int, ...],
    value: float,
    bound: float,
    *,
    objective: str = LARGEST_LOAD,
    space: str,
    method: str,
    started: float,
    time_limit: float,
    contiguous: bool = False,
) -> PlacementResult:
    """Check a placement on the graph itself, and say how close its ``value`` is to what is proved."""
    wrong = broken_rules(graph, placement, contiguous)
    if wrong:
        raise InternalError("a placement breaks the rules it was searched under", wrong[:5])
    seconds = time.perf_counter() - started
    bound = value if value - bound <= PROVED * value else bound  # also where rounding put the bound above
    status = "optimal" if bound == value else "time limit" if seconds >= 0.95 * time_limit else "stalled"
    return PlacementResult(
        placement,
        Certificate(
            objective=objective,
            objective_seconds=value,
            bound_seconds=bound,
            gap=relative_gap(value, bound),
            simulated_lower_bound_seconds=bound,
            space=space,
            method=method,
            solver_status=status,
            search_seconds=seconds,
        ),
    )


def check_feasible(graph: PlacementGraph, problem: GroupProblem) -> None:
    """Raise InfeasibleError where no search is needed to see that nothing fits."""
    machine = graph.machine
    if machine.cpus:
        return  # a CPU runs everything and has no memory limit
    problems = []
    for g, nodes in enumerate(problem.members):
        ids = listed((graph.nodes[v].id for v in nodes), 4)
        if math.isinf(problem.accelerator_cost[g]):
            problems.append(f"nodes {ids} cannot run on an accelerator, and there is no CPU")
        elif problem.size[g] > machine.memory_size:
            problems.append(
                f"nodes {ids} share a device and need {problem.size[g]:g}, an accelerator has {machine.memory_size:g}"
            )
    total = math.fsum(problem.size)
    if total > machine.accelerators * machine.memory_size:
        problems.append(
            f"all nodes need {total:g}, {machine.accelerators} accelerators have "
            f"{machine.accelerators * machine.memory_size:g}"
        )
    if problems:
        raise InfeasibleError(
            "the graph does not fit the machine", problems[:10], ["use more devices, or a machine with a CPU"]
        )
