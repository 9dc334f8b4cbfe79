"""Collectives that run beside computing, as the executor starts them: sums of input gradients beside weight gradients.

    h = sum_gradient(x); q = linear(h, wq); k = linear(h, wk)        backward   dh ─┬─ sum of dh ─┬►
                                                                               └─ dwq, dwk ──┘

Seconds of such a sum and of its layers' weight gradients are ``cost_models.communication.hidden_seconds`` less than both in
a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from passes.graph.graph import OpGraph
from runtime.ops.bridges import is_bridge, sums_gradient
from runtime.ops.fused_linear import layers_run_with


def layers_beside(graph: OpGraph, regions: Sequence[Sequence[str]]) -> Mapping[str, tuple[str, ...]]:
    """Name the layers of a sharded graph whose weight gradients are computed while a bridge's sum is under way, by bridge.

    ``regions``: nodes that backward computes again, by block.
    """
    found = {}
    for node in graph.ops:
        if is_bridge(node) and sums_gradient(node) and node.name in graph.needs_grad:
            layers = layers_run_with(node, regions)
            if layers:
                found[node.name] = tuple(layer.name for layer in layers)
    return found
