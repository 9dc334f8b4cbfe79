"""``partitioner plan --graph``: the command, the plan that it writes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cost_models.errors import PlanError
from partitioner.cli import run_command
from partitioner.cost_graphs.plan import GraphPlan, plan_graph
from partitioner.cost_graphs.read import read_graph
from tests.support.placement_evaluator import loads_of
from tests.unit.partitioner.cost_graphs.test_files import DATA, ELSEWHERE, PROFILE, changed, written

BERT = DATA / "device-placement" / "LayerGraphs" / "bert24_training.json"
Capture = pytest.CaptureFixture[str]


def test_a_plan_is_written_printed_and_read_again(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "plan.json"
    call = ["plan", "--graph", str(BERT), "--strategy", "free", "--contiguous", "-o", str(file)]
    assert run_command(call) == 0
    printed = capsys.readouterr().out
    assert "contiguous placement, for throughput: largest load 41.7458" in printed
    assert "optimal" in printed
    plan = GraphPlan.load(file)
    graph = read_graph(BERT).graph
    loads = loads_of(graph, plan.placements)
    assert plan.prediction.loads == pytest.approx(loads)
    assert plan.prediction.max_load == pytest.approx(max(loads.values()))
    assert (plan.certificate.gap, plan.certificate.bound_seconds) == (0.0, plan.prediction.max_load)
    assert plan.graph.fingerprint == graph.fingerprint
    assert run_command(["show", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == plan.to_dict()


def test_json_and_devices_and_latency(capsys: Capture) -> None:
    call = [
        "plan",
        f"--graph={BERT}",
        "--devices",
        "2",
        "--objective",
        "latency",
        "--time-limit",
        "2",
        "--json",
    ]
    assert run_command(call) in (0, 5)
    plan = json.loads(capsys.readouterr().out)
    assert set(plan["prediction"]["loads"]) == {"acc0", "acc1", "cpu0"}
    assert plan["certificate"]["bound_seconds"] <= plan["prediction"]["makespan"]
    assert plan["prediction"]["makespan"] == plan["certificate"]["objective_seconds"]


def test_a_profile_with_a_bandwidth(tmp_path: Path, capsys: Capture) -> None:
    profile = written(tmp_path, PROFILE)
    call = ["plan", "--graph", str(profile), "--devices", "2", "--bandwidth", "1e12", "--json"]
    assert run_command(call) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["prediction"]["max_load"] == pytest.approx(3.003)
    assert plan["cost_unit"] == "ms"


def test_a_profile_by_features(tmp_path: Path, capsys: Capture) -> None:
    alexnet = DATA / "pipedream" / "alexnet" / "graph.txt"
    file = tmp_path / "plan.json"
    call = ["plan", "--graph", str(alexnet), "--strategy", "feature", "--devices", "4", "-o", str(file)]
    assert run_command(call) == 0
    printed = capsys.readouterr().out
    assert "feature-wise, for throughput: 42.69" in printed
    plan = GraphPlan.load(file)
    # the first and last linear layer by inputs, the one between by features or inputs; convolutions by samples
    for node, allowed in (("node18", "inputs"), ("node21", "features inputs"), ("node23", "inputs")):
        assert plan.layouts[node] == plan.layouts[f"{node}.backward"]
        assert plan.layouts[node] in allowed.split()
    assert {plan.layouts[f"node{v}"] for v in (2, 5, 8, 10, 12)} == {"samples"}
    assert (plan.placements, len(plan.layouts)) == ({}, plan.graph.nodes)
    assert plan.certificate.bound_seconds == plan.prediction.max_load == plan.prediction.loads["acc3"]
    # work, gradients of convolutions, the pooled image to features and back, sums of the first, its gathering, logits' sums
    step = 85.321 + 1.5 * 9.878784 + 1.5 * 9.437184 + 6 * (4.194304 + 4.194304 + 1.024)
    assert plan.prediction.max_load == pytest.approx(step / 4, rel=1e-6)
    for change, says in (
        ({"layouts": {}}, f"layouts: 0 nodes, the graph has {plan.graph.nodes}"),
        ({"placements": {"node18": "acc0"}}, "placements: 1 nodes, strategy feature has none"),
        ({"layouts": {**plan.layouts, "node18": "columns"}}, "layouts.node18"),
    ):
        file.write_text(json.dumps({**plan.to_dict(), **change}))
        with pytest.raises(PlanError) as caught:
            GraphPlan.load(file)
        assert says in str(caught.value)


def test_bandwidth_and_unknown_layers_by_features(tmp_path: Path, capsys: Capture) -> None:
    """Layers that nobody knows stay by samples and are named; a conv of four channels is split in two."""
    profile = written(tmp_path, PROFILE.replace("Add --", "Softmax(1) --").replace("(3, 4 -- odd)", "(3, 4)"))
    call = ["plan", "--graph", str(profile), "--strategy", "feature", "--devices", "2", "--bandwidth", "1e12"]
    assert run_command([*call, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["layouts"]["node4"] == "samples"
    assert plan["prediction"]["max_load"] == pytest.approx(3.75 / 2, rel=1e-3)
    assert any("not known: Softmax" in note for note in plan["graph"]["notes"])


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("gpt2 --graph GRAPH", 2, "MODEL cannot be given with --graph"),
        ("--graph GRAPH --cluster local:2", 2, "--cluster cannot be given with --graph"),
        (
            "gpt2 --graph GRAPH --cluster local:2 --batch-size 8",
            2,
            "MODEL, --cluster, --batch-size cannot be given",
        ),
        ("--graph GRAPH --schedule gpipe", 2, "Unknown option: --schedule"),
        ("--graph GRAPH --strategy layer", 2, "a cost graph cannot be planned by strategy 'layer'"),
        ("--graph GRAPH --strategy feature", 2, "GRAPH cannot be planned by strategy 'feature'"),
        ("--graph GRAPH --strategy feature --contiguous", 2, "contiguous means nothing there"),
        ("--graph GRAPH --strategy feature --objective latency", 2, "feature is searched for throughput"),
        ("--graph GRAPH --objective speed", 2, "objective 'speed' is not one of: throughput, latency"),
        ("--graph GRAPH --objective latency --contiguous", 2, "latency has no contiguous search"),
        ("--graph GRAPH --time-limit 0", 2, "the time limit is 0.0"),
        ("--graph GRAPH --devices 0", 2, "cannot plan for 0 devices"),
        ("--graph GRAPH --devices 2.5", 2, "'2.5' is not a whole number"),
        ("--graph missing.json", 2, "error[graph]: cannot read the graph missing.json"),
        ("--graph GRAPH -o nowhere/plan.json", 2, "there is no folder nowhere"),
        ("--graph TIGHT", 4, "share a device and need 12"),
    ],
)
def test_what_is_refused(arguments: str, code: int, says: str, tmp_path: Path, capsys: Capture) -> None:
    tight = {**changed(ELSEWHERE, "nodes", 0, "size", to=12.0), "maxCPUs": 0}
    tight["nodes"] = tight["nodes"][:1]
    tight["edges"] = []
    (tmp_path / "tight").mkdir()
    files = {"GRAPH": written(tmp_path, ELSEWHERE), "TIGHT": written(tmp_path / "tight", tight)}
    call = [str(files.get(word, word)) for word in arguments.split()]
    assert run_command(["plan", *call]) == code
    captured = capsys.readouterr()
    assert says.replace("GRAPH", str(files["GRAPH"])) in " ".join(captured.err.split())
    assert captured.out == ""


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from partitioner.cli import run_command\n"
        f"code = run_command(['plan', '--graph', {str(BERT)!r}, '--contiguous'])\n"
        "sys.exit(code or 10 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_help_names_the_options_of_graphs(capsys: Capture) -> None:
    assert run_command(["plan", "--graph", "x", "--help"]) == 0
    text = capsys.readouterr().out
    assert "plan --graph FILE --strategy free" in text
    assert "--contiguous" in text
    assert "--cluster" not in text


def test_a_damaged_plan_is_refused(tmp_path: Path) -> None:
    plan = plan_graph(read_graph(BERT), contiguous=True)
    file = tmp_path / "plan.json"
    plan.save(file)
    assert GraphPlan.load(file) == plan
    data = plan.to_dict()
    for change, says in (
        ({"placements": {**data["placements"], "1": "acc9"}}, "placements.1: there is no device acc9"),
        ({"placements": {}}, "placements: 0 nodes, the graph has 64"),
        ({"schema_version": 2}, "plan of another version"),
        ({"strategy": "layer"}, "strategy: "),
        ({"outline": {**data["outline"], "edges": "0 1 1 0"}}, "outline.edges: they go in a circle"),
        ({"outline": {**data["outline"], "edges": "0 999"}}, "outline.edges: not pairs"),
        ({"outline": {**data["outline"], "sizes": [1.0]}}, "outline.sizes: 1 for 64 nodes"),
    ):
        file.write_text(json.dumps({**data, **change}))
        with pytest.raises(PlanError) as caught:
            GraphPlan.load(file)
        assert says in str(caught.value)
