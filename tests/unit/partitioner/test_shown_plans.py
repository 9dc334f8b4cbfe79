"""Plans of every kind as a person meets them outside of the report page: on 80 columns, as DOT, as SVG.

The plans are files, so the texts depend on what is written about a plan and not on how it was found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cost_models.errors import PlanError
from partitioner import Plan
from partitioner.cli import run_command
from partitioner.cost_graphs.plan import GraphPlan
from partitioner.pictures.cost_graph_data import cost_graph_drawing
from partitioner.pictures.dot import to_dot
from partitioner.pictures.drawing import Drawing
from partitioner.pictures.graph_drawing import MOST_BOXES
from partitioner.pictures.graph_svg import to_svg
from partitioner.pictures.plan_drawing import plan_drawing, stage_drawing
from partitioner.verify.report import VerifyReport
from tests.support.real_plans import GRAPH_PLANS, PLANS, stored, stored_graph

pytestmark = pytest.mark.usefixtures("fixed_spreads")
Golden = Callable[[str, str], None]
Box = tuple[float, float, float, float]
SVG = "{http://www.w3.org/2000/svg}"
SMALL = ("layer", "feature", "hybrid", "blocks", "unlike")
"""Plans whose DOT is read through when it changes."""


@cache
def plan(name: str) -> Plan | GraphPlan:
    return stored_graph(name) if name in GRAPH_PLANS else stored(name)


@cache
def drawing(name: str) -> Drawing:
    found = plan(name)
    return cost_graph_drawing(found) if isinstance(found, GraphPlan) else plan_drawing(found)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., str]:
    """Run a command on plans given by name, in a pipe of 80 columns without colour."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(command: str, *names: str) -> str:
        files = [tmp_path / f"{name}.json" for name in names]
        for name, file in zip(names, files, strict=True):
            plan(name).save(file)
        assert run_command([command, *map(str, files), "--quiet"]) == 0
        return capsys.readouterr().out.rstrip("\n")

    return run


@pytest.mark.parametrize("name", [*PLANS, *GRAPH_PLANS])
def test_a_plan_is_read_on_80_columns(name: str, command: Callable[..., str], golden: Golden) -> None:
    text = command("show", name)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith(str(plan(name)))
    golden(f"shown_{name.replace('-', '_')}", text)


@pytest.mark.parametrize(
    "pair", [("layer", "hybrid"), ("feature", "blocks"), ("graph", "graph-layouts")], ids="-".join
)
def test_two_plans_are_compared_on_80_columns(
    pair: tuple[str, str], command: Callable[..., str], golden: Golden
) -> None:
    text = command("diff", *pair)
    assert max(map(len, text.splitlines())) <= 80
    golden(f"compared_{'_'.join(pair).replace('-', '_')}", text)


def test_a_plan_of_a_cost_graph_is_no_plan_of_a_model(tmp_path: Path) -> None:
    plan("graph").save(tmp_path / "graph.json")
    with pytest.raises(PlanError, match="is a plan of a cost graph, not of a model"):
        Plan.load(tmp_path / "graph.json")


def test_a_report_of_a_verification_is_read_on_80_columns() -> None:
    note = "dropout is verified with the very masks that the unpartitioned model drew, " * 3
    report = VerifyReport(
        model="m" * 30,
        stages=1,
        schedule="1f1b",
        microbatches=1,
        samples=8,
        compared={"loss": 1, "gradient": 148, "parameter": 148},
        differences=(),
        worst=None,
        seconds=8.3,
        notes=(note,),
    )
    assert max(map(len, str(report).splitlines())) <= 80
    assert "1 stage, 1f1b, 1 micro-batch, 8 samples" in " ".join(str(report).split())


@pytest.mark.parametrize("name", [*SMALL, *GRAPH_PLANS])
def test_a_plan_as_dot(name: str, golden: Golden) -> None:
    golden(f"drawn_{name.replace('-', '_')}_dot", to_dot(drawing(name)))


@pytest.mark.parametrize("name", [*PLANS, *GRAPH_PLANS])
def test_boxes_of_an_svg_are_nested_or_apart(name: str) -> None:
    boxes = boxes_of(to_svg(drawing(name)))
    assert 3 < len(boxes) <= MOST_BOXES
    assert_nested_or_apart(boxes)


@pytest.mark.parametrize("name", ["layer", "layer-64", "llama-70b-64"])
def test_boxes_of_stages_are_apart(name: str) -> None:
    found = plan(name)
    assert isinstance(found, Plan)
    boxes = boxes_of(to_svg(stage_drawing(found)))
    assert len(boxes) >= len(found.stages)
    assert_nested_or_apart(boxes)


def boxes_of(svg: str) -> list[Box]:
    """Return left, top, right and bottom of the boxes, of bridges too, without the legend and hatches."""
    found = []
    for group in ElementTree.fromstring(svg).findall(f"{SVG}g"):
        if group.get("transform"):
            continue  # the legend
        for shape in list(group)[:1]:
            if shape.tag == f"{SVG}rect":
                x, y, width, height = (float(shape.attrib[key]) for key in ("x", "y", "width", "height"))
                found.append((x, y, x + width, y + height))
            elif shape.tag == f"{SVG}polygon":
                xs, ys = zip(
                    *(map(float, point.split(",")) for point in shape.attrib["points"].split()), strict=True
                )
                found.append((min(xs), min(ys), max(xs), max(ys)))
    return found


def assert_nested_or_apart(boxes: list[Box]) -> None:
    for a, b in itertools.combinations(boxes, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart or holds(a, b) or holds(b, a), (a, b)


def holds(outer: Box, inner: Box) -> bool:
    return outer[0] < inner[0] and outer[1] < inner[1] and inner[2] < outer[2] and inner[3] < outer[3]
