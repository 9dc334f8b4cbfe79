"""The outputs of a segment, sorted by where each goes."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

from runtime.segment.code import SegmentCode


class SortedOutputs(NamedTuple):
    """Positions among the outputs of a segment, and what becomes of each."""

    sent: list[tuple[int, int]]
    """(position, slot) of the values that leave this rank."""
    local: list[tuple[int, int, bool]]
    """(position, slot, whether it gets a gradient) of the values that are read on this rank."""
    loss: int
    """Position of the loss; -1 if there is none."""
    metrics: list[tuple[int, str]]
    results: list[tuple[int, str]]
    """Positions and names of what an evaluation returns."""


def sorted_outputs(
    code: SegmentCode,
    slot: Callable[[str], int],
    *,
    sent: Container[int],
    read: Container[int],
    training: bool,
) -> SortedOutputs:
    """Sort the outputs of ``code``. ``sent``, ``read``: slots of the values that are sent, and read on this rank."""
    found = SortedOutputs(
        [], [], next((at for at, o in enumerate(code.outputs) if o.kind == "loss"), -1), [], []
    )
    for at, output in enumerate(code.outputs):
        if output.kind == "metric":
            found.metrics.append((at, output.name))
        elif output.kind == "output" and not training:
            found.results.append((at, output.name))
        elif output.kind == "value":
            number = slot(output.name)
            if number in sent:
                found.sent.append((at, number))
            if number in read:
                found.local.append((at, number, output.needs_grad and training))
    return found
