"""An evaluation graph that leaves the model as it is: nothing in it writes a buffer.

counter.add_(1) -> new contents of "counter"           dropped, with the ops that only it needed
batch_norm(x, …, training=True, momentum=0.1)          momentum 0: statistics of the batch, running ones unchanged
"""

from __future__ import annotations

import dataclasses

from torch import fx

from passes.graph import OpGraph
from passes.node_tools import argument, copy_graph, new_module


def without_writes(graph: OpGraph) -> OpGraph:
    """``graph`` with outputs for people only."""
    new = copy_graph(graph.graph)
    outputs = tuple(output for output in graph.outputs if output.kind != "buffer")
    nodes = {node.name: node for node in new.nodes}
    new.output_node().args = (tuple(nodes[output.node] for output in outputs),)
    for node in new.nodes:
        if argument(node, "momentum") is not None:
            _set_argument(node, "momentum", 0.0)
    # An op without a reader computes nothing that anybody sees; a placeholder without one is no input.
    for node in reversed(list(new.nodes)):
        if node.op != "output" and not node.users:
            new.erase_node(node)
    kept = {node.name for node in new.nodes}
    inputs = tuple(i for i in graph.inputs if i.node in kept)
    return dataclasses.replace(graph, module=new_module(graph.module, new), outputs=outputs, inputs=inputs)


def _set_argument(node: fx.Node, name: str, value: float) -> None:
    """Write ``value`` over an argument that the op has, by position or by name."""
    position = [declared.name for declared in node.target._schema.arguments].index(name)  # type: ignore[union-attr]
    if name in node.kwargs or position >= len(node.args):
        node.kwargs = {**node.kwargs, name: value}
    else:
        node.args = (*node.args[:position], value, *node.args[position + 1 :])
