"""Gradients summed while the last backward still runs.

    last backward      … linear_9 ─ linear_8 ─ … ─ linear_0        a bucket starts when its last gradient is there,
    sums                   └─ bucket 0      └─ bucket 1            in the program's order on every rank

Ranks run the same graph, so their gradients come in the same order. Only for programs without messages: starting a sum
ahead of a send could break the one order of communications that was proved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from runtime.execute.reduce import GradientReduction
from runtime.program.program import Backward, Instruction, Recv, ReduceGradients, Send


def overlapped(instructions: Sequence[Instruction]) -> tuple[int, list[int]]:
    """Return the positions of the last backward and of the sums that may start in it; (-1, []) if there are none."""
    sums = [p for p, i in enumerate(instructions) if isinstance(i, ReduceGradients)]
    if not sums or any(isinstance(i, Send | Recv) for i in instructions):
        return -1, []
    last = sums[0] - 1
    if last < 0 or not isinstance(instructions[last], Backward):
        return -1, []
    seen: set[str] = set()
    early: list[int] = []
    for position in sums:
        instruction = instructions[position]
        assert isinstance(instruction, ReduceGradients)
        if not seen.isdisjoint(instruction.parameters):
            break  # it continues an earlier sum, and would wait for it inside of backward
        seen.update(instruction.parameters)
        early.append(position)
    return last, early


def overlap(
    instructions: Sequence[Instruction],
    handlers: list[Callable[[], None]],
    reductions: Sequence[GradientReduction],
) -> None:
    """Let the last backward among ``handlers`` start the sums that it may. ``reductions`` are in the program's order."""
    last, early = overlapped(instructions)
    if early:
        parameters = [list(r.parameters.values()) for r in reductions[: len(early)]]
        beside = Overlap(parameters, [handlers[position] for position in early])
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
