"""The costs that are not known, in words for a plan's notes."""

from __future__ import annotations

from torch import fx

from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.graph.nodes import where
from runtime.ops.opaque import Opaque


def unknown_costs(graph: OpGraph, costs: GraphCosts) -> list[str]:
    """Name the opaque parts that could not be run when they were costed, and the kernels whose FLOPs nobody counts."""
    guesses = [
        f"the cost of {node.target.called} is a guess from its parameters and shapes: it could not be run alone"
        for node in graph.ops
        if isinstance(node.target, Opaque) and node.name in costs.estimated
    ]
    first: dict[str, fx.Node] = {}
    for node, kernels in zip(graph.ops, costs.uncounted, strict=True):
        for kernel in kernels:
            first.setdefault(kernel, node)
    uncounted = [
        f"the arithmetic of {kernel} is not counted, its time is that of its memory traffic: {where(node)}; "
        "a formula can be told by torch.utils.flop_counter.register_flop_formula"
        for kernel, node in first.items()
    ]
    return guesses + uncounted
