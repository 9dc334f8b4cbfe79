"""Real plans of every kind, from the planner to the page: the page draws them all, and tells what the plan says."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.unlike_clusters import UNLIKE
from cost_models.cluster import ClusterSpec
from cost_models.units import format_seconds
from partitioner import Plan, partition
from partitioner.models.as_graph import as_graph
from partitioner.models.load import load_workload
from partitioner.pictures.data import report_data
from tests.browser.conftest import Opener
from tests.support.two_layers import two_layers

LARGE = Path(__file__).parents[1] / "data" / "plans" / "llama-70b-64.json.gz"
"""Llama-70B in pipelines of sharded stages on 64 devices, planned on 2026-11-25; a plan file must stay readable."""


@cache
def model() -> Any:
    return as_graph(load_workload("gpt2", settings={"size": "tiny"}), check="off")


def planned(cluster: ClusterSpec, **options: Any) -> Plan:
    return partition(model(), cluster, batch_size=8, **options)


def layer() -> Plan:
    return planned(ClusterSpec.local(2), strategy="layer", min_stages=2, microbatches=4)


def feature() -> Plan:
    return planned(ClusterSpec.local(2), strategy="feature")


def hybrid() -> Plan:
    return planned(ClusterSpec.local(4), strategy="hybrid", fix="pipeline=2 tensor=2")


def blocks() -> Plan:
    return two_layers(
        (8, 16, 8), batch_size=8, strategy="free", splits={"0": (12, 4)}, time_limit_seconds=1.0
    )


def unlike() -> Plan:
    return planned(UNLIKE["1 + 3"], strategy="hybrid", fix="groups=1,3")


def large() -> Plan:
    return Plan.from_json(gzip.decompress(LARGE.read_bytes()).decode())


@pytest.mark.parametrize(
    "make", [layer, feature, hybrid, blocks, unlike, large], ids=lambda make: make.__name__
)
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
    assert "stage 1 on ranks 2-3" in details
    assert "groups and degrees were fixed by hand" in details
    assert "partitioner explain 'a plan.json' linear --model MODEL" in details


def test_two_real_plans_side_by_side(open_page: Opener) -> None:
    opened = open_page.data(report_data([layer(), hybrid()]))
    assert "strategy: layer -> hybrid" in opened.page.locator("#differences").inner_text()
    assert opened.page.locator("#timeline canvas").count() == 2


def test_the_large_one_is_small_and_quick(open_page: Opener, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    large().report(file)
    assert file.stat().st_size < 2_000_000
    opened = open_page.file(file)
    assert "layers.0–" in opened.page.locator("#graph").inner_text() or opened.boxes() > 3
