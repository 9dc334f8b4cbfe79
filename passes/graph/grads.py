"""Which values get a gradient: static, so that every rank knows which gradient messages will come.

A value needs a gradient iff it is floating point, depends on a trainable parameter through differentiable ops, and
reaches the loss through differentiable ops. Over-approximating is safe (the consumer then sends zeros); the reverse
would lose a gradient, so an op counts as differentiable unless it is known not to be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

if TYPE_CHECKING:
    from passes.graph.graph import OpGraph

aten = torch.ops.aten

NOT_DIFFERENTIABLE = frozenset(
    {
        aten.detach.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.empty_like.default,
        aten.full_like.default,
        aten.rand_like.default,
        aten.randn_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_empty.default,
        aten.new_full.default,
        aten.bernoulli.default,
        aten.bernoulli.p,
    }
)
"""Ops whose floating-point output has no gradient even if an input has one (autograd's own rule)."""


def requires_grad(graph: OpGraph) -> frozenset[str]:
    """Names of nodes that depend on a trainable parameter through differentiable ops."""
    trainable = {
        i.node for i in graph.inputs if i.kind == "parameter" and graph.parameters[i.name].requires_grad
    }
    found: set[str] = set()
    for node in graph.graph.nodes:
        if node.name in trainable or (
            node.op == "call_function"
            and node.target not in NOT_DIFFERENTIABLE
            and _is_floating(node)
            and any(source.name in found for source in node.all_input_nodes)
        ):
            found.add(node.name)
    return frozenset(found)


def needs_grad(graph: OpGraph) -> frozenset[str]:
    """Names of nodes (trainable parameters included) that receive a gradient from the loss."""
    candidates = requires_grad(graph)
    if graph.loss is None or graph.loss not in candidates:
        return frozenset()
    found = {graph.loss}
    for node in reversed(list(graph.graph.nodes)):
        if node.name in candidates and any(user.name in found for user in node.users if user.op != "output"):
            found.add(node.name)
    return frozenset(found)


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    items = value if isinstance(value, list | tuple) else (value,)
    return any(
        isinstance(item, torch.Tensor) and (item.is_floating_point() or item.is_complex()) for item in items
    )
