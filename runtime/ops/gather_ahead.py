"""Gathers of parameters started ahead: while one layer computes, the parameters of the next are under way (ZeRO-3).

    before   w1 = all_gather(p1)   y1 = linear(x, w1)   w2 = all_gather(p2)   y2 = linear(y1, w2)
    after    w1 = all_gather(p1)   s2 = start(p2)   y1 = linear(x, w1)   w2 = all_gather(p2, s2)   y2 = linear(y1, w2)

Gathers with no op between them are one step. Each step but the first starts behind the one before, so one is under way at a
time, and a rank holds the parameters of one step more than it reads: until backward, as without. Every rank runs the same
graph and starts the same gathers in the same order, inside of the segment's compute.

Not in blocks that backward computes again: there a forward may stop before it has waited for all that it started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

Regions = Sequence[Sequence[str]]
Split = Callable[[fx.Node], tuple[Callable[..., Any], Callable[..., Any]]]
"""Function from a gather to what starts it, of its input, and what waits for it, of its input and of what started it."""


def gather_steps(gathers: Sequence[fx.Node], regions: Regions = ()) -> list[list[fx.Node]]:
    """Group ``gathers`` of a graph, in its order, that are of parameters and follow each other with no op between."""
    inside = {name for names in regions for name in names}
    steps: list[list[fx.Node]] = []
    for node in gathers:
        source = node.args[0]
        if not isinstance(source, fx.Node) or source.op != "placeholder" or node.name in inside:
            continue
        if steps and node.prev is steps[-1][-1]:
            steps[-1].append(node)
        else:
            steps.append([node])
    return steps


def start_ahead(graph: fx.Graph, steps: Sequence[Sequence[fx.Node]], split: Split) -> None:
    """Start the gathers of each step behind the step before. In place; what waits has the gather's name."""
    behind = steps[0][-1] if steps else None
    for step in steps[1:]:
        assert behind is not None
        for node in step:
            start, wait = split(node)
            with graph.inserting_after(behind):
                under_way = behind = graph.call_function(start, (node.args[0],))
            with graph.inserting_before(node):
                gathered = graph.call_function(wait, (node.args[0], under_way))
            node.replace_all_uses_with(gathered)
            graph.erase_node(node)
            gathered.name = node.name
        behind = gathered
