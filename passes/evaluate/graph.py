"""An evaluation graph that leaves the model as it is: nothing in it writes a buffer. And what of it is wanted.

counter.add_(1) -> new contents of "counter"           dropped, with the ops that only it needed
batch_norm(x, …, training=True, momentum=0.1)          momentum 0: statistics of the batch, running ones unchanged
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from passes.graph.graph import OpGraph
from passes.graph.nodes import argument, copy_graph, fake_call, fake_mode_of, origin, replaced
from passes.graph.part import with_outputs


def without_writes(graph: OpGraph) -> OpGraph:
    """Remove the new contents of buffers from the outputs, and the momentum that statistics are written with."""
    new = copy_graph(graph.graph)
    outputs = tuple(output for output in graph.outputs if output.kind != "buffer")
    for node in new.nodes:
        if argument(node, "momentum") is not None:
            node.args, node.kwargs = replaced(node, node.args, node.kwargs, "momentum", 0.0)
    return with_outputs(graph, new, outputs)


def without_outputs(graph: OpGraph) -> OpGraph:
    """Remove the model's own outputs; the loss and metrics stay."""
    new = copy_graph(graph.graph)
    outputs = tuple(output for output in graph.outputs if output.kind != "output")
    return with_outputs(graph, new, outputs)


def with_computed_outputs(graph: OpGraph) -> OpGraph:
    """Make every output of ``graph`` an op's result, also one that is a parameter or a leaf of the batch itself."""
    given = {output.node for output in graph.outputs if output.node in graph.input_of}
    if not given:
        return graph
    new = copy_graph(graph.graph)
    nodes = {node.name: node for node in new.nodes}
    mode = fake_mode_of(graph.graph)
    computed: dict[str, fx.Node] = {}
    for name in sorted(given):
        source = nodes[name]
        with new.inserting_before(new.output_node()):
            computed[name] = new.call_function(torch.ops.aten.alias.default, (source,))
        value = fake_call(mode, torch.ops.aten.alias.default, (source.meta["val"],), {})
        computed[name].meta = {**origin(source), "val": value}
    outputs = tuple(
        dataclasses.replace(
            output, node=computed[output.node].name if output.node in computed else output.node
        )
        for output in graph.outputs
    )
    return with_outputs(graph, new, outputs)
