"""What a search over placements of a cost graph returns, and what it asks before it starts."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from cost_models.errors import InfeasibleError, InternalError
from cost_models.units import listed
from passes.search.cost_graph.graph import PlacementGraph, broken_rules, evaluate
from passes.search.cost_graph.groups import GroupProblem

PROVED = 1e-7
"""Relative distance of value and bound at which a placement counts as optimal: the solvers' tolerance."""


@dataclass(frozen=True)
class Placed:
    """``placement``: device position per node. No placement of ``space`` has an objective below ``bound``."""

    placement: tuple[int, ...]
    value: float
    bound: float
    objective: str
    space: str
    method: str
    status: str
    """ "optimal", "stalled" (the searches ended before the gap did) or "time limit"."""
    seconds: float

    @property
    def gap(self) -> float:
        """(value - bound) / value."""
        return max(0.0, (self.value - self.bound) / self.value) if self.value > 0 else 0.0


LARGEST_LOAD = "largest load of a device"


def placed(
    graph: PlacementGraph,
    placement: tuple[int, ...],
    bound: float,
    *,
    space: str,
    method: str,
    started: float,
    time_limit: float,
    contiguous: bool = False,
) -> Placed:
    """The result of a search, evaluated and checked on the graph itself."""
    wrong = broken_rules(graph, placement, contiguous)
    if wrong:
        raise InternalError("a placement breaks the rules it was searched under", wrong[:5])
    value = evaluate(graph, placement).max_load
    if value - bound <= PROVED * value:
        bound, status = value, "optimal"
    else:
        status = "time limit" if time.monotonic() - started >= 0.95 * time_limit else "stalled"
    seconds = time.monotonic() - started
    return Placed(placement, value, bound, LARGEST_LOAD, space, method, status, seconds)


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
