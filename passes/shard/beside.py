"""Collectives that run beside computing, as the executor starts them: sums of input gradients beside weight gradients,

    h = sum_gradient(x); q = linear(h, wq); k = linear(h, wk)        backward   dh ─┬─ sum of dh ─┬►
                                                                               └─ dwq, dwk ──┘

and gathers of parameters and sums of their gradients beside the ops around them (``runtime.ops.gather_ahead``). Seconds
of either and of what runs beside it are ``cost_models.communication.hidden_seconds`` less than both in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from passes.graph.graph import OpGraph
from runtime.ops.bridges import all_gather, is_bridge, sums_gradient
from runtime.ops.fused_linear import blocks_by_name, fuse, layers_run_with, linears_behind
from runtime.ops.gather_ahead import GatherPlan, gather_steps


def layers_beside(graph: OpGraph, regions: Sequence[Sequence[str]]) -> Mapping[str, tuple[str, ...]]:
    """Name the layers of a sharded graph whose weight gradients are computed while a bridge's sum is under way, by bridge.

    ``regions``: nodes that backward computes again, by block.
    """
    found, block_of = {}, blocks_by_name(regions)
    for node in graph.ops:
        if is_bridge(node) and sums_gradient(node) and node.name in graph.needs_grad:
            layers = layers_run_with(node, block_of)
            if layers:
                found[node.name] = tuple(layer.name for layer in layers)
    return found


@dataclass(frozen=True)
class BesideGathers:
    """Collectives of parameters that are under way together, and the ops that run until they are waited for."""

    gathers: tuple[str, ...]
    """Gathers that run, by name; in backward those that it repeats."""
    sums: tuple[str, ...]
    """Gathers whose backward, a sum of gradients, runs here too."""
    ops: tuple[str, ...]
    backward: bool
    held: tuple[str, ...] = ()
    """Gathers whose gradients are held meanwhile, until all of a step are there."""


@dataclass(frozen=True)
class Ahead:
    """The steps in which a graph's parameters are gathered, by the names of the gathers, and what runs beside them."""

    steps: tuple[tuple[str, ...], ...] = ()
    beside: tuple[BesideGathers, ...] = ()


def gathers_ahead(graph: OpGraph, regions: Sequence[Sequence[str]]) -> Ahead:
    """Find the gathers of parameters that start ahead and their ways back, step by step, and what runs beside them.

    Beside the ops from one step to the next run, forward, the gathers of the next; in backward the sums of the next, and
    the repeated gathers of the last step before that is repeated, if this one is.
    """
    if not gather_steps(_gathers(graph.ops), regions):
        return Ahead()
    ordered = fx.Graph()
    ordered.output(ordered.graph_copy(next(iter(graph.nodes.values())).graph, val_map={}))
    summing = [node for node in ordered.nodes if is_bridge(node) and sums_gradient(node)]
    fuse(
        ordered, dict.fromkeys(summing, linears_behind("", None, _nothing)), regions
    )  # as the executor orders them
    steps = gather_steps(_gathers(ordered.nodes), regions)
    (end,) = ordered.find_nodes(op="output")
    found = []
    before: GatherPlan | None = None
    for number, step in enumerate(steps):
        following = steps[number + 1] if number + 1 < len(steps) else None
        ops = _between(step.begin, end if following is None else following.gathers[0], graph)
        own, later = _names(step.gathers), () if following is None else _names(following.gathers)
        again = _names(before.gathers) if before is not None and step.block else ()
        trained = (
            all(str(gather.args[0]) in graph.needs_grad for gather in before.gathers) if before else False
        )
        found.append(BesideGathers(later, (), ops, backward=False))
        held = own if len(own) > 1 else ()
        found.append(BesideGathers(again if trained else (), later, ops, backward=True, held=held))
        before = step if step.block else before
    return Ahead(tuple(_names(step.gathers) for step in steps), tuple(found))


def _between(begin: fx.Node, end: fx.Node, graph: OpGraph) -> tuple[str, ...]:
    """Name the ops of ``graph`` from one node up to another."""
    found, node = [], begin
    while node is not end:
        found.append(node.name)
        node = node.next
    return tuple(name for name in found if name in graph.nodes)


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _gathers(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if is_bridge(node) and node.target is all_gather]


def _nothing(gradient: Tensor) -> Callable[[], Tensor]:
    """Stand for the start of a sum, in a graph that is not run."""
    return lambda: gradient
