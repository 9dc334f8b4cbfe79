"""Gradients summed while the last backward still runs.

    last backward      … linear_9 ─ linear_8 ─ … ─ linear_0        a bucket starts when its last gradient is there,
    sums                   └─ bucket 0      └─ bucket 1            in the program's order on every rank

Ranks run the same graph, so their gradients come in the same order. ``runtime.program.early`` says which sums may start so,
and why the one order of communications that was proved still holds.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from runtime.execute.reduce import GradientReduction
from runtime.program.early import early_sums
from runtime.program.program import Instruction, SegmentGraph


def overlap(
    instructions: Sequence[Instruction],
    handlers: list[Callable[[], None]],
    reductions: Sequence[GradientReduction],
    graph: SegmentGraph,
    held: Callable[[int], Container[str]],
) -> None:
    """Let the last backward among ``handlers`` start the sums that it may. ``reductions`` are in the program's order.

    held    tells which parameters a segment reads: sums of others start after it
    """
    last, early = early_sums(instructions, graph)
    if last < 0:
        return
    own = held(instructions[last].segment)  # type: ignore[union-attr]  # it is a backward
    count = next(
        (n for n, r in enumerate(reductions[: len(early)]) if any(p not in own for p in r.parameters)),
        len(early),
    )
    if count:
        parameters = [list(r.parameters.values()) for r in reductions[:count]]
        beside = Overlap(parameters, [handlers[position] for position in early[:count]])
        handlers[last] = partial(beside.around, handlers[last])


class Overlap:
    """Sums beside a backward: ``starts[i]()`` starts sum i, of ``parameters[i]``."""

    def __init__(self, parameters: Sequence[Sequence[Tensor]], starts: Sequence[Callable[[], None]]) -> None:
        self._parameters = [[p for p in group if p.requires_grad] for group in parameters]
        self._starts = starts
        self._missing: list[int] = []
        self._next = 0

    def around(self, backward: Callable[[], None]) -> None:
        """Run ``backward``, starting each sum as soon as its gradients and the sums before it allow."""
        self._missing, self._next = [len(group) for group in self._parameters], 0
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))  # type: ignore[no-untyped-call]
            for number, group in enumerate(self._parameters)
            for parameter in group
        ]
        try:
            backward()
        finally:
            for hook in hooks:
                hook.remove()

    def _arrived(self, number: int, _: Any) -> None:
        self._missing[number] -= 1
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._starts[self._next]()
            self._next += 1
