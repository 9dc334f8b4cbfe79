"""Drawings of plans and models: the placement graph, the graph of stages, and what one rank runs."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from cost_models.errors import PlanError, UsageError
from cost_models.units import format_bytes, format_seconds
from partitioner.pictures.data import stage_data
from partitioner.pictures.drawing import BridgeLabel, Drawing, Edge, Node, short_text, together
from partitioner.pictures.graph_drawing import MOST_BOXES, graph_drawing
from partitioner.pictures.ops import op_graph_data
from partitioner.record.data import PlanData
from partitioner.record.modules import shorten
from partitioner.record.outline import ModelOutline
from partitioner.report.sharding import named_devices

if TYPE_CHECKING:
    import networkx as nx


def plan_drawing(plan: PlanData, outline: ModelOutline | None = None, *, whole: bool = False) -> Drawing:
    """Draw the placement graph of a plan. ``outline``: its model's, for a plan that does not remember it.

    Raises PlanError if neither is known.
    """
    graph = op_graph_data(plan, outline)
    if graph is None:
        raise PlanError(
            f"cannot draw the placement graph of {plan.model.name} from this plan",
            ["it was made by an older version, and does not remember its model"],
            [
                "make it anew with `partitioner plan`",
                "give the model too: `partitioner graph MODEL --plan PLAN`",
                "draw its stages alone: `partitioner graph PLAN --stages`",
            ],
        )
    return graph_drawing(graph, _title(plan), _stages(plan), whole=whole)


def model_drawing(outline: ModelOutline, name: str, *, whole: bool = False) -> Drawing:
    """Draw a model that is not placed."""
    graph = op_graph_data(None, outline)
    assert graph is not None, "the outline is given"
    return graph_drawing(graph, name, whole=whole)


def _title(plan: PlanData) -> str:
    return f"{plan.model.name} on {plan.cluster.name}"


def _stages(plan: PlanData) -> list[tuple[str, str]]:
    """Return each stage's name, and its devices and mesh."""
    return [
        (
            row["name"],
            named_devices(plan, tuple(row["ranks"])) + (f" · mesh {row['mesh']}" if row["mesh"] else ""),
        )
        for row in stage_data(plan)
    ]


def stage_drawing(plan: PlanData, *, whole: bool = False) -> Drawing:
    """Draw one box per stage, and arrows with the bytes of a micro-batch between two of them."""
    _refuse_many(len(plan.stages), "stages", whole, "draw the placement graph instead, without --stages")
    words = _stages(plan)
    nodes = [
        Node(
            id=f"stage{index}",
            kind="stage",
            lines=(
                f"stage {index}",
                short_text(shorten(stage.modules, 60), 60),
                f"forward {format_seconds(stage.forward_seconds)}, "
                f"backward {format_seconds(stage.backward_seconds)}",
                f"parameters {format_bytes(stage.parameter_bytes)}",
            ),
            stages=(index,),
            stage_text=short_text(words[index][1], 60),
            ops=stage.ops,
        )
        for index, stage in enumerate(plan.stages)
    ]
    sent: defaultdict[tuple[int, int], list[BridgeLabel]] = defaultdict(list)
    for value in plan.values:
        for consumer in value.consumers:
            apart = plan.stages[value.producer].devices != plan.stages[consumer].devices
            sent[value.producer, consumer].append(
                BridgeLabel("send/recv" if apart else "on the same device", value.size_bytes)
            )
    edges = [
        Edge(f"stage{source}", f"stage{target}", len(own), together(own))
        for (source, target), own in sorted(sent.items())
    ]
    return Drawing(short_text(_title(plan), 80), tuple(nodes), tuple(edges))


def _refuse_many(count: int, what: str, whole: bool, instead: str) -> None:
    if count > MOST_BOXES and not whole:
        raise UsageError(
            f"cannot draw {count:,} {what} so that people can read it",
            [f"a drawing has at most {MOST_BOXES} boxes"],
            [instead, "draw them all the same with --all"],
        )


def rank_drawing(dag: nx.DiGraph[str], *, whole: bool = False) -> Drawing:
    """Draw what a rank runs, all of it: one box per op in the box of its stage, what goes between ranks marked."""
    _refuse_many(len(dag), "ops of a rank", whole, "read them as text, without --format")
    numbers = {name: f"n{number}" for number, name in enumerate(dag)}
    boxes: defaultdict[str, list[Node]] = defaultdict(list)
    for name, attributes in dag.nodes(data=True):
        lines = tuple(short_text(line, 100) for line in attributes["label"].split("\n"))
        bridge = bool(attributes["bridge"])
        boxes[attributes["device"] or ""].append(Node(numbers[name], "op", lines, ops=(name,), bridge=bridge))
    nodes: list[Node] = []
    for number, (title, inside) in enumerate(boxes.items()):
        nodes += [Node(f"stage{number}", "stage", (title,), children=tuple(inside))] if title else inside
    edges = tuple(Edge(numbers[source], numbers[target]) for source, target in dag.edges)
    return Drawing(short_text(dag.graph["name"], 120), tuple(nodes), edges)
