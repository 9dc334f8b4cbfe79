"""A simulated step: time, memory, traffic and a timeline, and how they are read off a run of the event loop.

The step begins with every rank at the start of its program and ends when the last instruction and the last
transfer are done. ``event_loop`` says what instructions mean in time, ``memory`` what is held when.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cost_models.errors import DeadlockError, InternalError
from runtime.program.communicators import ProcessBytes
from runtime.program.program import Instruction, Message, Program, ReduceGradients
from runtime.program.timing import NODE_PLANE
from runtime.simulate.event_loop import NOT_YET, EventLoop
from runtime.simulate.flatten import COMPUTE, REDUCE, STEP, TOGETHER, FlatPrograms
from runtime.simulate.memory import MemoryCurve, MessageTimes, StepTimes


class Occupied(NamedTuple):
    """An instruction that occupied its rank."""

    start_seconds: float
    end_seconds: float
    instruction: Instruction

    @property
    def text(self) -> str:
        return str(self.instruction)


class Transfer(NamedTuple):
    """A message on its way: from the moment both sides were ready until its last byte arrived."""

    start_seconds: float
    end_seconds: float
    message: Message
    size_bytes: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step. Sequences are per rank."""

    step_seconds: float
    timeline: Sequence[tuple[Occupied, ...]]
    busy_seconds: tuple[float, ...]
    """Time in forwards and backwards, as slow as contention made them."""
    memory: tuple[MemoryCurve, ...]
    """The memory that each holds of its device."""
    transfers: Sequence[Transfer]
    """Messages in the order of their starts."""
    link_bytes: Mapping[str, float]
    pair_bytes: Mapping[tuple[int, int], float]
    """Bytes in the step by (source, target), collectives by the volume of their algorithms included."""
    process: tuple[ProcessBytes, ...] = ()
    """The part of ``memory`` that is beside tensors; empty where that is not known."""

    @property
    def bubble_fraction(self) -> float:
        """Share of the step in which the ranks that compute are not computing: 1 − Σ busy / (ranks · step)."""
        working = [busy for busy, spans in zip(self.busy_seconds, self.timeline, strict=True) if spans]
        if not working or self.step_seconds == 0.0:
            return 0.0
        return 1.0 - sum(working) / (len(working) * self.step_seconds)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        return tuple(curve.peak_bytes for curve in self.memory)

    def with_allocator(self, more_bytes: Sequence[int]) -> Simulation:
        """Return the same with what torch's allocator reserves on each rank beyond its tensors."""
        process = self.process or (ProcessBytes(),) * len(more_bytes)
        return replace(
            self,
            memory=tuple(
                replace(curve, bytes_held=curve.bytes_held + more)
                for curve, more in zip(self.memory, more_bytes, strict=True)
            ),
            process=tuple(
                own._replace(allocator=more) for own, more in zip(process, more_bytes, strict=True)
            ),
        )

    @property
    def message_count(self) -> int:
        return len(self.transfers)

    @property
    def message_bytes(self) -> Mapping[tuple[int, int], float]:
        """``pair_bytes`` of point-to-point messages alone: what a measurement sees."""
        found: defaultdict[tuple[int, int], float] = defaultdict(float)
        for transfer in self.transfers:
            found[transfer.message.source, transfer.message.target] += transfer.size_bytes
        return dict(found)


def refuse_wrong_lengths(
    programs: Sequence[Program],
    world: int,
    scale: Sequence[float],
    microbatches: int,
    state_bytes: Sequence[float],
    optimizer_seconds: Sequence[float],
    update_bytes: Sequence[float],
) -> None:
    """Raise ``InternalError`` where a sequence does not have one entry per rank, or per micro-batch."""
    problems = [
        f"{name} has {len(given)} entries, not {count}"
        for name, given, count in (
            ("programs", programs, world),
            ("state_bytes", state_bytes, world),
            ("optimizer_seconds", optimizer_seconds, world),
            ("update_bytes", update_bytes, world),
            ("microbatch_scale", scale, microbatches),
        )
        if len(given) != count
    ]
    if problems:
        raise InternalError("simulate a step", problems)


