"""The cost of a step: time, memory, traffic and a timeline, from the programs that will run.

The step begins with every rank at the start of its program and ends when the last instruction and the last
transfer are done. ``event_loop`` says what instructions mean in time, ``memory`` what is held when.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cost_models.errors import DeadlockError, InternalError
from runtime.collector import collector_paused
from runtime.program.groups import on_leaders
from runtime.program.program import Instruction, Message, Program, ReduceGradients, SegmentGraph
from runtime.program.timing import NODE_PLANE
from runtime.simulate.event_loop import NOT_YET, EventLoop
from runtime.simulate.fair_share import Links
from runtime.simulate.flatten import (
    COMPUTE,
    REDUCE,
    STEP,
    TOGETHER,
    FlatPrograms,
    Overheads,
    Ready,
    count_microbatches,
)
from runtime.simulate.memory import MemoryCurve, MessageTimes, StepTimes, memory_curves

__all__ = ["MemoryCurve", "Overheads", "Simulation", "Span", "Transfer", "simulate"]

_NO_OVERHEADS = Overheads()


class Span(NamedTuple):
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
    timeline: Sequence[tuple[Span, ...]]
    busy_seconds: tuple[float, ...]
    """Time in forwards and backwards, as slow as contention made them."""
    memory: tuple[MemoryCurve, ...]
    transfers: Sequence[Transfer]
    """Messages in the order of their starts."""
    link_bytes: Mapping[str, float]
    pair_bytes: Mapping[tuple[int, int], float]
    """Bytes in the step by (source, target), collectives by the volume of their algorithms included."""

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


@collector_paused()
def simulate(
    programs: Sequence[Program],
    graph: SegmentGraph,
    *,
    links: Links,
    contention: float = 1.0,
    state_bytes: Sequence[float] = (),
    microbatch_scale: Sequence[float] = (),
    optimizer_seconds: Sequence[float] = (),
    update_bytes: Sequence[float] = (),
    overheads: Overheads = _NO_OVERHEADS,
    reduce_seconds: Callable[[ReduceGradients], float] | None = None,
    reduce_bytes: Callable[[ReduceGradients], float] | None = None,
    reduce_ready: Ready | None = None,
    device_queues: bool = False,
) -> Simulation:
    """Run ``programs``, which must have passed ``check``, on paper.

    contention         factor by which a rank's computes slow down while a transfer of that rank is under way
    state_bytes        bytes of each rank's parameters, gradients, optimizer state, and its part of the batch
    microbatch_scale   size of each micro-batch relative to a full one (the last may be smaller); scales times and bytes
    optimizer_seconds  seconds of an optimizer step on each rank
    update_bytes       bytes that each rank holds on top meanwhile (default: none)
    reduce_seconds     time of a reduction once all its ranks have come
    reduce_bytes       bytes that each of its ranks sends to the next one meanwhile (default: not counted)
    reduce_ready       segment that makes a reduction's gradients, and the share of its backward after which they are there
                       (default: reductions start after the backward)
    device_queues      all point-to-point of a rank shares one queue (default: the queues that instructions name)
    """
    led = on_leaders(graph)
    world, microbatches = graph.world_size, count_microbatches(programs)
    scale = list(microbatch_scale) or [1.0] * microbatches
    refuse_wrong_lengths(
        programs, world, scale, microbatches, state_bytes or [0] * world, optimizer_seconds or [0] * world,
        update_bytes or [0] * world,
    )  # fmt: skip
    flat = FlatPrograms(programs, graph, links, scale, contention)
    steps = optimizer_seconds or [0.0] * world
    flat.flatten(overheads, steps, reduce_seconds or _nothing, device_queues, ready=reduce_ready)
    run = EventLoop(flat, led.leader_of).run()
    refuse_stuck(programs, run)
    memory = _memory(flat, led.leader_of, step_times(flat, run), state_bytes or [0.0] * world, update_bytes)
    return _report(programs, flat, run, memory, reduce_bytes or _nothing)


def _nothing(_: ReduceGradients) -> float:
    return 0.0


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


def _report(
    programs: Sequence[Program],
    flat: FlatPrograms,
    run: EventLoop,
    memory: tuple[MemoryCurve, ...],
    reduce_bytes: Callable[[ReduceGradients], float],
) -> Simulation:
    timeline = tuple(spans_of(program, flat, run) for program in programs)
    busy = tuple(map(busy_seconds, timeline))
    transfers: list[Transfer] = []
    link_bytes: defaultdict[str, float] = defaultdict(float)
    pair_bytes: defaultdict[tuple[int, int], float] = defaultdict(float)
    for message, number in flat.messages.items():
        size_bytes = flat.message_bytes[number]
        start, end = run.transfer_start[number], run.transfer_end[number]
        transfers.append(Transfer(start, end, message, size_bytes))
        pair_bytes[message.source, message.target] += size_bytes
    for source, target, size_bytes in (*_ring_bytes(flat), *_reduction_bytes(flat, reduce_bytes)):
        pair_bytes[source, target] += size_bytes
    for ends, size_bytes in pair_bytes.items():
        for link in flat.path(ends).links:
            link_bytes[link] += size_bytes
    transfers.sort(key=lambda transfer: (transfer.start_seconds, transfer.message))
    return Simulation(
        step_seconds=run.finish_seconds,
        timeline=timeline,
        busy_seconds=busy,
        memory=memory,
        transfers=tuple(transfers),
        link_bytes=dict(link_bytes),
        pair_bytes=dict(pair_bytes),
    )


def _ring_bytes(flat: FlatPrograms) -> Iterator[tuple[int, int, float]]:
    """Yield (source, target, bytes) of the collectives inside of segments: rings, in the order of their ranks."""
    plane_size = len(flat.graph.segments) * len(flat.scale)
    for node in flat.together:
        plane, rest = divmod(node, plane_size)
        segment, mb = divmod(rest, len(flat.scale))
        for collective in flat.graph.segments[segment].collectives:
            if collective.backward == (plane == 1):
                for source, target in itertools.pairwise((*collective.ranks, collective.ranks[0])):
                    yield source, target, collective.sent_bytes * flat.scale[mb]


def _reduction_bytes(
    flat: FlatPrograms, reduce_bytes: Callable[[ReduceGradients], float]
) -> Iterator[tuple[int, int, float]]:
    for reduction, _ in flat.reductions:
        sent_bytes = reduce_bytes(reduction)
        for source, target in (
            () if sent_bytes == 0.0 else itertools.pairwise((*reduction.ranks, reduction.ranks[0]))
        ):
            yield source, target, sent_bytes


def _memory(
    flat: FlatPrograms,
    leader_of: Sequence[int],
    times: StepTimes,
    state_bytes: Sequence[float],
    update_bytes: Sequence[float],
) -> tuple[MemoryCurve, ...]:
    """Return every rank's memory; ranks of one group hold alike, beside their state."""
    curves = memory_curves(flat.graph, times, state_bytes, flat.scale, update_bytes)
    return tuple(
        curves[rank]
        if leader == rank
        else replace(
            curves[leader], bytes_held=curves[leader].bytes_held - state_bytes[leader] + state_bytes[rank]
        )
        for rank, leader in enumerate(leader_of)
    )


def spans_of(program: Program, flat: FlatPrograms, run: EventLoop) -> tuple[Span, ...]:
    """Return what occupied the rank, in order."""
    spans = []
    for (code, target, _, _), instruction in zip(
        flat.operations[program.rank], program.instructions, strict=True
    ):
        if code == COMPUTE:
            spans.append(Span(run.start[target], run.end[target], instruction))
        elif code in (REDUCE, TOGETHER):
            since, until = run.reduction_start[target], run.reduction_end[target]
            if target in flat.early_sums:  # what of it is left after the backward
                since = max(since, spans[-1].end_seconds)
                until = max(since, until)
            spans.append(Span(since, until, instruction))
        elif code == STEP:
            spans.append(Span(run.step_start[program.rank], run.step_end[program.rank], instruction))
    return tuple(spans)


def busy_seconds(spans: Sequence[Span]) -> float:
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
