"""Real plans of every kind, from the planner to the page: the page draws them all, and tells what the plan says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cost_models.units import format_seconds
from partitioner import Plan
from partitioner.cost_graphs.plan import GraphPlan
from partitioner.pictures.data import report_data
from tests.browser.conftest import Opener
from tests.support.real_plans import GRAPH_PLANS, PLANS, hybrid, layer, llama_70b_64


@pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)
def test_a_real_plan_is_drawn(open_page: Opener, make: Callable[[], Plan]) -> None:
    plan = make()
    opened = open_page.data(report_data([plan]))
    text = opened.page.locator("#summary").inner_text()
    assert format_seconds(plan.prediction.step_seconds) in text
    assert opened.boxes() > 3
    assert opened.page.locator("#what-if .chart").count() >= 2
    assert all(f"stage {index}" in text for index in range(len(plan.stages)))


def test_the_details_of_an_op_explain_it(open_page: Opener) -> None:
    opened = open_page.data(report_data([hybrid()], ["a plan.json"]))
    search = opened.page.locator("#graph input").first
    search.fill("linear")
    search.press("ArrowDown")
    search.press("Enter")
    details = opened.details()
    assert "stage 0 on ranks 0-1" in details
    assert "groups and degrees were fixed by hand" in details
    assert "partitioner explain 'a plan.json' linear --model MODEL" in details


def test_two_real_plans_side_by_side(open_page: Opener) -> None:
    opened = open_page.data(report_data([layer(), hybrid()]))
    assert "strategy: layer -> hybrid" in opened.page.locator("#differences").inner_text()
    assert opened.page.locator("#timeline canvas").count() == 2


def test_the_large_one_is_small_and_quick(open_page: Opener, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    llama_70b_64().report(file)
    assert file.stat().st_size < 2_000_000
    opened = open_page.file(file)
    assert "layers.0–" in opened.page.locator("#graph").inner_text() or opened.boxes() > 3


@pytest.mark.parametrize("make", GRAPH_PLANS.values(), ids=GRAPH_PLANS)
def test_a_plan_of_a_cost_graph_is_drawn(open_page: Opener, make: Callable[[], GraphPlan]) -> None:
    plan = make()
    opened = open_page.data(report_data([plan]))
    text = opened.page.locator("#summary").inner_text()
    assert f"{plan.prediction.max_load:.4g}" in text
    assert opened.boxes() > 3
    assert opened.page.locator("#timeline canvas").count() == 0, "nothing of it can be simulated"


def test_two_plans_of_cost_graphs_side_by_side(open_page: Opener) -> None:
    opened = open_page.data(report_data([make() for make in GRAPH_PLANS.values()]))
    assert "graph.txt" in opened.page.locator("#differences").inner_text()
