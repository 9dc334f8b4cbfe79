"""``plan.graph(rank=0)``: everything that one rank runs, op by op, bridges by name; as text, DOT or JSON.

    rank 0 of 2 · Mlp · mesh 2 · b: samples of a micro-batch

      %x                             batch x                          [b, 8]   R
      %up_weight                     parameter up.weight              [8, 8]   S0
    > %x__sum_gradient_all           sum_gradient(%x, axis=all)       [b, 8]   backward: all-reduce
      %linear                        linear(%x__sum_gradient_all, …)  [b, 8]   S1

Bridges are marked: what goes between devices, forward or backward. Shapes are the rank's own.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import networkx as nx
import sympy
import torch
from torch import fx

from cost_models.errors import UsageError
from cost_models.shown import printable
from cost_models.units import counted
from partitioner.explain.graph_of_plan import graph_of
from partitioner.record.rebuild import plan_code
from partitioner.report.sharding import devices_text, mesh_text, ranks_text
from passes.graph.graph import OpGraph, tensor_specs
from passes.lower.placed_graph import PlacedGraph
from passes.shard.words import placements_text
from runtime.ops import bridges
from runtime.ops.local import run_local
from runtime.segment.code import SegmentCode

if TYPE_CHECKING:
    from partitioner.models.as_graph import ModelOrTrace
    from partitioner.record.data import PlanData
    from partitioner.record.records import Stage

TALKING = ("cross_entropy", "nll_loss", "batch_norm")
"""Ops whose local forms send something themselves."""
WIDEST = 64
"""The most characters of a call; longer ones are cut."""
_BACKWARD: Mapping[Any, str] = {
    bridges.all_reduce: "nothing",
    bridges.sum_gradient: "all-reduce",
    bridges.split: "all-gather",
    bridges.all_gather: "split",
    bridges.reduce_scatter: "all-gather",
    bridges.all_to_all: "all-to-all",
    bridges.keep_first: "nothing",
    bridges.first_gradient: "zeros but on the first",
}
_BACKWARD_OF_PARTS: Mapping[Any, str] = {
    bridges.all_reduce: "all-reduce",
    bridges.all_gather: "reduce-scatter",
}


@dataclass(frozen=True)
class RankNode:
    """A node of the graph. ``reads``: names of nodes. ``bridge``: true if it talks to other ranks.

    ``note``: its layout, what its backward does, the ranks that it talks to.
    """

    name: str
    does: str
    shape: str
    note: str
    module: str
    reads: tuple[str, ...] = ()
    bridge: bool = False


@dataclass(frozen=True)
class RankGraph:
    """The graph of one rank. ``parts``: title and nodes of every segment that it runs, in the order of the model."""

    title: str
    parts: Mapping[str, tuple[RankNode, ...]] = field(default_factory=dict)

    @property
    def bridges(self) -> tuple[str, ...]:
        """The names of what goes between ranks."""
        return tuple(node.name for nodes in self.parts.values() for node in nodes if node.bridge)

    def __str__(self) -> str:
        blocks = [self.title]
        for title, nodes in self.parts.items():
            shown = [(f"{'>' if n.bridge else ' '} %{n.name}", _cut(n.does), n.shape, n.note) for n in nodes]
            widths = [max((len(row[c]) for row in shown), default=0) for c in range(3)]
            lines = [
                "  ".join([*(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)), row[3]]).rstrip()
                for row in shown
            ]
            blocks.append("\n".join([title, *lines] if title else lines))
        return printable("\n\n".join(blocks))

    def networkx(self) -> nx.DiGraph[str]:
        """Return a graph with one node per op or input, with attributes label, module, device and bridge."""
        dag: nx.DiGraph[str] = nx.DiGraph(name=self.title)
        for title, nodes in self.parts.items():
            for node in nodes:
                label = f"{node.name}\n{_cut(node.does)}\n{node.shape} {node.note}".rstrip()
                dag.add_node(
                    node.name, label=label, module=node.module, device=title or None, bridge=node.bridge
                )
        for nodes in self.parts.values():
            for node in nodes:
                dag.add_edges_from((source, node.name) for source in node.reads if source in dag)
        return dag


def rank_graph(plan: PlanData, model: ModelOrTrace | None, rank: int, options: dict[str, Any]) -> RankGraph:
    """Make the graph of ``rank``. Raises UsageError for a rank that runs nothing, PlanError for another model."""
    if rank not in plan.used_devices:
        raise UsageError(
            f"there is no graph of rank {rank}",
            [f"the plan uses {counted(plan.world_size, 'device')}: {ranks_text(plan.used_devices)}"],
        )
    graph = graph_of(plan, model, f"show the graph of rank {rank}", options)
    code = plan_code(plan, graph)
    stages = [index for index, stage in enumerate(plan.stages) if rank in stage.devices]
    lowered = code.lowered(only=frozenset(stages))
    parts = {
        f"stage {index}" if len(plan.stages) > 1 else "": _nodes(
            plan, plan.stages[index], code, lowered[index], graph
        )
        for index in stages
    }
    return RankGraph(_title(plan, rank, stages, code), parts)


def _title(plan: PlanData, rank: int, stages: Sequence[int], code: PlacedGraph) -> str:
    """``own``: the stages that the rank runs."""
    parts = [f"rank {rank} of {plan.world_size}", plan.model.name]
    shared = [sharding for index in stages if (sharding := plan.stages[index].sharding) is not None]
    parts += dict.fromkeys(f"mesh {mesh_text(sharding)}" for sharding in shared)
    unit = code.batch_of(rank).multiple
    parts.append(f"b: {'samples' if unit == 1 else f'units of {unit} samples'} of a micro-batch")
    return " · ".join(parts)


def _nodes(
    plan: PlanData, stage: Stage, code: PlacedGraph, lowered: SegmentCode, model: OpGraph
) -> tuple[RankNode, ...]:
    batch = code.graph.batch.batch_symbol
    kinds = dict(zip(lowered.module.graph.find_nodes(op="placeholder"), lowered.inputs, strict=True))
    layouts = _layouts(stage, model)
    sent = {value.name: value.consumers for value in plan.values if plan.stages[value.producer] is stage}
    producer = {value.name: value.producer for value in plan.values}
    nodes = []
    for node in lowered.module.graph.nodes:
        note, bridge, does = layouts.get(node.name, ""), False, ""
        if node.op == "output":
            continue
        if node.op == "placeholder":
            given = kinds[node]
            note = layouts.get((given.kind, given.name), note)
            does, bridge = f"{given.kind} {given.name}", given.kind == "value"
            if bridge:
                source = producer[given.name]
                bridge = plan.stages[source].devices != stage.devices
                note = f"from stage {source}{_of(plan, source)}" if bridge else f"of stage {source}"
                does = "receive" if bridge else "kept"
        elif node.target is operator.getitem:
            does = f"%{node.args[0]}[{node.args[1]}]"
        else:
            does, bridge = _call(node), bridges.is_bridge(node)
            note = _undone(node) if bridge else note
            bridge = bridge or (node.target is run_local and node.args[0] in TALKING)
        shape = ", ".join(_shape(spec.shape, batch) for spec in tensor_specs(node))
        reads = tuple(source.name for source in node.all_input_nodes)
        nodes.append(
            RankNode(node.name, does, shape, note, str(node.meta.get("module_path", "")), reads, bridge)
        )
        away = [c for c in sent.get(node.name, ()) if plan.stages[c].devices != stage.devices]
        for consumer in away:
            note = f"to stage {consumer}{_of(plan, consumer)}"
            name = f"{node.name}__send_{consumer}"
            nodes.append(RankNode(name, f"send(%{node.name})", shape, note, "", (node.name,), True))
    return tuple(nodes)


def _of(plan: PlanData, stage: int) -> str:
    return f", {devices_text(plan.stages[stage].devices)}"


def _layouts(stage: Stage, model: OpGraph) -> dict[object, str]:
    """Return layouts: an op's by its name, an input's by (kind, name); nothing if one rank runs the stage."""
    sharding = stage.sharding
    if sharding is None:
        return {}
    placement = sharding.placement(stage.devices, 1)
    whole = " ".join("R" for _ in sharding.axes)
    layouts: dict[object, str] = {}
    for source in model.inputs:
        placed = placement.batch if source.kind == "batch" else placement.stored
        layout = placed.get(source.name)
        layouts[source.kind, source.name] = whole if layout is None else placements_text(layout)
    for op, ways in placement.choices.items():
        if ways and ways[0].outputs:
            layouts[op] = placements_text(tuple(way.outputs[0] for way in ways))
    return layouts


def _call(node: fx.Node) -> str:
    """Write a call as "linear(%x, %w, None)"; a local form as "cross_entropy[classes: inner](…)"."""
    args = list(node.args)
    name = str(node.target)
    if node.target is run_local:
        function, _, roles, *args = args
        assert isinstance(roles, Mapping)
        name = f"{function}[{', '.join(f'{role}: {axis}' for role, axis in roles.items())}]"
    elif isinstance(node.target, torch._ops.OpOverload):
        name = name.removeprefix("aten.").partition(".")[0]
    else:
        name = getattr(node.target, "__name__", name)
    words = [_word(argument) for argument in args]
    words += [f"{key}={_word(value)}" for key, value in node.kwargs.items()]
    return f"{name}({', '.join(words)})"


def _word(argument: object) -> str:
    if isinstance(argument, fx.Node):
        return f"%{argument.name}"
    if isinstance(argument, list | tuple):
        return f"[{', '.join(map(_word, argument))}]"
    return str(argument)


def _undone(node: fx.Node) -> str:
    """Say what a bridge does to the gradient."""
    table = _BACKWARD_OF_PARTS if node.kwargs.get("partial") else _BACKWARD
    return f"backward: {table.get(node.target, _BACKWARD.get(node.target, '?'))}"


def _shape(shape: tuple[int | sympy.Expr, ...], batch: sympy.Symbol) -> str:
    b = sympy.Symbol("b")
    sizes = [str(size if isinstance(size, int) else size.subs(batch, b)) for size in shape]
    return f"[{', '.join(sizes)}]"


def _cut(text: str) -> str:
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"
