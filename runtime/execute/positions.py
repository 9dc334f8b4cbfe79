"""The places in a rank's program where its values are sent, read and received, looked up once per batch shape.

Beside them, for one segment: where each of its outputs goes, and the shape that its readers were promised.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from cost_models.errors import InternalError
from runtime.execute.context import ProgramContext
from runtime.execute.pieces import MovedPieces
from runtime.program.program import Backward, BackwardInput, Forward, Recv, Send
from runtime.segment.code import SegmentCode


@dataclass
class Positions:
    """Positions in the program, by slot (``bind``) unless said otherwise."""

    waits_at: dict[int, list[int]] = field(default_factory=dict)
    """Communications that each compute waits for, by the compute's position."""
    gradients_of: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """Positions at which gradients arrive, by value and micro-batch: one position per group that sends one."""
    last_send: dict[int, int] = field(default_factory=dict)
    last_forward: dict[int, int] = field(default_factory=dict)
    """Position of the last forward that reads the value."""
    last_return: dict[int, int] = field(default_factory=dict)
    """Position of the last send of the value's gradient."""
    unsent_after: dict[int, int] = field(default_factory=dict)
    """Position of the last backward that makes a gradient which other ranks have too, and send."""


def positions(context: ProgramContext, pieces: MovedPieces, slot: Callable[[str, int], int]) -> Positions:
    """Look through the program of ``context``."""
    found = Positions()
    received: set[int] = set()
    last_backward: dict[int, int] = {}
    readers = {index: runner.value_names for index, runner in context.runners.items()}
    for position, instruction in enumerate(context.program.instructions):
        if isinstance(instruction, Recv):
            message = instruction.message
            use = context.first_uses.get(message)
            if use is not None:
                found.waits_at.setdefault(use, []).append(position)
            if not message.gradient:
                received.add(slot(message.value, message.microbatch))
            elif position == pieces.keeper(position, message):
                found.gradients_of.setdefault((message.value, message.microbatch), []).append(position)
        elif isinstance(instruction, Send):
            message = instruction.message
            last = found.last_return if message.gradient else found.last_send
            last[slot(message.value, message.microbatch)] = position
        elif isinstance(instruction, Forward | Backward | BackwardInput):
            last = found.last_forward if isinstance(instruction, Forward) else last_backward
            for name in readers[instruction.segment]:
                last[slot(name, instruction.microbatch)] = position
    for position, sends in context.released.items():  # over by then: this frees their buffers
        found.waits_at.setdefault(position, []).extend(sends)
    found.unsent_after = {
        number: position
        for number, position in last_backward.items()
        if number in received and number not in found.last_return
    }
    return found


class SortedOutputs(NamedTuple):
    """The outputs of a segment by position, and where each goes."""

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


def shape_check(
    code: SegmentCode, promised: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> Callable[[Any], None]:
    """Return a check that raises InternalError unless a segment's outputs are as their readers were told."""

    def check(outputs: Any) -> None:
        wrong = []
        for tensor, output in zip(outputs, code.outputs, strict=True):
            if output.kind != "value" or output.name not in promised:
                continue
            found = (tuple(tensor.shape), tensor.dtype)
            if found != promised[output.name]:
                wrong.append(f"{output.name}: promised {promised[output.name]}, found {found}")
        if wrong:
            raise InternalError(
                f"segment {code.index} makes other values than its consumers expect", because=wrong
            )

    return check
