"""Contiguous and free placements against every assignment of small graphs, and bounds that hold."""

from __future__ import annotations

import math

import pytest

from cost_models.errors import InfeasibleError
from passes.search.cost_graph.contiguous import place_contiguous
from passes.search.cost_graph.graph import evaluate, named
from passes.search.cost_graph.result import PlacementResult
from passes.search.cost_graph.throughput import place_for_throughput
from tests.support.matrix import some
from tests.support.placement_evaluator import (
    best_by_trying_all,
    is_allowed,
    is_contiguous,
    loads_of,
    random_graph,
)

KINDS = {
    "plain": {"count": 8, "accelerators": 2},
    "three": {"count": 7, "accelerators": 3},
    "colours": {"count": 8, "accelerators": 2, "colours": True},
    "cpu": {"count": 7, "accelerators": 2, "cpus": 1},
    "tight": {"count": 8, "accelerators": 2, "tight": True},
    "tight with a cpu": {"count": 7, "accelerators": 2, "cpus": 1, "tight": True, "colours": True},
    "training": {"count": 4, "accelerators": 2, "training": True, "colours": True},
}


@pytest.mark.parametrize("seed", some(range(4)))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "free"])
def test_the_search_finds_the_optimum_of_small_graphs(kind: str, contiguous: bool, seed: int) -> None:
    graph = random_graph(seed, **KINDS[kind])
    best = best_by_trying_all(graph, contiguous)
    try:
        found = place_contiguous(graph, 5.0) if contiguous else place_for_throughput(graph, 20.0)
    except InfeasibleError:
        assert math.isinf(best), (kind, seed)
        return
    check(graph, found, contiguous)
    assert found.bound <= best * (1 + 1e-9), (kind, seed)
    assert found.value == pytest.approx(best, rel=1e-9), (kind, seed)
    assert found.certificate.solver_status == "optimal", (kind, seed)


def check(graph, found: PlacementResult, contiguous: bool) -> None:
    placement = dict(named(graph, found.placement))
    assert is_allowed(graph, placement)
    assert not contiguous or is_contiguous(graph, placement)
    loads = loads_of(graph, placement)
    assert found.value == pytest.approx(max(loads.values()), rel=1e-12, abs=1e-12)
    assert list(loads.values()) == pytest.approx(
        list(evaluate(graph, found.placement).loads), rel=1e-12, abs=1e-12
    )
    assert found.bound <= found.value