def refuse_stuck(programs: Sequence[Program], run: EventLoop) -> None:
    """Raise ``DeadlockError`` if the run never ended; programs that the checker accepts do not come to that."""
    stuck = run.unfinished()
    if stuck or NOT_YET in run.transfer_end:
        waiting = [f"rank {rank} waits before {programs[rank].instructions[index]}" for rank, index in stuck]
        unmoved = run.transfer_end.count(NOT_YET)
        raise DeadlockError("simulate a step: it stops", [*waiting, f"{unmoved} messages never arrive"])


def spans_of(program: Program, flat: FlatPrograms, run: EventLoop) -> tuple[Occupied, ...]:
    """Return what occupied the rank, in order."""
    spans = []
    for (code, target, _, _), instruction in zip(
        flat.operations[program.rank], program.instructions, strict=True
    ):
        if code == COMPUTE:
            spans.append(Occupied(run.start[target], run.end[target], instruction))
        elif code in (REDUCE, TOGETHER):
            since, until = run.reduction_start[target], run.reduction_end[target]
            if target in flat.early_sums:  # what of it is left after the backward
                since = max(since, spans[-1].end_seconds)
                until = max(since, until)
            spans.append(Occupied(since, until, instruction))
        elif code == STEP:
            spans.append(Occupied(run.step_start[program.rank], run.step_end[program.rank], instruction))
    return tuple(spans)


def busy_seconds(spans: Sequence[Occupied]) -> float:
    """Return the seconds of the computes."""
    return sum(
        span.end_seconds - span.start_seconds for span in spans if type(span.instruction) in NODE_PLANE
    )


def step_times(flat: FlatPrograms, run: EventLoop) -> StepTimes:
    """Return the run's flat lists as arrays over micro-batches."""
    count = len(flat.scale)
    by_node = (3, len(flat.graph.segments), count)
    messages: dict[tuple[str, bool, int, int], list[int]] = {}
    for message, number in flat.messages.items():
        key = (message.value, message.gradient, message.source, message.target)
        numbers = messages.get(key)
        if numbers is None:
            numbers = messages[key] = [0] * count
        numbers[message.microbatch] = number
    sent, posted = np.array(run.transfer_end), np.array(run.posted_receive)
    sent_place = 2.0 * np.array(flat.send_places) + 1.0
    posted_place = 2.0 * np.array(flat.receive_places)
    return StepTimes(
        start=np.array(run.start).reshape(by_node),
        end=np.array(run.end).reshape(by_node),
        place=2.0 * np.array(flat.node_places, dtype=np.float64).reshape(by_node),
        messages={
            key: MessageTimes((sent[n], sent_place[n]), (posted[n], posted_place[n]))
            for key, n in messages.items()
        },
        updates=tuple(zip(run.step_start, run.step_end, strict=True)),
    )


def equal_ranks(simulation: Simulation) -> list[tuple[int, ...]]:
    """Group the ranks that do anything: equal spans, and equal memory over time. By the first rank of each group.

    Sums of gradients count as equal where they sum the same parameters at the same time, each on ranks of its own.
    """
    found: dict[Hashable, list[int]] = {}
    for rank, spans in enumerate(simulation.timeline):
        if spans:
            memory = tuple(
                (curve.seconds.tobytes(), curve.bytes_held.tobytes())
                for curve in simulation.memory[rank : rank + 1]
            )
            found.setdefault((tuple(_alike(spans)), memory), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _alike(spans: tuple[Occupied, ...]) -> Iterator[Hashable]:
    for start, end, instruction in spans:
        if isinstance(instruction, ReduceGradients):
            yield start, end, instruction.parameters, instruction.scattered
        else:
            yield start, end, instruction
