"""Totals: numbers that the batch alone decides are those of the whole batch, not of each micro-batch.

Before                                          After
    %count = sum(%mask)                             (%loss_total: a batch leaf)
    %loss  = div(%sum, clamp(%count, 1))            %loss  = div(%sum, clamp(%loss_total, 1))

A total is made of batch leaves and constants alone, and is the first on its way without an element per sample: a count of
valid labels, the sum of a mask or of sample weights, the labels of each class, a mean and a deviation that advantages are
normalized by. Its leaf has no batch dimension, and whoever runs a step fills it in (``passes.graph.token_counts``).

What is no loss (metrics, a model's outputs, buffers) goes on reading the micro-batch's own.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import torch
from torch import fx

from passes.graph.nodes import op_name, writes
from passes.graph.recomputed import draws_random_numbers
from passes.trace.build import Converted
from passes.trace.loss.dependence import Dependence, ancestors, sizes
from passes.trace.loss.leaves import MadeLeaves
from runtime.ops.opaque import Opaque

LEAF = "loss_total"
_PICKS = frozenset(
    {"select", "slice", "index", "index_select", "gather", "narrow", "unbind", "split", "chunk"}
)
"""Ops that pick samples, and sum up nothing."""


def with_totals(
    traced: Converted, leaves: MadeLeaves, left: Container[str]
) -> tuple[Converted, dict[str, fx.Node]]:
    """Let the loss read the totals of the whole batch, the graph of ``traced`` in place; the node of each, by its leaf.

    ``left``: names of those that stay the micro-batch's own.
    """
    graph, kinds = traced.module.graph, {i.node: i.kind for i in traced.inputs}
    outputs = list(zip(traced.outputs, graph.output_node().args[0], strict=True))  # type: ignore[arg-type]
    losses = [node for entry, node in outputs if entry.kind == "loss"]
    behind_loss = set(ancestors(*losses))
    behind_rest = set(ancestors(*(node for entry, node in outputs if entry.kind != "loss")))
    totals = [node for node in _totals(traced, leaves) if node in behind_loss and node.name not in left]
    parameters = {leaf for leaf in graph.find_nodes(op="placeholder") if kinds.get(leaf.name) == "parameter"}
    shared = behind_loss & behind_rest
    totals = [node for node in totals if _is_late(node, shared, parameters)]
    if not totals or parameters.isdisjoint(behind_loss):  # nothing is trained: all of it is a total
        return traced, {}
    made: dict[str, fx.Node] = {}
    instead: dict[fx.Node, fx.Node] = {}
    for node in totals:
        value = node.meta["val"]
        leaf = leaves.whole(LEAF, tuple(value.shape), value.dtype)
        made[leaf], instead[node] = node, leaves.nodes[leaf]
    for node in list(graph.nodes):
        if node not in behind_loss or node in instead or not instead.keys() & set(node.all_input_nodes):
            continue
        if node in behind_rest:
            with graph.inserting_before(node.next):
                instead[node] = graph.node_copy(node, lambda source: instead.get(source, source))
        else:
            node.args = fx.map_arg(node.args, lambda source: instead.get(source, source))
            node.kwargs = fx.map_arg(node.kwargs, lambda source: instead.get(source, source))
    values = [instead.get(node, node) if entry.kind == "loss" else node for entry, node in outputs]
    graph.output_node().args = (tuple(values),)
    entries = [replace(entry, node=node.name) for (entry, _), node in zip(outputs, values, strict=True)]
    return replace(traced, inputs=leaves.inputs(), outputs=tuple(entries)), made


def _totals(traced: Converted, leaves: MadeLeaves) -> list[fx.Node]:
    """List what is made of the batch alone, and of its samples together."""
    facts = Dependence(traced, leaves.spec())
    by_batch: set[fx.Node] = set()
    found = []
    for node in traced.module.graph.nodes:
        if node.op == "placeholder":
            if facts.kinds[node.name][0] in ("batch", "constant"):
                by_batch.add(node)
        elif all(source in by_batch for source in node.all_input_nodes) and _is_repeatable(node):
            by_batch.add(node)
            if (
                node in facts.contents
                and isinstance(node.meta.get("val"), torch.Tensor)
                and all(isinstance(size, int) for size in sizes(node))
                and any(facts.counts_samples(source) for source in node.all_input_nodes)
                and op_name(node) not in _PICKS
            ):
                found.append(node)
    return found


def _is_repeatable(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return not writes(node) and not draws_random_numbers(node)
    return node.op == "call_function" and not isinstance(node.target, Opaque)  # sizes, parts of a result


def _is_late(total: fx.Node, shared: set[fx.Node], parameters: set[fx.Node]) -> bool:
    """Tell whether little is copied for what goes on reading the micro-batch's own: nothing that reads a parameter.

    ``shared``: nodes behind the loss and behind other outputs.
    """
    waiting, seen = list(total.users), set(total.users)
    while waiting:
        node = waiting.pop()
        if node in shared and not (_is_repeatable(node) and parameters.isdisjoint(node.all_input_nodes)):
            return False
        fresh = [user for user in node.users if user not in seen]
        seen.update(fresh)
        waiting += fresh
    return True
