"""The record of how devices share a stage, made from a compile's outcome.

The record has one row of layouts per class of equal blocks: how parameters are kept and how products run.

    h.0.mlp.c_fc.weight, h.1.mlp.c_fc.weight, …   ->   h.*.mlp.c_fc.weight  x4  stored S1, taken S1 by linear R -> S2
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import fx

from cost_models.layout import Replicate
from partitioner.record.modules import range_of
from partitioner.record.sharding import (
    GradientSumRecord,
    LayoutRow,
    StageCollective,
    StageSharding,
    UpdateGatherRecord,
    texts_of,
)
from passes.compile import Compiled
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.shard.shard import ShardedGraph
from passes.shard.traffic import Traffic
from passes.shard.words import Placements, operands, placements_text
from runtime.mesh.ranks_along import JOINT, all_ranks_along


def describe_sharding(compiled: Compiled) -> StageSharding:
    """Record how the devices of the one stage share it."""
    graph, realized, details = compiled.outcome.judge.graph, compiled.realized, compiled.outcome.details
    sharded = realized.sharded
    assert sharded is not None
    assert details is not None
    origins = details.origins
    fields: dict[str, Any] = dict(texts_of(sharded.placement))
    return StageSharding(
        **fields,
        samples_multiple=sharded.graph.batch.multiple,
        collectives=tuple(_collective(sharded, item) for item in realized.traffic),
        sums=tuple(
            GradientSumRecord(
                parameters=item.parameters,
                axes=item.sync.axes,
                scattered=item.sync.scattered,
                size_bytes=item.size_bytes,
                seconds=item.seconds,
            )
            for item in realized.sums
        ),
        gathers=tuple(
            UpdateGatherRecord(
                axis=item.axis, parameters=item.parameters, size_bytes=item.whole_bytes, seconds=item.seconds
            )
            for item in realized.gathers
        ),
        layouts=_layout_rows(graph, sharded, compiled.costs),
        discovered_ops=origins.discovered,
        replicated_ops=origins.replicated,
        replicated_seconds=origins.replicated_seconds,
        replicated_matmul_share=origins.replicated_matmul_share,
    )


def _collective(sharded: ShardedGraph, item: Traffic) -> StageCollective:
    ranks = len(all_ranks_along(sharded.mesh, item.axis.split(JOINT))[0])
    return StageCollective(
        value=item.node,
        kind=item.kind,
        axis=item.axis,
        size_bytes=item.whole_bytes,
        sent_bytes=item.sent_bytes(ranks),
        backward=item.backward,
    )


_Way = tuple[str, str, str, str, tuple[str, ...], str]
"""A way to keep and use a parameter: stored, state, taken, op, what it takes beside parameters, what it makes."""


def _layout_rows(graph: OpGraph, sharded: ShardedGraph, costs: GraphCosts) -> tuple[LayoutRow, ...]:
    """Make the rows of ``graph``: its parameters, and its products that read none, in the order of the model."""
    found: dict[tuple[str, _Way], list[_Entry]] = {}
    for entry in (*_parameters(graph, sharded, costs), *_products(graph, sharded, costs)):
        found.setdefault((_class_of(entry.name), entry.way), []).append(entry)
    ways = [key[0] for key in found]
    order = {node.name: i for i, node in enumerate(graph.ops)}
    rows = []
    for (pattern, way), entries in found.items():
        alone = ways.count(pattern) == 1
        stored, state, taken, op, takes, makes = way
        row = LayoutRow(
            name=pattern if alone and len(entries) > 1 else range_of([e.name for e in entries]) or pattern,
            count=len(entries),
            size_bytes=sum(entry.size_bytes for entry in entries),
            stored=stored,
            state=state,
            taken=taken,
            op=op,
            takes=takes,
            makes=makes,
        )
        rows.append((min(order.get(entry.reader, len(order)) for entry in entries), row))
    return tuple(row for _, row in sorted(rows, key=lambda item: item[0]))


class _Entry(NamedTuple):
    name: str
    way: _Way
    size_bytes: int
    reader: str


def _parameters(graph: OpGraph, sharded: ShardedGraph, costs: GraphCosts) -> list[_Entry]:
    whole: Placements = (Replicate(),) * len(sharded.mesh.shape)
    node_of = {given.name: graph.nodes[given.node] for given in graph.inputs if given.kind == "parameter"}
    index = {node.name: i for i, node in enumerate(graph.ops)}
    found = []
    for name, spec in sharded.graph.parameters.items():
        stored = sharded.placement.stored.get(name, whole)
        state = sharded.placement.sharded_state.get(name, stored)
        users = (
            [user for user in node_of[name].users if user.op == "call_function"] if name in node_of else []
        )
        products = [user for user in users if costs.op_class(index[user.name]) != "memory"]
        reader = next(iter((*products, *users)), None)
        read: tuple[str, str, tuple[str, ...], str] = ("", "", (), "")
        if reader is not None and reader.name in sharded.placement.choices:
            read = _reading(graph, sharded, reader, name)
        text = placements_text(stored)
        split = placements_text(state) if state != stored else ""
        own = reader.name if reader is not None else ""
        found.append(_Entry(name, (text, split, *read), spec.size_bytes, own))
    return found


def _products(graph: OpGraph, sharded: ShardedGraph, costs: GraphCosts) -> list[_Entry]:
    """List matrix products, convolutions and attention between activations, named by their modules."""
    found = []
    for i, node in enumerate(graph.ops):
        reads = [graph.input_of.get(source.name) for source in node.all_input_nodes]
        if costs.op_class(i) == "memory" or any(given and given.kind == "parameter" for given in reads):
            continue
        if node.name in sharded.placement.choices:
            _, op, takes, makes = _reading(graph, sharded, node, "")
            path = str(node.meta.get("module_path", "")) or node.name
            found.append(_Entry(path, ("", "", "", op, takes, makes), 0, node.name))
    return found


def _reading(
    graph: OpGraph, sharded: ShardedGraph, node: fx.Node, parameter: str
) -> tuple[str, str, tuple[str, ...], str]:
    """Return (layout in which ``parameter`` is taken, op, layouts of the other operands, layout of the first output)."""
    choice = sharded.placement.choices[node.name]
    taken, takes = "", []
    for position, source in enumerate(operands(node)):
        text = placements_text(tuple(one.inputs[position].placement for one in choice))
        given = graph.input_of.get(source.name)
        if given is None or given.kind != "parameter":
            takes.append(text)
        elif given.name == parameter:
            taken = text
    makes = placements_text(tuple(one.outputs[0] for one in choice)) if choice[0].outputs else ""
    return taken, str(node.target).removeprefix("aten.").partition(".")[0], tuple(takes), makes


def _class_of(name: str) -> str:
    """Name the class of a parameter: "h.0.mlp.weight" -> "h.*.mlp.weight"."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
