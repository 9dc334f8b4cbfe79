"""Parts of a graph: the ops that one group of devices runs by itself, as a graph of their own.

x ─ linear ─ loss               part {mul}:   x ─ mul ─ extra
x ─ mul ─ extra
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import fx

from cost_models.errors import InternalError
from passes.graph.graph import GraphOutput, OpGraph
from passes.graph.nodes import copy_graph, new_module, writes


def part_of(graph: OpGraph, ops: Collection[str], copied: Collection[str] = ()) -> OpGraph:
    """Return ``ops`` with what they read and the outputs that they make; ``graph`` itself where these are all its ops.

    ``copied``: those of which other parts have copies of their own. Raises ``InternalError`` if a value goes into the part
    or out of it: it would have to change from one group's layouts to another's, and there is no bridge between meshes.
    """
    own = set(ops)
    if own.issuperset(node.name for node in graph.ops):
        return graph
    values = [
        f"{node.name} goes {'out of' if node.name in own else 'into'} the part, to {user.name}"
        for node in graph.ops
        for user in node.users
        if user.op != "output" and (node.name in own) != (user.name in own) and node.name not in copied
    ]
    if values:
        raise InternalError(
            f"run {len(own)} of the {len(graph)} ops of {graph.model_name} on a mesh of their own",
            [*values[:5], "between meshes a value changes its layout, and there is no bridge for that"],
        )
    new = copy_graph(graph.graph)
    part = with_outputs(graph, new, tuple(output for output in graph.outputs if output.node in own), own)
    names = {given.name for given in part.inputs} | {output.name for output in part.outputs}
    return replace(
        part,
        parameters={name: spec for name, spec in graph.parameters.items() if name in names},
        buffers={name: spec for name, spec in graph.buffers.items() if name in names},
        constants={name: value for name, value in graph.constants.items() if name in names},
        parts={name: part for name, part in graph.parts.items() if name in names},
        views={name: view for name, view in graph.views.items() if view.owner in names},
    )


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
