"""Graphs of the device-placement benchmark: one JSON object with a machine, nodes and edges.

    {"maxSizePerFPGA": 1.7e10, "maxFPGAs": 6, "maxCPUs": 1,
     "nodes": [{"id": 1, "supportedOnFpga": 1, "cpuLatency": 7.0, "fpgaLatency": 0.7, "isBackwardNode": 0,
                "colorClass": 3, "size": 131325952.0}, …],
     "edges": [{"sourceId": 1, "destId": 3, "cost": 0.002}, …]}

``colorClass`` and ``size`` may be missing; other keys (names, layers, sizes of edges) are notes for people. The costs
of all edges out of one node are one value.
"""

from __future__ import annotations

import math
from typing import Any

from partitioner.record.file import Amount, Natural, Record
from passes.search.cost_graph.graph import GraphMachine, GraphNode, PlacementGraph

SAME_COST = 1e-6
"""Costs of edges out of one node that differ by less are one value, the largest of them."""


class _OperatorEntry(Record, strict=False, extra="ignore"):
    id: int | str
    name: str | None = None
    supportedOnFpga: bool = True  # noqa: N815 - the file's own names
    cpuLatency: Amount  # noqa: N815
    fpgaLatency: Amount  # noqa: N815
    isBackwardNode: bool = False  # noqa: N815
    colorClass: int | str | None = None  # noqa: N815
    size: Amount = 0.0


class _EdgeEntry(Record, strict=False, extra="ignore"):
    sourceId: int | str  # noqa: N815
    destId: int | str  # noqa: N815
    cost: Amount


class DevicePlacementFile(Record, strict=False, extra="ignore"):
    """The file as it is written."""

    maxSizePerFPGA: Amount | None = None  # noqa: N815
    maxFPGAs: Natural  # noqa: N815
    maxCPUs: Natural = 0  # noqa: N815
    nodes: tuple[_OperatorEntry, ...]
    edges: tuple[_EdgeEntry, ...]


def is_device_placement(data: dict[str, Any]) -> bool:
    """Tell whether an object is of this format."""
    return "maxFPGAs" in data


def graph_of(file: DevicePlacementFile) -> tuple[PlacementGraph | None, list[str]]:
    """Build the graph, or list every problem with the file's edges."""
    position = {str(node.id): v for v, node in enumerate(file.nodes)}
    output: dict[str, float] = {}
    edges: dict[tuple[int, int], None] = {}
    problems: list[str] = []
    for i, edge in enumerate(file.edges):
        source, target = str(edge.sourceId), str(edge.destId)
        missing = [
            f"edges[{i}].{key}: there is no node {end}"
            for key, end in (("sourceId", source), ("destId", target))
            if end not in position
        ]
        problems += missing
        if missing:
            continue
        known = output.setdefault(source, edge.cost)
        if abs(known - edge.cost) > SAME_COST * max(1.0, known):
            problems.append(
                f"edges[{i}].cost: node {source} has edges out of it that cost {known:g} and {edge.cost:g}"
            )
        output[source] = max(known, edge.cost)
        edges[position[source], position[target]] = None
    if problems:
        return None, problems
    nodes = tuple(
        GraphNode(
            id=str(node.id),
            name=node.name or str(node.id),
            accelerator_cost=node.fpgaLatency,
            cpu_cost=node.cpuLatency,
            output_cost=output.get(str(node.id), 0.0),
            size=node.size,
            colour=None if node.colorClass is None else str(node.colorClass),
            backward=node.isBackwardNode,
            on_accelerator=node.supportedOnFpga,
        )
        for node in file.nodes
    )
    memory = math.inf if file.maxSizePerFPGA is None else file.maxSizePerFPGA
    return PlacementGraph(nodes, tuple(edges), GraphMachine(file.maxFPGAs, file.maxCPUs, memory)), []
