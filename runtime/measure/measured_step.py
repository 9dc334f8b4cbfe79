"""One step that all ranks recorded, told as the simulator tells it: spans, transfers, busy time.

A compute begins when what it waits for is there, as in the simulator, so waits at its start are not part of it. A
transfer lasts from its send until nobody waits for it any more; one that nobody waited for ends when it is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.measure.instrument import RunRecord
from runtime.program.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    Message,
    OptimizerStep,
    Recv,
    ReduceGradients,
    Send,
)
from runtime.simulate.simulation import Occupied, Simulation, Transfer

BACKWARDS = (Backward, BackwardInput, BackwardWeight)


@dataclass(frozen=True)
class StepRecord:
    """One rank's step, in seconds of its own clock."""

    start_seconds: float
    end_seconds: float
    optimizer: tuple[float, float] | None
    """(start, end) of the optimizer's step."""
    run: RunRecord


@dataclass(frozen=True)
class RankTimes:
    """The seconds of a rank's step by what it did; they add up to the step."""

    forward: float
    backward: float
    waiting: float
    """Seconds of waiting for tensors of other ranks, and for sends to be over."""
    communication: float
    """Seconds of putting tensors on their way, and of summing gradients, the wait for other ranks' included."""
    optimizer: float
    other: float
    """Seconds of cutting the batch, clipping, sharing the loss, and whatever else is between the instructions."""


def measured_step(records: Sequence[StepRecord], offsets: Sequence[float]) -> Simulation:
    """Return the step of all ranks on rank 0's clock, from the first instruction of any to the last one's end.

    ``offsets``: seconds to subtract from each rank's clock.
    """
    zeros = [
        min((start for start, _ in record.run.spans), default=record.start_seconds) - offset
        for record, offset in zip(records, offsets, strict=True)
    ]
    zero = min(zeros)
    timeline = tuple(
        tuple(_spans(record, zero + offset)) for record, offset in zip(records, offsets, strict=True)
    )
    transfers = _transfers(records, [zero + offset for offset in offsets])
    pair_bytes: defaultdict[tuple[int, int], float] = defaultdict(float)
    for transfer in transfers:
        pair_bytes[transfer.message.source, transfer.message.target] += transfer.size_bytes
    return Simulation(
        step_seconds=max(span.end_seconds for spans in timeline for span in spans),
        timeline=timeline,
        busy_seconds=tuple(_busy(spans, (Forward, *BACKWARDS)) for spans in timeline),
        memory=(),
        transfers=transfers,
        link_bytes={},
        pair_bytes=dict(pair_bytes),
    )


def measured_times(record: StepRecord) -> RankTimes:
    """Add up what the seconds of one rank's step went into."""
    spans = list(_spans(record, 0.0))
    forward, backward = _busy(spans, (Forward,)), _busy(spans, BACKWARDS)
    reducing = {p for p, i in enumerate(record.run.program.instructions) if isinstance(i, ReduceGradients)}
    reduction = sum(w.end_seconds - w.start_seconds for w in record.run.waits if w.position in reducing)
    waiting = sum(w.end_seconds - w.start_seconds for w in record.run.waits if w.position not in reducing)
    posting = sum(
        end - start
        for (start, end), i in zip(record.run.spans, record.run.program.instructions, strict=True)
        if isinstance(i, Send | Recv | ReduceGradients)
    )
    optimizer = 0.0 if record.optimizer is None else record.optimizer[1] - record.optimizer[0]
    known = forward + backward + waiting + reduction + posting + optimizer
    total = record.end_seconds - record.start_seconds
    return RankTimes(forward, backward, waiting, reduction + posting, optimizer, max(0.0, total - known))


def simulated_times(simulation: Simulation, rank: int) -> RankTimes:
    """Return the same of a simulated step; what is not computing or communicating is waiting."""
    spans = simulation.timeline[rank]
    forward, backward = _busy(spans, (Forward,)), _busy(spans, BACKWARDS)
    reduction, optimizer = _busy(spans, (ReduceGradients,)), _busy(spans, (OptimizerStep,))
    waiting = simulation.step_seconds - forward - backward - reduction - optimizer
    return RankTimes(forward, backward, max(0.0, waiting), reduction, optimizer, 0.0)


def _busy(spans: Sequence[Occupied], kinds: tuple[type, ...]) -> float:
    return sum(span.end_seconds - span.start_seconds for span in spans if isinstance(span.instruction, kinds))


def _spans(record: StepRecord, zero: float) -> list[Occupied]:
    """Return what occupied the rank, by start."""
    run, spans = record.run, []
    waits = sorted(run.waits, key=lambda wait: wait.start_seconds)
    at = 0
    for (start, end), instruction in zip(run.spans, run.program.instructions, strict=True):
        begin = start
        while at < len(waits) and waits[at].start_seconds < end:
            begin = max(begin, waits[at].end_seconds)
            at += 1
        if isinstance(instruction, Compute):
            spans.append(Occupied(begin - zero, end - zero, instruction))
    instructions = run.program.instructions
    spans += [
        Occupied(w.start_seconds - zero, w.end_seconds - zero, instructions[w.position])
        for w in waits
        if isinstance(instructions[w.position], ReduceGradients)
    ]
    if record.optimizer is not None:
        start, end = record.optimizer
        spans.append(Occupied(start - zero, end - zero, OptimizerStep()))
    return sorted(spans, key=lambda span: span.start_seconds)


def _transfers(records: Sequence[StepRecord], zeros: Sequence[float]) -> tuple[Transfer, ...]:
    """Return every message that was sent, by start."""
    arrived: dict[Message, float] = {}
    for record, zero in zip(records, zeros, strict=True):
        for wait in record.run.waits:
            message = _message(record.run.program.instructions[wait.position], Recv)
            if message is not None:
                arrived[message] = wait.end_seconds - zero
    found = []
    for record, zero in zip(records, zeros, strict=True):
        for sent in record.run.sent:
            message = _message(record.run.program.instructions[sent.position], Send)
            if message is not None:
                start = sent.seconds - zero
                found.append(
                    Transfer(start, max(start, arrived.get(message, start)), message, sent.size_bytes)
                )
    return tuple(sorted(found, key=lambda transfer: (transfer.start_seconds, transfer.message)))


def _message(instruction: Instruction, kind: type[Send] | type[Recv]) -> Message | None:
    return instruction.message if isinstance(instruction, kind) else None
