"""Gathers of parameters started ahead: while one layer computes, the parameters of the next are under way (ZeRO-3).

    before   w1 = all_gather(p1)    y1 = linear(x, w1)    w2 = all_gather(p2)    y2 = linear(y1, w2)
    after    s1 = start(p1)    w1 = wait(p1, s1)    s2 = start(p2)    y1 = linear(x, w1)    w2 = wait(p2, s2)    …

Gathers with no op between them are one step. Each step but the first starts behind the one before, so one is under way at a
time, and a rank holds the parameters of one step more than it reads: until backward, as without. Every rank runs the same
graph and starts the same gathers in the same order, inside of the segment's compute.

Not in blocks that backward computes again: there a forward may stop before it has waited for all that it started. But where
a block is one op with its gathers (``passes.graph.blocks.GATHERS``), forward starts them outside of it, and backward, which
goes through the steps in reverse, starts a step's again when it has those of the step behind it:

    forward    s2 = start(p2)   y1 = block(p1, s1, x)   s3 = start(p3)   y2 = block(p2, s2, y1)
    backward   w2 again, start(p1) again, backward of y2 = linear(y1, w2), w1 again, backward of y1 = linear(x, w1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

Regions = Sequence[Sequence[str]]
StartGather = Callable[[Tensor], Callable[[], Tensor]]
"""Function that starts to gather a part, and returns one that waits for the whole."""
Split = Callable[[Sequence[fx.Node]], tuple[Callable[..., Any], Sequence[Callable[..., Any]]]]
"""Function from a step's gathers to what starts them all, of the step before and their inputs, and what waits for each,
of its input and of what started it."""


class GatherStep:
    """The gathers of a step on their way, in one micro-batch. ``before``: the step that is repeated after this one."""

    def __init__(
        self, before: GatherStep | None, starts: Sequence[StartGather], parts: Sequence[Tensor]
    ) -> None:
        self._before, self._starts = before, starts
        self._parts = [part.detach() for part in parts]
        self._under_way: list[Callable[[], Tensor] | None] = []
        self._trained = all(part.requires_grad for part in parts)
        self._again = False
        self._start()

    def _start(self) -> None:
        self._under_way = [start(part) for start, part in zip(self._starts, self._parts, strict=True)]

    def start_again(self) -> None:
        """Start all gathers for backward, unless they are under way, or backward may do without them."""
        if self._trained and not any(self._under_way):
            self._again = True
            self._start()

    def wait(self, number: int) -> Tensor:
        """Wait for one gather. The second time it is gathered anew, and the step before is started after a step's last."""
        if not any(self._under_way):
            self._again = True
            self._start()
        there, self._under_way[number] = self._under_way[number], None
        assert there is not None, "a gather of a step is waited for once before all are repeated"
        whole = there()
        if self._again and self._before is not None and not any(self._under_way):
            self._before.start_again()
        return whole


def gather_steps(gathers: Sequence[fx.Node], regions: Regions = ()) -> list[list[fx.Node]]:
    """Group ``gathers`` of a graph, in its order, that are of parameters and follow each other with no op between.

    Gathers of one of ``regions``, which hold nothing but gathers and one op, are a step of their own.
    """
    bridges = {node.name for node in gathers}
    region_of = {name: number for number, names in enumerate(regions) for name in names}
    alone = [bridges.issuperset(names[:-1]) and names[-1] not in bridges for names in regions]
    inside = {name for names, one_op in zip(regions, alone, strict=True) if not one_op for name in names}
    steps: list[list[fx.Node]] = []
    for node in gathers:
        source = node.args[0]
        if not isinstance(source, fx.Node) or source.op != "placeholder" or node.name in inside:
            continue
        last = steps[-1][-1] if steps else None
        if node.prev is last and region_of.get(node.name) == region_of.get(last.name):
            steps[-1].append(node)
        else:
            steps.append([node])
    return steps


def repeated_steps(steps: Sequence[Sequence[fx.Node]], regions: Regions) -> list[bool]:
    """Tell of each step whether its gathers are of a region, and so repeated in backward."""
    inside = {name for names in regions for name in names}
    return [step[0].name in inside for step in steps]


def start_ahead(
    graph: fx.Graph, steps: Sequence[Sequence[fx.Node]], split: Split, regions: Regions = ()
) -> None:
    """Start the gathers of each step behind the step before. In place; what waits has the gather's name."""
    behind: fx.Node | None = None
    before: fx.Node | None = None
    for step, repeated in zip(steps, repeated_steps(steps, regions), strict=True):
        if behind is None and not repeated:
            behind = step[-1]  # nothing runs beside it
            continue
        start, waits = split(step)
        with graph.inserting_before(step[0]) if behind is None else graph.inserting_after(behind):
            begun = graph.call_function(
                start, (before if repeated else None, *(node.args[0] for node in step))
            )
        before = begun if repeated else before
        for node, wait in zip(step, waits, strict=True):
            with graph.inserting_before(node):
                gathered = graph.call_function(wait, (node.args[0], begun))
            node.replace_all_uses_with(gathered)
            graph.erase_node(node)
            gathered.name = node.name
            behind = gathered
