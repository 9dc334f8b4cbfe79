"""Cost graphs from files: three formats into one graph, and errors that name the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from benchmarks.make_docs import graph_schema
from cost_models.errors import GraphError, UsageError
from partitioner.cost_graphs.read import read_graph
from passes.search.cost_graph.graph import evaluate

DATA = Path(__file__).parents[4] / "tests" / "data"

ELSEWHERE: dict[str, Any] = {
    "maxSizePerFPGA": 8.0,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [
        {
            "id": 1,
            "supportedOnFpga": 1,
            "cpuLatency": 9,
            "fpgaLatency": 1.5,
            "isBackwardNode": 0,
            "size": 4.0,
        },
        {
            "id": 7,
            "name": "b",
            "supportedOnFpga": False,
            "cpuLatency": 2.0,
            "fpgaLatency": 0,
            "isBackwardNode": True,
            "colorClass": 3,
            "layerId": 12,
        },
    ],
    "edges": [{"sourceId": 1, "destId": 7, "cost": 0.25, "size": 1024}],
}
OWN: dict[str, Any] = {
    "graph_version": 1,
    "unit": "ms",
    "devices": {"accelerators": 2, "cpus": 1, "memory": 8.0},
    "nodes": [
        {"id": "1", "accelerator_cost": 1.5, "cpu_cost": 9, "output_cost": 0.25, "size": 4.0},
        {
            "id": "7",
            "accelerator_cost": 0,
            "cpu_cost": 2,
            "together": "3",
            "backward": True,
            "on_accelerator": False,
        },
    ],
    "edges": [["1", "7"]],
}
PROFILE = """\
node1 -- Input -- forward_compute_time=9.0, backward_compute_time=0.0, activation_size=500.0, parameter_size=0.0
node2 -- Conv2d(3, 4 -- odd) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=1e6, parameter_size=7.0
node3 -- ReLU -- forward_compute_time=0.5, backward_compute_time=0.25, activation_size=[1e6; 1e6], parameter_size=0.0
node4 -- Add -- forward_compute_time=0, backward_compute_time=0, activation_size=4.0, parameter_size=0.0 -- stage_id=2
\tnode1 -- node2
\tnode2 -- node3
\tnode2 -- node4
\tnode3 -- node4
"""


def written(folder: Path, data: Any) -> Path:
    path = folder / "graph"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_the_same_graph_in_two_formats(tmp_path: Path) -> None:
    one = read_graph(written(tmp_path, ELSEWHERE))
    other = read_graph(written(tmp_path, OWN))
    assert (one.format, other.format) == ("device-placement", "partitioner")
    assert one.graph.fingerprint == other.graph.fingerprint
    assert one.graph.machine == other.graph.machine
    assert (one.graph.nodes[1].name, other.graph.unit) == ("b", "ms")
    assert read_graph(written(tmp_path, OWN), devices=5).graph.machine.accelerators == 5


def test_a_profile_becomes_forward_and_backward_nodes(tmp_path: Path) -> None:
    read = read_graph(written(tmp_path, PROFILE), devices=2)
    nodes = {node.id: node for node in read.graph.nodes}
    edges = {(read.graph.nodes[u].id, read.graph.nodes[v].id) for u, v in read.graph.edges}
    assert nodes["node1"].accelerator_cost == 0.0, "the data loader's time is not the network's"
    assert (nodes["node2"].name, nodes["node2"].accelerator_cost, nodes["node2"].output_cost) == (
        "Conv2d(3, 4 -- odd)",
        1.0,
        1.0,
    )
    assert nodes["node3"].output_cost == 2.0
    assert {node.colour for name, node in nodes.items() if name.startswith("node4")} == {"node4"}
    # node4 gives gradients to two layers; nothing before node2 has parameters
    assert {pair for pair in edges if pair[1].endswith("backward") and pair[0] != pair[1].split(".")[0]} == {
        ("node3.backward", "node2.backward"),
        ("node4.to.node2", "node2.backward"),
        ("node4.to.node3", "node3.backward"),
    }
    placement = [int(node.colour in ("node3", "node4")) for node in read.graph.nodes]
    # acc0: 1 + 2, sends 1, receives the gradients of 3 and of 4; acc1: 0.5 + 0.25, the same three
    assert evaluate(read.graph, placement).loads == (6.0, 3.75)
    assert evaluate(
        read_graph(written(tmp_path, PROFILE), devices=2, bytes_per_second=2e9).graph, placement
    ).loads == (
        4.5,
        2.25,
    )


@pytest.mark.parametrize(
    "path", sorted(DATA.glob("pipedream/*/graph.txt")), ids=lambda path: path.parent.name
)
def test_real_profiles(path: Path) -> None:
    read = read_graph(path, devices=4)
    assert read.profile is not None
    assert len(read.graph.nodes) >= 2 * len(read.profile.layers)


def changed(data: dict[str, Any], *path: Any, to: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(data))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return copy


BAD = {
    "empty": ("", "it is empty"),
    "list": ("[1]", "expected an object, got a list"),
    "half": ('{"maxFPGAs": ', "line 1, column"),
    "other": ({"layers": []}, "its keys are 'layers'"),
    "prose": ("once upon a time", "it begins with 'once upon a time'"),
    "deep": ('{"maxFPGAs": ' + "[" * 100_000, "nested too deeply"),
    "no nodes": ({**ELSEWHERE, "nodes": []}, "edges[0].sourceId: there is no node 1"),
    "text": (changed(ELSEWHERE, "nodes", 0, "fpgaLatency", to="fast"), "nodes[0].fpgaLatency: "),
    "missing": ({k: v for k, v in ELSEWHERE.items() if k != "edges"}, "edges: is missing"),
    "negative": (changed(ELSEWHERE, "nodes", 0, "size", to=-1), "nodes[0].size: "),
    "nan": (changed(ELSEWHERE, "nodes", 0, "size", to=float("nan")), "nodes[0].size: "),
    "huge": ('{"maxFPGAs": 1' + "0" * 5000 + ', "nodes": [], "edges": []}', "maxFPGAs: "),
    "twice": ({**ELSEWHERE, "nodes": ELSEWHERE["nodes"][:1] * 2, "edges": []}, "node 1 is there twice"),
    "lost": (changed(ELSEWHERE, "edges", 0, "destId", to=8), "edges[0].destId: there is no node 8"),
    "costs": (
        {**ELSEWHERE, "edges": [*ELSEWHERE["edges"], {"sourceId": 1, "destId": 7, "cost": 0.5}]},
        "edges[1].cost: node 1 has edges out of it that cost 0.25 and 0.5",
    ),
    "key": (changed(OWN, "nodes", 0, "flops", to=1), "nodes[0].flops: is no key here"),
    "no cpu cost": (changed(OWN, "nodes", 0, "cpu_cost", to=None), "nodes[0].cpu_cost: is missing"),
    "circle": (changed(OWN, "edges", to=[["1", "7"], ["7", "1"]]), "from a backward to a forward node"),
    "version": (changed(OWN, "graph_version", to=2), "graph_version: "),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_the_place(name: str, tmp_path: Path) -> None:
    data, says = BAD[name]
    path = written(tmp_path, data)
    with pytest.raises(GraphError) as caught:
        read_graph(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (PROFILE + "\tnode2 -- node9\n", "line 9: there is no node9"),
        (PROFILE.replace("=2.0", "=slow"), "line 2: backward_compute_time=slow is no number"),
        (PROFILE.replace("backward_compute_time=2.0, ", ""), "line 2: no backward_compute_time"),
        (PROFILE + "what is this\n", "line 9: neither a layer nor an edge: 'what is this'"),
        (PROFILE + PROFILE, "line 9: node1 is there twice"),
        (PROFILE.replace("=1e6,", "=-1,"), "line 2: activation_size=-1 is no number"),
    ],
)
def test_a_bad_profile_is_refused_with_the_line(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(GraphError) as caught:
        read_graph(written(tmp_path, text), devices=2)
    assert says in str(caught.value)


def test_what_a_file_cannot_say(tmp_path: Path) -> None:
    profile = written(tmp_path, PROFILE)
    with pytest.raises(UsageError, match="--devices is missing"):
        read_graph(profile)
    with pytest.raises(UsageError, match="cannot plan for 0 devices"):
        read_graph(profile, devices=0)
    with pytest.raises(UsageError, match="cannot read --bandwidth"):
        read_graph(profile, devices=2, bytes_per_second=0.0)
    with pytest.raises(UsageError, match="--bandwidth is for PipeDream"):
        read_graph(written(tmp_path, OWN), bytes_per_second=1e9)
    with pytest.raises(GraphError, match="no such file"):
        read_graph(tmp_path / "missing.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GraphError, match="is not UTF-8"):
        read_graph(tmp_path / "binary")


def test_our_own_format_fits_its_schema() -> None:
    validator = jsonschema.Draft202012Validator(graph_schema())
    validator.validate(OWN)
    assert not validator.is_valid(changed(OWN, "nodes", 0, "flops", to=1))
    assert not validator.is_valid(changed(OWN, "graph_version", to=2))
