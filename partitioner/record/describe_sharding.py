"""The record of how devices share a stage, made from a compile's outcome.

The record has one row of layouts per class of equal blocks: how parameters are kept and how products run.

    h.0.mlp.c_fc.weight, h.1.mlp.c_fc.weight, …   ->   h.*.mlp.c_fc.weight  x4  stored S1, taken S1 by linear R -> S2
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import fx

from cost_models.cluster import ClusterSpec
from cost_models.layout import Replicate
from cost_models.units import counted, percent
from partitioner.record.modules import range_of
from partitioner.record.sharding import LayoutRow, StageSharding, texts_of
from passes.compile import Compiled
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.lower.on_mesh import OnMesh
from passes.search.infeasible import op_words
from passes.shard.words import Placements, operands, placements_text

WORTH_A_NOTE = 0.01
"""The least share of a step that is told: less is below what predictions are off by (docs/10: 1.2%)."""
MOST_NOTES = 3


def describe_sharding(compiled: Compiled, stage: int) -> StageSharding:
    """Record how the devices of a stage share it."""
    graph, details, mesh = (
        compiled.outcome.judge.graph,
        compiled.outcome.details,
        compiled.realized.meshes[stage],
    )
    assert details is not None
    origins = details.origins[stage]
    fields: dict[str, Any] = dict(texts_of(mesh.placement))
    return StageSharding(
        **fields,
        samples_multiple=mesh.samples_multiple,
        collectives=mesh.collectives,
        sums=mesh.sums,
        gathers=mesh.gathers,
        layouts=_layout_rows(graph, mesh, compiled.costs),
        discovered_ops=origins.discovered,
        replicated_ops=origins.replicated,
        replicated_seconds=origins.replicated_seconds,
        replicated_matmul_share=origins.replicated_matmul_share,
    )


def whole_ops(compiled: Compiled) -> list[str]:
    """Say of ops that every device runs whole, since no other way is known, what they take, the dearest lines first."""
    details, graph = compiled.outcome.details, compiled.outcome.judge.graph
    step_seconds = compiled.outcome.best.step_seconds
    taken: dict[str, float] = defaultdict(float)
    for origins in details.origins.values() if details is not None else ():
        for name, seconds in origins.whole.items():
            node = graph.nodes[name]
            where = node.meta.get("source") or node.meta.get("module_path") or "no known line"
            taken[f"`{op_words(node)}` at {where} is run whole on every device"] += seconds
    said = [
        f"{text}: no rule says another way, and none was found; {percent(seconds / step_seconds)} of the step"
        for text, seconds in sorted(taken.items(), key=lambda item: -item[1])
        if seconds >= WORTH_A_NOTE * step_seconds
    ]
    more = len(said) - MOST_NOTES
    return [*said[:MOST_NOTES], *([f"{more} more lines are run whole like that"] if more > 0 else [])]


def even_batches(compiled: Compiled, cluster: ClusterSpec) -> list[str]:
    """Say which batches all devices could share equally, where a sharding cannot use them all for this one."""
    batch, world = compiled.request.job.batch_size, cluster.world_size
    used = {rank for group in compiled.outcome.best.candidate.groups for rank in group}
    shared = compiled.request.strategy in ("feature", "hybrid") and 1 < len(used) < world
    if not shared or batch % world == 0:
        return []
    less = batch - batch % world
    sizes = f"{less} or {less + world}" if less else str(world)
    return [
        f"{counted(len(used), 'device')} of {world} in use: {batch} samples make no {world} equal parts, a batch of "
        f"{sizes} does"
    ]


def _layout_rows(graph: OpGraph, mesh: OnMesh, costs: GraphCosts) -> tuple[LayoutRow, ...]:
    """Make the rows of ``graph``: its parameters, and its products that read none, in the order of the model.

    Every parameter and product is a row of its own at first, with the op that reads it; equal ones of a class become one.
    """
    classes: dict[tuple[str, object], list[tuple[str, LayoutRow]]] = {}
    for reader, row in (*_parameters(graph, mesh, costs), *_products(graph, mesh, costs)):
        way = row.stored, row.state, row.taken, row.op, row.takes, row.makes
        classes.setdefault((_class_of(row.name), way), []).append((reader, row))
    patterns = [pattern for pattern, _ in classes]
    order = {node.name: i for i, node in enumerate(graph.ops)}
    rows = []
    for (pattern, _), alike in classes.items():
        alone = patterns.count(pattern) == 1 and len(alike) > 1
        name = pattern if alone else range_of([row.name for _, row in alike]) or pattern
        size_bytes = sum(row.size_bytes for _, row in alike)
        joined = alike[0][1].model_copy(update={"name": name, "count": len(alike), "size_bytes": size_bytes})
        rows.append((min(order.get(reader, len(order)) for reader, _ in alike), joined))
    return tuple(row for _, row in sorted(rows, key=lambda item: item[0]))


def _parameters(graph: OpGraph, mesh: OnMesh, costs: GraphCosts) -> Iterator[tuple[str, LayoutRow]]:
    whole: Placements = (Replicate(),) * len(mesh.placement.mesh.shape)
    node_of = {source.name: graph.nodes[source.node] for source in graph.inputs if source.kind == "parameter"}
    index = {node.name: i for i, node in enumerate(graph.ops)}
    for name, spec in mesh.parameters.items():
        stored = mesh.placement.stored.get(name, whole)
        state = mesh.placement.sharded_state.get(name, stored)
        users = (
            [user for user in node_of[name].users if user.op == "call_function"] if name in node_of else []
        )
        products = [user for user in users if costs.op_class(index[user.name]) != "memory"]
        reader = next(iter((*products, *users)), None)
        row = LayoutRow(
            name=name,
            count=1,
            size_bytes=spec.size_bytes,
            stored=placements_text(stored),
            state=placements_text(state) if state != stored else "",
            **_reading(graph, mesh, reader, name),
        )
        yield "" if reader is None else reader.name, row


def _products(graph: OpGraph, mesh: OnMesh, costs: GraphCosts) -> Iterator[tuple[str, LayoutRow]]:
    """Yield matrix products, convolutions and attention between activations, named by their modules."""
    for i, node in enumerate(graph.ops):
        if node.name not in mesh.placement.choices or costs.op_class(i) == "memory":
            continue
        reads = [graph.input_of.get(source.name) for source in node.all_input_nodes]
        if not any(given and given.kind == "parameter" for given in reads):
            path = str(node.meta.get("module_path", "")) or node.name
            read = _reading(graph, mesh, node, "")
            yield node.name, LayoutRow(name=path, count=1, size_bytes=0, stored="", state="", **read)


def _reading(graph: OpGraph, mesh: OnMesh, node: fx.Node | None, parameter: str) -> dict[str, Any]:
    """Return the fields of a row that say how ``node`` takes ``parameter`` and runs; empty ones where that is not known."""
    if node is None or node.name not in mesh.placement.choices:
        return {"taken": "", "op": "", "takes": (), "makes": ""}
    choice = mesh.placement.choices[node.name]
    taken, takes = "", []
    for position, source in enumerate(operands(node)):
        text = placements_text(tuple(one.inputs[position].placement for one in choice))
        operand = graph.input_of.get(source.name)
        if operand is None or operand.kind != "parameter":
            takes.append(text)
        elif operand.name == parameter:
            taken = text
    makes = placements_text(tuple(one.outputs[0] for one in choice)) if choice[0].outputs else ""
    op = str(node.target).removeprefix("aten.").partition(".")[0]
    return {"taken": taken, "op": op, "takes": tuple(takes), "makes": makes}


def _class_of(name: str) -> str:
    """Name the class of a parameter: "h.0.mlp.weight" -> "h.*.mlp.weight"."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
