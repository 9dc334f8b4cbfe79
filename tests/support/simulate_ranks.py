"""A step simulated rank by rank, each on its own program: the reference for ``runtime.simulate.simulate`` of groups."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from runtime.program.groups import on_leaders
from runtime.program.program import Program, ReduceGradients, SegmentGraph
from runtime.simulate.event_loop import EventLoop
from runtime.simulate.fair_share import Links
from runtime.simulate.flatten import FlatPrograms, Overheads, SumReady, count_microbatches
from runtime.simulate.memory import MemoryCurve, StepTimes, memory_curves
from runtime.simulate.simulation import (
    Simulation,
    Transfer,
    busy_seconds,
    refuse_stuck,
    refuse_wrong_lengths,
    spans_of,
    step_times,
)

_NO_OVERHEADS = Overheads()


def simulate_ranks(
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
    reduce_ready: SumReady | None = None,
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
            for ranks in collective.groups if collective.backward == (plane == 1) else ():
                for source, target in itertools.pairwise((*ranks, ranks[0])):
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
