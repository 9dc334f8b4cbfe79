"""A cost graph as its plan remembers it, for pictures: nodes with their costs where they were placed, and edges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import networkx as nx
from pydantic import Field

from partitioner.record.file import Amount, Record
from partitioner.record.outline import NumbersText
from passes.search.cost_graph.graph import PlacementGraph


class GraphOutline(Record):
    """Nodes in the order of the file. Costs are in the plan's ``cost_unit``."""

    ids: tuple[str, ...]
    names: tuple[str, ...] = Field(description="what each node is; its id where the file does not say")
    costs: tuple[Amount, ...] = Field(description="on the kind of device that the node is on")
    output_costs: tuple[Amount, ...] = Field(description="of sending the output to another device")
    sizes: tuple[Amount, ...] = Field(description="memory on an accelerator")
    edges: NumbersText = Field(description="producer and consumer of each edge, as positions in ids")
    bytes_per_cost: Amount | None = Field(
        description="bytes that are sent at an output cost of 1, and sizes are bytes; null: not known"
    )

    def edge_pairs(self) -> Iterator[tuple[int, int]]:
        """Yield producer and consumer of each edge."""
        return zip(self.edges[::2], self.edges[1::2], strict=True)

    def in_order(self) -> list[int]:
        """Return the positions of the nodes, producers before consumers, else as in the file."""
        dag: nx.DiGraph[int] = nx.DiGraph()
        dag.add_nodes_from(range(len(self.ids)))
        dag.add_edges_from(self.edge_pairs())
        return list(nx.lexicographical_topological_sort(dag))


def outline_of(
    graph: PlacementGraph, placement: Sequence[int] | None, bytes_per_cost: float | None = None
) -> GraphOutline:
    """Write down a graph. ``placement``: a position in ``machine.devices`` per node; None: all on accelerators."""
    accelerators = graph.machine.accelerators
    homes = placement or (0,) * len(graph.nodes)
    return GraphOutline(
        ids=tuple(node.id for node in graph.nodes),
        names=tuple(node.name for node in graph.nodes),
        costs=tuple(
            node.accelerator_cost if home < accelerators or placement is None else node.cpu_cost
            for node, home in zip(graph.nodes, homes, strict=True)
        ),
        output_costs=tuple(node.output_cost for node in graph.nodes),
        sizes=tuple(node.size for node in graph.nodes),
        edges=tuple(end for edge in graph.edges for end in edge),
        bytes_per_cost=bytes_per_cost,
    )


def outline_contradictions(outline: GraphOutline, planned: Sequence[str]) -> Iterator[str]:
    """Yield what does not fit together. ``planned``: the nodes that the plan places."""
    count = len(outline.ids)
    for name in ("names", "costs", "output_costs", "sizes"):
        if len(getattr(outline, name)) != count:
            yield f"outline.{name}: {len(getattr(outline, name))} for {count} nodes"
    if set(outline.ids) != set(planned) or len(planned) != count:
        yield "outline.ids: not the nodes that the plan places"
    if len(outline.edges) % 2 or any(not 0 <= end < count for end in outline.edges):
        yield "outline.edges: not pairs of positions in outline.ids"
    elif not nx.is_directed_acyclic_graph(nx.DiGraph(outline.edge_pairs())):
        yield "outline.edges: they go in a circle"
