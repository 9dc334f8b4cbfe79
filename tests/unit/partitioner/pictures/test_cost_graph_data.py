"""The plans of cost graphs as pictures: nodes on their devices, what is sent between them, what is not known left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.errors import PlanError, UsageError
from partitioner.cli import run_command
from partitioner.cost_graphs.plan import GraphPlan, plan_graph
from partitioner.cost_graphs.plan_layouts import plan_feature_wise
from partitioner.cost_graphs.read import read_graph
from partitioner.pictures.cost_graph_data import cost_graph_data, cost_graph_drawing
from partitioner.pictures.data import report_data
from partitioner.pictures.dot import to_dot
from tests.support.made_plans import made_plan
from tests.unit.partitioner.cost_graphs.test_files import DATA, PROFILE, written

BERT = DATA / "device-placement" / "LayerGraphs" / "bert24_training.json"
Golden = Callable[[str, str], None]


@pytest.fixture(scope="module")
def bert() -> GraphPlan:
    return plan_graph(read_graph(BERT), contiguous=True)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return written(tmp_path, PROFILE)


def test_nodes_have_their_devices_and_what_crosses_is_a_bridge(bert: GraphPlan) -> None:
    data = cost_graph_data(bert)
    graph, stages = data["graph"], [stage["name"] for stage in data["stages"]]
    assert {row[0]: stages[row[2]] for row in graph["ops"]} == bert.placements
    assert all(read < op for op, row in enumerate(graph["ops"]) for read in row[4])
    sent = {(bridge["from"], graph["ops"][bridge["to"]][2]) for bridge in graph["bridges"]}
    crossing = {(read, row[2]) for row in graph["ops"] for read in row[4] if graph["ops"][read][2] != row[2]}
    assert sent == crossing
    assert [data[part] for part in ("timeline", "memory", "traffic", "devices", "what_if")] == [None] * 5


def test_costs_add_up_to_the_loads(bert: GraphPlan) -> None:
    graph = cost_graph_data(bert)["graph"]
    computed = sum(graph["kinds"][row[1]]["cost"] for row in graph["ops"])
    assert computed + bert.prediction.transfers == pytest.approx(sum(bert.prediction.loads.values()))


def test_of_a_profile_bytes_are_known(profile: Path, golden: Golden) -> None:
    plan = plan_graph(read_graph(profile, devices=2, bytes_per_second=1e12))
    drawing = cost_graph_drawing(plan)
    golden("cost_graph_dot", to_dot(drawing).replace(profile.parent.name, "folder"))


def test_a_feature_wise_plan_says_how_each_node_is_spread(profile: Path) -> None:
    plan = plan_feature_wise(read_graph(profile, devices=2))
    data = cost_graph_data(plan)
    words = {row[0]: data["graph"]["layouts"][row[6]] for row in data["graph"]["ops"]}
    assert all(plan.layouts[node] in text for node, text in words.items())
    assert [stage["devices"] for stage in data["stages"]] == ["2 accelerators"]


def test_commands_take_its_file(bert: GraphPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    bert.save(file)
    assert run_command(["report", str(file), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["plans"][0]["graph"]["ops"]) == 64
    assert run_command(["graph", str(file), "--format", "svg"]) == 0
    assert "acc0" in capsys.readouterr().out
    assert run_command(["graph", str(file), "--stages"]) == 2


def test_plans_beside_each_other(bert: GraphPlan) -> None:
    other = plan_graph(read_graph(BERT, devices=2), contiguous=True)
    assert any("largest load: 41.75 cost -> " in line for line in report_data([bert, other])["differences"])
    with pytest.raises(UsageError, match="side by side"):
        report_data([bert, made_plan(ClusterSpec.parse("A100-40GB:2"))])


def test_a_plan_without_the_graph_is_told_apart(bert: GraphPlan) -> None:
    old = bert.model_copy(update={"outline": None})
    assert cost_graph_data(old)["graph"] is None
    with pytest.raises(PlanError, match="does not hold the graph"):
        cost_graph_drawing(old)
