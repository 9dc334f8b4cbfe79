"""A search over placements, its value evaluated again, and its CPU time."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from pathlib import Path

from passes.search.cost_graph.contiguous import place_contiguous
from passes.search.cost_graph.graph import PlacementGraph, named
from passes.search.cost_graph.result import PlacementResult
from tests.support.placement_evaluator import is_allowed, is_contiguous, loads_of

DATA = Path(__file__).parents[1] / "tests" / "data"


def measured(
    search: Callable[[PlacementGraph, float], PlacementResult], graph: PlacementGraph, limit: float
) -> tuple[PlacementResult, float]:
    """A placement, evaluated again, and its user CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    found = search(graph, limit)
    seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
    placement = dict(named(graph, found.placement))
    value = max(loads_of(graph, placement).values())
    contiguous = search is not place_contiguous or is_contiguous(graph, placement)
    if not (is_allowed(graph, placement) and contiguous and math.isclose(value, found.value, rel_tol=1e-9)):
        raise AssertionError(f"{found.value} is not what the placement costs: {value}")
    return found, seconds
