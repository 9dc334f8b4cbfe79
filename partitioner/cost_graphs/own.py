"""Cost graphs in our own JSON, for whatever has costs and edges (docs/14-graphs-from-elsewhere.md; JSON Schema beside it).

{"graph_version": 1, "unit": "ms",
 "devices": {"accelerators": 2, "cpus": 1, "memory": 16000},
 "nodes": [{"id": "embed", "accelerator_cost": 1.5, "cpu_cost": 20, "output_cost": 0.2, "size": 4000},
           {"id": "embed.grad", "accelerator_cost": 2.5, "cpu_cost": 40, "together": "embed", "backward": true}, …],
 "edges": [["embed", "block"], …]}
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from partitioner.record.file import Amount, Record
from passes.search.cost_graph.graph import GraphMachine, GraphNode, PlacementGraph

Word = Annotated[str, Field(min_length=1, max_length=1000)]


class DevicesEntry(Record, strict=False):
    """The machine; ``--devices`` replaces the number of accelerators."""

    accelerators: int = Field(ge=0)
    cpus: int = Field(default=0, ge=0)
    memory: Amount | None = Field(
        default=None, description="of each accelerator, in the unit of sizes; null: no limit"
    )


class NodeEntry(Record, strict=False):
    """An op."""

    id: Word
    accelerator_cost: Amount = Field(description="of running the node on an accelerator")
    cpu_cost: Amount | None = Field(default=None, description="on a CPU; needed where the machine has CPUs")
    output_cost: Amount = Field(
        default=0.0,
        description="of its output to or from an accelerator, once per device that sends or receives it",
    )
    size: Amount = Field(default=0.0, description="memory that it takes on an accelerator")
    together: Word | None = Field(default=None, description="nodes with the same word share a device")
    backward: bool = Field(
        default=False, description="part of the backward pass: contiguity is about the others"
    )
    on_accelerator: bool = Field(default=True, description="whether an accelerator can run it")


class OwnGraphFile(Record, strict=False):
    """The file as it is written."""

    graph_version: Literal[1]
    unit: Annotated[str, Field(max_length=40)] = Field(
        default="cost units of the file", description="of costs"
    )
    devices: DevicesEntry
    nodes: tuple[NodeEntry, ...]
    edges: tuple[tuple[Word, Word], ...] = Field(description="[producer, consumer]")


def is_own(data: dict[str, Any]) -> bool:
    """Tell whether an object is of this format."""
    return "graph_version" in data


def graph_of(file: OwnGraphFile) -> tuple[PlacementGraph | None, list[str]]:
    """Build the graph, or list what is wrong between nodes, edges and devices."""
    position = {node.id: v for v, node in enumerate(file.nodes)}
    problems = [
        f"edges[{i}][{end}]: there is no node {name}"
        for i, pair in enumerate(file.edges)
        for end, name in enumerate(pair)
        if name not in position
    ]
    if file.devices.cpus:
        problems += [
            f"nodes[{v}].cpu_cost: is missing, and the machine has CPUs"
            for v, node in enumerate(file.nodes)
            if node.cpu_cost is None
        ]
    if problems:
        return None, problems
    nodes = tuple(
        GraphNode(
            id=node.id,
            name=node.id,
            accelerator_cost=node.accelerator_cost,
            cpu_cost=node.cpu_cost or 0.0,
            output_cost=node.output_cost,
            size=node.size,
            colour=node.together,
            backward=node.backward,
            on_accelerator=node.on_accelerator,
        )
        for node in file.nodes
    )
    edges = tuple(dict.fromkeys((position[source], position[target]) for source, target in file.edges))
    memory = math.inf if file.devices.memory is None else file.devices.memory
    machine = GraphMachine(file.devices.accelerators, file.devices.cpus, memory)
    return PlacementGraph(nodes, edges, machine, file.unit), []
