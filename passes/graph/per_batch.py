"""Buffers that forward writes, by how often: once a batch, whatever its micro-batches, or with each of these.

steps += 1                      once a batch: every micro-batch starts from what was there before the step
u = normalize(weight @ v)       once a batch: spectral norm's vectors, an average of a weight
mean = 0.9 mean + 0.1 x.mean()  with each micro-batch: its new contents depend on the batch
"""

from __future__ import annotations

from dataclasses import replace

from passes.graph.graph import OpGraph
from passes.graph.recomputed import draws_random_numbers
from passes.graph.state import mutable_buffers


def with_once_written(graph: OpGraph) -> OpGraph:
    """Return ``graph`` with the outputs marked that are buffers written once a batch."""
    each = _written_with_each(graph)
    outputs = tuple(replace(o, once=o.kind == "buffer" and o.name not in each) for o in graph.outputs)
    return replace(graph, outputs=outputs)


def _written_with_each(graph: OpGraph) -> set[str]:
    """Name the buffers whose new contents depend on the batch or on a draw, also through such a buffer."""
    declared = {output.name: output.node for output in graph.outputs if output.kind == "buffer"}
    each = set(mutable_buffers(graph)) - set(declared)  # statistics that a norm writes in place
    while True:
        roots = [i.node for i in graph.inputs if i.kind == "batch" or (i.kind == "buffer" and i.name in each)]
        reached = _reached(graph, roots)
        more = {name for name, node in declared.items() if node in reached} - each
        if not more:
            return each
        each |= more


def _reached(graph: OpGraph, roots: list[str]) -> set[str]:
    """Name the nodes that depend on ``roots``, or on random numbers."""
    reached = set(roots)
    for node in graph.graph.nodes:
        if node.op == "call_function" and (
            draws_random_numbers(node) or any(source.name in reached for source in node.all_input_nodes)
        ):
            reached.add(node.name)
    return reached
