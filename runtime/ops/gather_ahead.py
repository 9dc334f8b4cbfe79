"""Gathers of parameters and sums of their gradients beside computing: ZeRO-3 with one layer's on their way.

    before   w1 = all_gather(p1)    y1 = linear(x, w1)    w2 = all_gather(p2)    y2 = linear(y1, w2)
    after    w1 = all_gather(p1)    s2 = start(p2)    q2 = later(p2, s2)    y1 = linear(x, w1)    w2 = wait(q2, s2)    …

Gathers with no op between them are one step. Each step but the first starts behind the one before, so one is under way at a
time, and a rank holds the parameters of one step more than it reads: until backward, as without. Every rank runs the same
graph and starts the same gathers in the same order, inside of the segment's compute.

Backward goes the other way: at ``wait`` the reduce-scatter of w2's gradient starts, the backward of y1 = linear(x, w1) runs
beside it, and at ``later`` the sum is waited for and handed on to p2. (Autograd runs what was made last first.)

Not in blocks that backward computes again: there a forward may stop before it has waited for all that it started. But where
a block is one op with its gathers (``passes.graph.blocks.GATHERS``), forward starts them outside of it, and backward, which
goes through the steps in reverse, starts a step's again when it has those of the step behind it:

    forward    s2 = start(p2)   y1 = block(q1, s1, x)   s3 = start(p3)   y2 = block(q2, s2, y1)
    backward   w2 again, start(p1) again, backward of y2 = linear(y1, w2), w1 again, backward of y1 = linear(x, w1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

Regions = Sequence[Sequence[str]]
Start = Callable[[Tensor], Callable[[], Tensor]]
"""Function that starts a collective, and returns another that waits for its result."""
Ways = Callable[[fx.Node], tuple[Start, Start]]
"""Function from a gather to what starts it, of a part, and what starts its way back, of the gradient of the whole."""


class GatherStep:
    """The gathers of a step on their way, in one micro-batch. ``before``: the step that is repeated after this one."""

    def __init__(
        self, before: GatherStep | None, ways: Sequence[tuple[Start, Start]], parts: Sequence[Tensor]
    ) -> None:
        self._before, self._ways = before, ways
        self._parts = [part.detach() for part in parts]
        self._under_way: list[Callable[[], Tensor] | None] = []
        self._trained = all(part.requires_grad for part in parts)
        self._again = False
        self._sums: list[Callable[[], Tensor] | None] = [None] * len(ways)
        self._start()

    def _start(self) -> None:
        self._under_way = [there(part) for (there, _), part in zip(self._ways, self._parts, strict=True)]

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

    def start_sum(self, number: int, gradient: Tensor) -> Tensor:
        """Start the way back of one gather; return something of the part's shape in its place."""
        self._sums[number] = self._ways[number][1](gradient.to_dense() if gradient.is_sparse else gradient)
        return self._parts[number]

    def finish_sum(self, number: int) -> Tensor:
        """Wait for the gradient of one part."""
        finish, self._sums[number] = self._sums[number], None
        assert finish is not None, "backward goes through a gather before it goes on to its part"
        return finish()


class _Later(torch.autograd.Function):
    """A part of a parameter, in front of its gather: its gradient is what ``GatherStep.finish_sum`` waits for."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, step: GatherStep, number: int) -> Tensor:
        ctx.step, ctx.number = step, number
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.step.finish_sum(ctx.number), None, None


class _Gathered(torch.autograd.Function):
    """The whole parameter. Backward starts the sum of its gradient, which ``_Later`` waits for."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, step: GatherStep, number: int) -> Tensor:
        ctx.step, ctx.number = step, number
        return step.wait(number)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.step.start_sum(ctx.number, gradients[0]), None, None


def later(part: Tensor, step: GatherStep, number: int) -> Tensor:
    """Stand for ``part`` until it is gathered."""
    result: Tensor = _Later.apply(part, step, number)  # type: ignore[no-untyped-call]
    return result


def wait_for_gather(part: Tensor, step: GatherStep, number: int) -> Tensor:
    """Return the whole of ``part``, which came out of ``later``."""
    result: Tensor = _Gathered.apply(part, step, number)  # type: ignore[no-untyped-call]
    return result


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
    graph: fx.Graph, steps: Sequence[Sequence[fx.Node]], ways: Ways, regions: Regions = ()
) -> None:
    """Start the gathers of each step behind the step before. In place; what waits has the gather's name."""
    behind: fx.Node | None = None
    before: fx.Node | None = None
    for step, repeated in zip(steps, repeated_steps(steps, regions), strict=True):
        if behind is None and not repeated:
            behind = step[-1]  # nothing runs beside it
            continue
        start = _starting([ways(node) for node in step])
        parts = [node.args[0] for node in step]
        with graph.inserting_before(step[0] if behind is None else behind.next):
            begun = graph.call_function(start, (before if repeated else None, *parts))
            later_parts = [graph.call_function(later, (part, begun, n)) for n, part in enumerate(parts)]
        before = begun if repeated else before
        for number, (node, part) in enumerate(zip(step, later_parts, strict=True)):
            with graph.inserting_before(node):
                gathered = graph.call_function(wait_for_gather, (part, begun, number))
            node.replace_all_uses_with(gathered)
            graph.erase_node(node)
            gathered.name = node.name
            behind = gathered


def _starting(ways: Sequence[tuple[Start, Start]]) -> Callable[..., GatherStep]:
    def start_gathers(before: GatherStep | None, *parts: Tensor) -> GatherStep:
        return GatherStep(before, ways, parts)

    return start_gathers
