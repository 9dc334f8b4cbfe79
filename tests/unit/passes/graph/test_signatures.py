"""Classes of ops: equal blocks share, unlike ones do not, and every edge of the whole graph is in the quotient."""

from __future__ import annotations

from passes.costs.costs import costs_of
from passes.graph.signatures import group_blocks, op_classes
from passes.search.feature.graph import feature_graph
from passes.shard.rules import choices
from tests.unit.passes.search.feature.test_place import cluster, graph_of


def test_ops_at_equal_positions_of_equal_blocks_are_one_class() -> None:
    names = ["in", "a0", "b0", "a1", "b1", "a2", "c2", "out"]
    signatures = [9, 1, 2, 1, 2, 1, 3, 9]
    blocks = {"a0": "0", "b0": "0", "a1": "1", "b1": "1", "a2": "2", "c2": "2"}
    classes = group_blocks(names, signatures, blocks)
    assert [tuple(names[i] for i in members) for members in classes.members] == [
        ("in",),
        ("a0", "a1"),
        ("b0", "b1"),
        ("a2",),
        ("c2",),
        ("out",),
    ]
    assert all(i in classes.members[classes.of[i]] for i in range(len(names)))


def test_the_quotient_of_a_transformer_has_every_edge() -> None:
    graph = graph_of("gpt2")
    classes = op_classes(graph)
    assert len(classes.members) < len(graph.ops)
    space = feature_graph(graph, costs_of(graph, cluster(2, 1e9)), choices)
    members = {name for unit in space.units for name in unit.members}
    assert {i.node for i in graph.inputs if i.kind == "parameter"} <= members
    # Counted values: every op's and placeholder's that something reads, each in exactly one wire.
    read = {source for node in graph.ops for source in node.all_input_nodes if source.name in members}
    assert sum(wire.count for wire in space.wires) >= len(read)
    # Between the blocks: the last op of a block is read by the next block's first, and by what follows the last block.
    last = next(u for u in space.units if u.kind == "op" and len(u.members) == 2 and u.name == "add_7")
    wires = [wire for wire in space.wires if wire.producer == last.index]
    assert sorted(wire.count for wire in wires) == [1, 1]
    assert len({wire.readers for wire in wires}) == 2
