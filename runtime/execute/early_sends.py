"""Send a value as soon as it is produced, from inside the segment.

A skip or a mask that a segment makes early need not wait for the segment's end. The segment's graph calls
``emit`` right after such a value exists; the sends that follow the forward in the program are then issued
in their order, each as soon as its value and all those before it are there. The order of communications
thus stays the program's.

    before   0F0 ………………………… >mask:0@1 >h:0@1
    after    0F0 … >mask:0@1 ………… >h:0@1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, fx

from runtime.program.program import Forward, Program, Send
from runtime.segment.code import SegmentCode

PostTensor = Callable[[Tensor], None]


class EarlySends:
    """The sends of one segment: its graph calls ``emit``, the executor ``start`` before each forward."""

    def __init__(self) -> None:
        self._queue: Sequence[tuple[int, PostTensor]] = ()
        self._next = 0
        self._ready: dict[int, Tensor] = {}

    def start(self, queue: Sequence[tuple[int, PostTensor]]) -> None:
        """Begin a forward. ``queue``: (output position, function that sends it) of the sends to issue, in order."""
        self._queue, self._next = queue, 0
        self._ready.clear()

    def emit(self, at: int, tensor: Tensor) -> None:
        """Take the value at output position ``at``; send it and those that waited for it when their turn has come."""
        if self._next == len(self._queue):
            return
        self._ready[at] = tensor.detach()
        while self._next < len(self._queue):
            wanted, post = self._queue[self._next]
            if wanted not in self._ready:
                return
            self._next += 1
            post(self._ready[wanted])
        self._ready.clear()


def early_outputs(code: SegmentCode, program: Program) -> tuple[int, ...]:
    """Return the positions of outputs worth sending early: sent values after which the segment still computes."""
    sent = {i.message.value for i in program.instructions if isinstance(i, Send) and not i.message.gradient}
    nodes = list(code.module.graph.nodes)
    ops = [n for n in nodes if n.op not in ("placeholder", "get_attr", "output")]
    outputs = nodes[-1].args[0]
    last = ops[-1] if ops else None
    return tuple(
        at
        for at, output in enumerate(code.outputs)
        if output.kind == "value"
        and output.name in sent
        and isinstance(outputs[at], fx.Node)
        and outputs[at] is not last
    )


def following_sends(program: Program, position: int, produced: dict[str, int]) -> list[tuple[int, int]]:
    """List (program position, output position) of the sends right after the forward at ``position``.

    ``produced``: output positions, by name, of the values that can be sent early.
    """
    forward = program.instructions[position]
    assert isinstance(forward, Forward)
    found = []
    for at in range(position + 1, len(program.instructions)):
        send = program.instructions[at]
        if (
            not isinstance(send, Send)
            or send.message.gradient
            or send.message.microbatch != forward.microbatch
            or send.message.value not in produced
        ):
            break
        found.append((at, produced[send.message.value]))
    return found
