"""Placement graphs as DOT and as JSON: a model's ops, or a plan's stages, with devices as clusters; bridges stand out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import networkx as nx

from cost_models.units import format_bytes, format_seconds
from partitioner.record.modules import shorten
from partitioner.report.sharding import devices_text

if TYPE_CHECKING:
    from partitioner.record.data import PlanData
    from passes.graph.graph import OpGraph


def op_graph(graph: OpGraph, plan: PlanData | None = None) -> nx.DiGraph[str]:
    """Return a graph with one node per op (attributes label, module, device) and one edge per value.

    Ops that stages recompute for themselves have no device.
    """
    dag: nx.DiGraph[str] = nx.DiGraph(name=graph.model_name)
    placements = {} if plan is None else plan.placements
    for node in graph.ops:
        ranks = placements.get(node.name)
        dag.add_node(
            node.name,
            label=f"{node.name}\n{node.target}",
            module=str(node.meta.get("module_path", "")),
            source=str(node.meta.get("source", "")),
            device=None if ranks is None or plan is None else device_name(plan, *ranks),
        )
        dag.add_edges_from((s.name, node.name) for s in node.all_input_nodes if s.op == "call_function")
    return dag


def stage_graph(plan: PlanData) -> nx.DiGraph[str]:
    """Return a graph with one node per stage (attributes label, device) and edges with the bytes between two stages."""
    dag: nx.DiGraph[str] = nx.DiGraph(name=plan.model.name)
    for index, stage in enumerate(plan.stages):
        seconds = f"{format_seconds(stage.forward_seconds)} + {format_seconds(stage.backward_seconds)}"
        dag.add_node(
            f"stage {index}",
            label=f"stage {index}\n{shorten(stage.modules, 60)}\n{seconds}",
            modules=list(stage.modules),
            ops=len(stage.ops),
            device=device_name(plan, *stage.devices),
        )
    size_bytes: dict[tuple[int, int], int] = defaultdict(int)
    for value in plan.values:
        for consumer in value.consumers:
            size_bytes[value.producer, consumer] += value.size_bytes
    for (source, target), size in sorted(size_bytes.items()):
        dag.add_edge(f"stage {source}", f"stage {target}", label=format_bytes(size), size_bytes=size)
    return dag


def device_name(plan: PlanData, rank: int, *others: int) -> str:
    """Name a device: "rank 3 (node1 H100-80GB)", "ranks 0-7"."""
    if others:
        return devices_text((rank, *others))
    device = plan.cluster.devices[rank]
    return f"rank {rank} ({device.node_name} {device.model})"


def to_json(dag: nx.DiGraph[str]) -> dict[str, Any]:
    """Return plain data: nodes with their attributes, edges with theirs."""
    return {
        "name": dag.graph.get("name", ""),
        "nodes": [{"id": name, **attributes} for name, attributes in dag.nodes(data=True)],
        "edges": [{"source": a, "target": b, **attributes} for a, b, attributes in dag.edges(data=True)],
    }


def to_dot(dag: nx.DiGraph[str]) -> str:
    """Write DOT text for graphviz; nodes of one device stand in one cluster."""
    clusters: dict[str | None, list[str]] = defaultdict(list)
    for name, attributes in dag.nodes(data=True):
        clusters[attributes.get("device")].append(f"{_quote(name)} [{_attributes(attributes)}];")
    lines = [f"digraph {_quote(dag.graph.get('name', 'graph'))} {{", "  node [shape=box];"]
    for number, (device, nodes) in enumerate(clusters.items()):
        if device is None:
            lines += [f"  {node}" for node in nodes]
            continue
        lines += [f"  subgraph cluster_{number} {{", f"    label={_quote(device)};"]
        lines += [f"    {node}" for node in nodes]
        lines.append("  }")
    for source, target, attributes in dag.edges(data=True):
        label = f" [{_attributes(attributes)}]" if "label" in attributes else ""
        lines.append(f"  {_quote(source)} -> {_quote(target)}{label};")
    return "\n".join([*lines, "}"])


def _attributes(attributes: Mapping[str, Any]) -> str:
    parts = [f"label={_quote(str(attributes['label']))}"]
    if attributes.get("bridge"):
        parts.append("shape=hexagon, style=filled, fillcolor=orange")
    if attributes.get("module"):
        parts.append(f"tooltip={_quote(str(attributes['module']))}")
    return ", ".join(parts)


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
