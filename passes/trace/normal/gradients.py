"""Gradients stop where they stopped in the model: ``no_grad`` becomes ``detach``.

Before: ``with torch.no_grad(): feature = frozen(x)``     After: ``feature = detach(linear(x, frozen.weight))``

Which tensors required a gradient was recorded by the trace. An op whose result did not, although an input carries
one, is followed by a ``detach`` (per op, so that autograd keeps nothing of a frozen branch alive). An op whose result
did although no input carries one has a backward that the graph cannot show: an error.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from passes.graph.graph import NOT_DIFFERENTIABLE
from passes.graph.nodes import call, fake_mode_of, is_floating, recorded_requires_grad, where
from passes.trace.opaque.refused import PartError, blamed

aten = torch.ops.aten


def cut_gradients(graph: fx.Graph, *, strict: bool, written: frozenset[fx.Node] = frozenset()) -> None:
    """Insert the detaches into ``graph``.

    ``strict``: also raise on gradients from nowhere. Only meaningful once the graph is functional, since a tensor
    that is written later may carry more than what was recorded when it was made. ``written``: results of writes; they
    required a gradient by what was overwritten, so theirs and their consumers' may come from nowhere.
    """
    mode = fake_mode_of(graph)
    carries: set[fx.Node] = set()
    excused: set[fx.Node] = set(written)
    problems: list[str] = []
    parts: dict[str, None] = {}
    for node in list(graph.nodes):
        recorded = recorded_requires_grad(node)
        if node.op == "placeholder":
            if recorded:
                carries.add(node)
            continue
        if node.op != "call_function" or not is_floating(node):
            continue
        carried = node.target not in NOT_DIFFERENTIABLE and any(s in carries for s in node.all_input_nodes)
        if not strict and _mutates(node):
            if recorded or carried:
                carries.add(node)
            continue
        if any(source in excused for source in node.all_input_nodes):
            excused.add(node)
        if carried and recorded is False and not isinstance(node.meta["val"], list | tuple):
            if not all(user.target == aten.detach.default for user in node.users):
                _detach(graph, mode, node)
        elif carried or (recorded and not strict):
            carries.add(node)
        elif recorded and node not in excused:
            problems.append(where(node))
            parts[blamed(node)] = None
            carries.add(node)  # one message per source, not one per consumer
    if problems:
        raise PartError(
            "a gradient that the traced graph cannot reproduce",
            [f"{place} has a gradient although none of its inputs does" for place in problems],
            [
                "compute it with differentiable operations, or in a custom torch.autograd.Function",
                "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
            ],
            list(parts),
        )


def _detach(graph: fx.Graph, mode: FakeTensorMode | None, node: fx.Node) -> None:
    with graph.inserting_after(node):
        stop = call(graph, mode, aten.detach.default, (node,), like=node)
    node.replace_all_uses_with(stop, delete_user_cb=lambda user: user is not stop)


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
