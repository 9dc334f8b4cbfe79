"""Parts of a graph: the ops that one group of devices runs by itself, as a graph of their own.

x ─ linear ─ relu ─ loss        part {relu, loss}:     linear ─ relu ─ loss        takes the value linear
x ─ mul ─ extra                 part {linear, mul}:    x ─ linear                  makes the value linear
                                                       x ─ mul ─ extra
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import fx

from cost_models.errors import InternalError
from passes.graph.code_on_demand import code_on_demand
from passes.graph.graph import GraphInput, GraphOutput, OpGraph
from passes.graph.nodes import new_module, writes


@code_on_demand()
def part_of(graph: OpGraph, ops: Collection[str], copied: Collection[str] = ()) -> OpGraph:
    """Return ``ops`` with what they read and the outputs that they make; ``graph`` itself where these are all its ops.

    What they read of other ops are inputs called "value", what other ops read of them outputs. ``copied``: those of which
    every part has copies of its own. Raises ``InternalError`` for what goes between parts and is no tensor.
    """
    own = set(ops)
    if own.issuperset(node.name for node in graph.ops):
        return graph
    names = own | _needed(graph, own, copied)
    kept = [node for node in graph.ops if node.name in names]
    new, entering = _copied(graph, kept, own)
    leaving = tuple(
        GraphOutput(node.name, "value", node.name, node.name in graph.needs_grad)
        for node in graph.ops
        if node.name in own and node.name not in copied
        if any(
            user.op != "output" and user.name not in own and user.name not in copied for user in node.users
        )
    )
    outputs = (*leaving, *(output for output in graph.outputs if output.node in own))
    part = with_outputs(replace(graph, inputs=(*graph.inputs, *entering)), new, outputs, own)
    names = {given.name for given in part.inputs} | {output.name for output in part.outputs}
    return replace(
        part,
        parameters={name: spec for name, spec in graph.parameters.items() if name in names},
        buffers={name: spec for name, spec in graph.buffers.items() if name in names},
        constants={name: value for name, value in graph.constants.items() if name in names},
        parts={name: part for name, part in graph.parts.items() if name in names},
        aliases={alias: name for alias, name in graph.aliases.items() if name in names},
        views={name: view for name, view in graph.views.items() if view.owner in names},
    )


def _needed(graph: OpGraph, own: Collection[str], copied: Collection[str]) -> frozenset[str]:
    """Name the ops of ``copied`` that ``own`` are computed from."""
    found: set[str] = set()
    waiting = [source for name in own for source in graph.nodes[name].all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node.name in copied and node.name not in found and node.name not in own:
            found.add(node.name)
            waiting += node.all_input_nodes
    return frozenset(found)


def _copied(
    graph: OpGraph, kept: Sequence[fx.Node], own: Collection[str]
) -> tuple[fx.Graph, tuple[GraphInput, ...]]:
    """Copy the ops ``kept`` and what they read: the model's own inputs, and a placeholder for each value of other ops."""
    names = {node.name for node in kept}
    read = {source.name for node in kept for source in node.all_input_nodes} - names
    new = fx.Graph()
    made: dict[str, fx.Node] = {}
    taken = []
    for old in graph.graph.nodes:
        if old.name not in read:
            continue
        if old.op != "placeholder":
            if not isinstance(old.meta["val"], torch.Tensor):
                raise InternalError(
                    f"run {len(own)} of the {len(graph)} ops of {graph.model_name} on a mesh of their own",
                    [f"{old.name} goes into the part and is no tensor"],
                )
            taken.append(GraphInput(old.name, "value", old.name, old.name in graph.needs_grad))
        made[old.name] = new.placeholder(old.name)
        made[old.name].meta = dict(old.meta)
    for node in kept:
        made[node.name] = new.node_copy(node, lambda source: made[source.name])
    new.output(()).meta.update(graph.graph.output_node().meta)
    return new, tuple(taken)


def with_outputs(
    graph: OpGraph, new: fx.Graph, outputs: tuple[GraphOutput, ...], writers: Collection[str] = ()
) -> OpGraph:
    """Return ``graph`` as ``new``, a copy of its nodes, with ``outputs`` and without what only others needed.

    ``writers``: ops that stay where they write to what they are given (running statistics), even if nobody reads them.
    """
    nodes = {node.name: node for node in new.nodes}
    new.output_node().args = (tuple(nodes[output.node] for output in outputs),)
    # Any other op without a reader computes nothing that anybody sees; a placeholder without one is no input.
    for node in reversed(list(new.nodes)):
        if node.op != "output" and not node.users and not (node.name in writers and writes(node)):
            new.erase_node(node)
    kept = {node.name for node in new.nodes}
    inputs = tuple(given for given in graph.inputs if given.node in kept)
    return replace(graph, module=new_module(graph.module, new), outputs=outputs, inputs=inputs)
