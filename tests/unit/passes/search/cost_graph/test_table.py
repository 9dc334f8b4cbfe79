"""Graphs of the device-placement benchmark: the published contiguous optimum, and the best free placements known."""

from __future__ import annotations

from pathlib import Path

import pytest

from partitioner.cost_graphs.read import read_graph
from passes.search.cost_graph.contiguous import place_contiguous
from passes.search.cost_graph.graph import named
from passes.search.cost_graph.throughput import place_for_throughput
from tests.support.matrix import thinned
from tests.support.placement_evaluator import is_allowed, is_contiguous, loads_of

GRAPHS = Path(__file__).parents[5] / "tests" / "data" / "device-placement"
TABLE = {
    "LayerGraphs/bert24_inference": (17.7899, 17.7147),
    "LayerGraphs/bert24_training": (41.7458, 39.7895),
    "OperatorGraphs/bert_l-3_inference": (27.9186, 21.9084),
    "OperatorGraphs/bert_l-3_training": (65.3031, 54.2074),
    "OperatorGraphs/resnet50_inference": (124.3488, 124.3488),
}
ROUNDED = 5.1e-5
"""The table has four digits after the point."""


@pytest.mark.parametrize("name", TABLE)
def test_contiguous_is_the_published_optimum(name: str) -> None:
    graph = read_graph(GRAPHS / f"{name}.json").graph
    found = place_contiguous(graph, 60.0)
    placement = dict(named(graph, found.placement))
    assert is_allowed(graph, placement)
    assert is_contiguous(graph, placement)
    assert max(loads_of(graph, placement).values()) == pytest.approx(found.value, rel=1e-9)
    assert found.value == pytest.approx(TABLE[name][0], abs=ROUNDED)
    assert (found.certificate.solver_status, found.bound) == ("optimal", found.value)


@pytest.mark.parametrize(
    "name", thinned([name for name in TABLE if "resnet" not in name], ["LayerGraphs/bert24_training"])
)
def test_free_is_proved_optimal(name: str) -> None:
    """Without resnet50, whose proof takes a minute: ``python -m benchmarks.device_placement`` has it."""
    graph = read_graph(GRAPHS / f"{name}.json").graph
    found = place_for_throughput(graph, 60.0)
    placement = dict(named(graph, found.placement))
    assert is_allowed(graph, placement)
    assert max(loads_of(graph, placement).values()) == pytest.approx(found.value, rel=1e-9)
    assert found.value == pytest.approx(TABLE[name][1], abs=ROUNDED)
    assert found.certificate.solver_status == "optimal"
