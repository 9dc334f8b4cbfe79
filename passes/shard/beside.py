"""Collectives that run beside computing, as the executor starts them: sums of input gradients beside weight gradients,

    h = sum_gradient(x); q = linear(h, wq); k = linear(h, wk)        backward   dh ─┬─ sum of dh ─┬►
                                                                               └─ dwq, dwk ──┘

and gathers of parameters beside the ops in front of them (``runtime.ops.gather_ahead``). Seconds of either and of what runs
beside it are ``cost_models.communication.hidden_seconds`` less than both in a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor, fx

from passes.graph.graph import OpGraph
from runtime.ops.bridges import all_gather, is_bridge, sums_gradient
from runtime.ops.fused_linear import fuse, layers_run_with, linears_behind
from runtime.ops.gather_ahead import gather_steps


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


def ops_beside_gathers(
    graph: OpGraph, regions: Sequence[Sequence[str]]
) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Name the gathers of parameters that start ahead, step by step, and the ops that run until they are waited for."""
    if sum(map(len, gather_steps(_gathers(graph.ops), regions))) < 2:
        return ()  # one step at most, in whatever order
    ordered = fx.Graph()
    ordered.output(ordered.graph_copy(next(iter(graph.nodes.values())).graph, val_map={}))
    summing = [node for node in ordered.nodes if is_bridge(node) and sums_gradient(node)]
    fuse(
        ordered, dict.fromkeys(summing, linears_behind("", None, _nothing)), regions
    )  # as the executor orders them
    steps = gather_steps(_gathers(ordered.nodes), regions)
    found = []
    for before, step in itertools.pairwise(steps):
        beside, node = [], before[-1].next
        while node is not step[0]:
            beside.append(node.name)
            node = node.next
        found.append(
            (tuple(each.name for each in step), tuple(name for name in beside if name in graph.nodes))
        )
    return tuple(found)


def _gathers(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if is_bridge(node) and node.target is all_gather]


def _nothing(gradient: Tensor) -> Callable[[], Tensor]:
    """Stand for the start of a sum, in a graph that is not run."""
    return lambda: gradient
