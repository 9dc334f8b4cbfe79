"""Still pictures of the placement graph: what is opened and folded, how much, and that names stay text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from cost_models.cluster import ClusterSpec
from partitioner import Plan, partition
from partitioner.pictures.dot import to_dot
from partitioner.pictures.drawing import Drawing, Node, drawing_json, short_text, text_width
from partitioner.pictures.graph_drawing import graph_drawing
from partitioner.pictures.graph_svg import to_svg
from partitioner.pictures.layered import layered
from partitioner.pictures.plan_drawing import plan_drawing
from partitioner.report.sharding import collective_name
from tests.support.made_reports import HOSTILE_NAMES, hostile_report, made_report

Golden = Callable[[str, str], None]
SVG = "{http://www.w3.org/2000/svg}"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def planned(**options: Any) -> Plan:
    return partition(
        Net(6),
        ClusterSpec.parse("A100-40GB:2"),
        example_inputs=torch.zeros(8, 8),
        batch_size=8,
        **{"strategy": "layer", **options},
    )


@pytest.fixture(scope="module")
def pipeline() -> Plan:
    return planned(strategy="layer", pins={"layers.2*": 0, "layers.3*": 1}, microbatches=2)


@pytest.fixture(scope="module")
def sharded() -> Plan:
    pins = {"*.up.weight": "S0", "*.up.bias": "S0", "*.down.weight": "S1"}
    return planned(strategy="feature", mesh=(2,), pins=pins, microbatches=1)


def boxes(drawing: Drawing) -> list[Node]:
    return [box for node in drawing.nodes for box in node.all()]


def graph_of(report: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    plan = report["plans"][0]
    return plan["graph"], [(stage["name"], stage["devices"]) for stage in plan["stages"]]


def test_a_pipeline_as_dot(pipeline: Plan, golden: Golden) -> None:
    golden("placement_pipeline_dot", to_dot(plan_drawing(pipeline)))


def test_a_feature_wise_plan_shows_its_collectives(sharded: Plan, golden: Golden) -> None:
    drawing = plan_drawing(sharded)
    golden("placement_feature_dot", to_dot(drawing))
    text = to_dot(drawing)
    for kind in ("all-gather", "all-reduce"):
        times = re.findall(rf"{kind}(?: (\d+)×)? [\d.]+ \w+( each way)?", text)
        drawn = sum(int(count or 1) * (2 if each_way else 1) for count, each_way in times)
        planned = sharded.stages[0].sharding.collectives  # type: ignore[union-attr]
        assert drawn == sum(collective_name(item.kind) == kind for item in planned)


def test_everything_is_drawn_if_asked_for(pipeline: Plan) -> None:
    assert pipeline.outline is not None
    folded, whole = plan_drawing(pipeline), plan_drawing(pipeline, whole=True)
    assert [box.lines[0] for box in boxes(folded) if box.kind == "fold"] == ["0–2 ×3", "3–5 ×3"]
    drawn = [box.ops for box in boxes(whole) if not box.children]
    assert sorted(drawn) == sorted((name,) for name in pipeline.outline.names)
    assert not any(edge.again for edge in whole.edges)


def test_every_op_is_in_one_box(pipeline: Plan) -> None:
    assert pipeline.outline is not None
    held = [op for box in boxes(plan_drawing(pipeline)) for op in box.ops]
    # Of a fold one block is drawn, and the others' ops are in it.
    assert set(held) <= set(pipeline.outline.names)
    assert len(held) == len(set(held))


@pytest.mark.parametrize(("layers", "ops"), [(4, 5), (80, 40), (4, 3000)])
def test_a_drawing_has_at_most_300_boxes(layers: int, ops: int) -> None:
    drawing = graph_drawing(*_titled(made_report(stages=4, layers=layers, ops_in_a_layer=ops)))
    assert 4 < len(boxes(drawing)) + len(drawing.legend) <= 300


def _titled(report: dict[str, Any]) -> tuple[dict[str, Any], str, list[tuple[str, str]]]:
    graph, stages = graph_of(report)
    return graph, report["plans"][0]["title"], stages


def test_a_long_flat_model_is_cut_into_parts() -> None:
    count = 9_000
    kind = made_report()["plans"][0]["graph"]["kinds"][0]
    ops = [[f"op{n}", 0, -1, -1, [n - 1] if n else [], [], -1, -1] for n in range(count)]
    tree = {"name": "", "label": "model", "children": [], "ops": list(range(count)), "first": 0}
    graph = {"kinds": [kind], "parameters": [], "ops": ops, "tree": tree, "bridges": [], "layouts": []}
    drawing = graph_drawing(graph, "flat")
    assert len(boxes(drawing)) <= 300
    assert len(drawing.edges) == len([box for box in boxes(drawing) if not box.children]) - 1


def test_names_stay_text() -> None:
    drawing = graph_drawing(*_titled(hostile_report()), whole=True)
    for text in (to_dot(drawing), to_svg(drawing)):
        assert "x" * 100 not in text
        assert "\u202e" not in text
    dot = to_dot(drawing)
    assert re.sub(r'"(\\.|[^"\\])*"', "", dot).count('"') == 0
    root = ElementTree.fromstring(to_svg(drawing))
    assert {element.tag for element in root.iter()}.isdisjoint({f"{SVG}script", f"{SVG}img"})
    assert any("<script>" in (element.text or "") for element in root.iter(f"{SVG}text"))
    drawing_json(drawing)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_name_is_shortened(name: str) -> None:
    short = short_text(name, 30)
    assert 0 < text_width(short) <= 30
    assert short.isprintable()


def test_boxes_of_an_svg_do_not_overlap(sharded: Plan) -> None:
    root = ElementTree.fromstring(to_svg(plan_drawing(sharded)))
    texts = [
        (float(t.attrib["x"]), float(t.attrib["y"]), len(t.text or ""))
        for t in root.iter(f"{SVG}text")
        if t.get("text-anchor") == "middle"
    ]
    assert len(texts) > 20
    for (x, y, length), (other, below, more) in itertools.combinations(texts, 2):
        apart = abs(y - below) > 9 or abs(x - other) > 5 * (length + more) / 2
        assert apart, (x, y, other, below)


def test_rows_go_down_and_long_arrows_go_around() -> None:
    layout = layered([(60, 20)] * 4, [(0, 1), (1, 2), (0, 2), (2, 3), (3, 0)])
    tops = [y for _, y in layout.places]
    assert tops == sorted(tops)
    around = layout.paths[2]
    box = layout.places[1]
    assert all(abs(x - box[0]) > 30 for x, y in around if box[1] <= y <= box[1] + 20)
    assert layout.paths[4][0][1] > layout.paths[4][-1][1], "an arrow against the order goes up"
