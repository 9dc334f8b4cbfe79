"""Gathers of parameters and sums of their gradients beside computing: ZeRO-3 with one layer's on their way.

    before   w1 = all_gather(p1)    y1 = linear(x, w1)    w2 = all_gather(p2)    y2 = linear(y1, w2)
    after    …    w1 = wait(q1, s1)    s2 = start(p2)    q2 = later(p2, s2)    y1 = linear(x, w1)    w2 = wait(q2, s2)    …

Gathers with no op between them are one step, and one collective where the backend can. Each step but the first starts
behind the one before, so one is under way at a time, and a rank holds the parameters of one step more than it reads: until
backward, as without. Every rank runs the same graph and starts the same gathers in the same order, inside of the segment's
compute.

Backward goes the other way: at ``wait`` the reduce-scatter of w2's gradient starts, the backward of y1 = linear(x, w1) runs
beside it, and at ``later`` the sum is waited for and handed on to p2. (Autograd runs what was made last first.)

In blocks that backward computes again a step is all gathers of a block. Forward starts them outside, in front of the block
before; backward, which goes through the blocks in reverse, starts a block's again when it begins with the one behind it:

    forward    s2 = start(p2)   y1 = block(q1, s1, x)   s3 = start(p3)   y2 = block(q2, s2, y1)
    backward   y2's block again (waits for w2; start(p1) again), its backward, y1's block again (waits for w1), …

A block may be products with their gathers (``passes.graph.blocks.GATHERS``): then these alone are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from runtime.ops.fused_linear import RecomputedBlocks

WaitForGather = Callable[[], Tensor]
"""Function that waits for a collective's result."""


@dataclass(frozen=True)
class StepWays:
    """The collectives of a step: what starts its gathers, of all parts, and its ways back, of some gradients of wholes."""

    gathers: Callable[[Sequence[Tensor]], list[WaitForGather]]
    sums: Callable[[Mapping[int, Tensor]], Mapping[int, WaitForGather]]
    """Both by the number of the gather in the step."""


class GatherStep:
    """The gathers of a step on their way, in one micro-batch. ``before``: the step that is repeated after this one."""

    def __init__(self, before: GatherStep | None, ways: StepWays, parts: Sequence[Tensor]) -> None:
        self._before, self._ways = before, ways
        self._parts = [part.detach() for part in parts]
        self._under_way: list[WaitForGather | None] = []
        self._trained = {number for number, part in enumerate(parts) if part.requires_grad}
        self._again = False
        self._gradients: dict[int, Tensor] = {}
        self._sums: dict[int, WaitForGather] = {}
        self._start()

    def _start(self) -> None:
        self._under_way = [*self._ways.gathers(self._parts)]
        self._begun = False

    def start_again(self) -> None:
        """Start all gathers for backward, if all parts are trained: else backward may do without them."""
        if len(self._trained) == len(self._parts) and not any(self._under_way):
            self._again = True
            self._start()

    def wait(self, number: int) -> Tensor:
        """Wait for one gather. The second time all are gathered anew, and behind the first those of the step before."""
        if not any(self._under_way):
            self._again = True
            self._start()
        there, self._under_way[number] = self._under_way[number], None
        assert there is not None, "a gather of a step is waited for once before all are repeated"
        whole = there()
        if self._again and not self._begun and self._before is not None:
            self._before.start_again()
        self._begun = True
        return whole

    def start_sum(self, number: int, gradient: Tensor) -> Tensor:
        """Take the gradient of a whole; start the step's sums once all are there. Return something of the part's shape."""
        self._gradients[number] = gradient.to_dense() if gradient.is_sparse else gradient
        if self._trained.issubset(self._gradients):
            self._start_sums()
        return self._parts[number]

    def finish_sum(self, number: int) -> Tensor:
        """Wait for the gradient of one part. Others of the step that are not there yet come by themselves."""
        for there in filter(None, self._under_way):  # what a second forward stopped in front of
            there()
        self._under_way = []
        if number not in self._sums:
            self._start_sums()
        return self._sums.pop(number)()

    def _start_sums(self) -> None:
        self._sums |= self._ways.sums(self._gradients)
        self._gradients = {}


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


@dataclass(frozen=True)
class GatherPlan:
    """Gathers that are under way together. ``block``: names of the ops of the block that they are of; empty outside."""

    gathers: tuple[fx.Node, ...]
    block: frozenset[str]

    @property
    def begin(self) -> fx.Node:
        """The node in front of which the next step's gathers start: the block's first, or the one behind the gathers."""
        if not self.block:
            return self.gathers[-1].next
        nodes: Iterable[fx.Node] = self.gathers[0].graph.nodes
        return next(node for node in nodes if node.name in self.block)


def gather_steps(gathers: Sequence[fx.Node], regions: RecomputedBlocks = ()) -> list[GatherPlan]:
    """Group ``gathers`` of a graph, in its order, that are of parameters: those of a block, or with no op between them."""
    block_of = {name: frozenset(names) for names in regions for name in names}
    steps: list[GatherPlan] = []
    step_of: dict[frozenset[str], int] = {}
    for node in gathers:
        source = node.args[0]
        if not isinstance(source, fx.Node) or source.op != "placeholder":
            continue
        block = block_of.get(node.name, frozenset())
        if not block and steps and not steps[-1].block and node.prev is steps[-1].gathers[-1]:
            step_of[block] = len(steps) - 1
        elif not block or block not in step_of:
            step_of[block] = len(steps)
            steps.append(GatherPlan((), block))
        at = step_of[block]
        steps[at] = GatherPlan((*steps[at].gathers, node), block)
    return steps


def start_ahead(
    graph: fx.Graph, steps: Sequence[GatherPlan], ways: Callable[[Sequence[fx.Node]], StepWays]
) -> None:
    """Start the gathers of each step in front of the step before. In place; what waits has the gather's name.

    ``ways``: the collectives of some gathers.
    """
    last: GatherPlan | None = None
    last_begun: fx.Node | None = None
    before: fx.Node | None = None
    for step in steps:
        start = _starting(ways(step.gathers))
        parts = [node.args[0] for node in step.gathers]
        with graph.inserting_before(step.gathers[0] if last is None else _behind(last.begin, last_begun)):
            begun = graph.call_function(start, (before if step.block else None, *parts))
            later_parts = [graph.call_function(later, (part, begun, n)) for n, part in enumerate(parts)]
        last_begun, before = later_parts[-1], begun if step.block else before
        waiting = []
        for number, (node, part) in enumerate(zip(step.gathers, later_parts, strict=True)):
            with graph.inserting_before(node):
                gathered = graph.call_function(wait_for_gather, (part, begun, number))
            node.replace_all_uses_with(gathered)
            graph.erase_node(node)
            gathered.name = node.name
            waiting.append(gathered)
        last = GatherPlan(tuple(waiting), step.block)


def _behind(place: fx.Node, other: fx.Node | None) -> fx.Node:
    """Return ``place``, or the node behind ``other`` if that is later in the graph."""
    nodes: Iterable[fx.Node] = place.graph.nodes
    first = next(node for node in nodes if node is place or node is other)
    return place if other is None or first is other else other.next


def _starting(ways: StepWays) -> Callable[..., GatherStep]:
    def start_gathers(before: GatherStep | None, *parts: Tensor) -> GatherStep:
        return GatherStep(before, ways, parts)

    return start_gathers
