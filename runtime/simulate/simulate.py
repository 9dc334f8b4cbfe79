"""A step simulated by device groups: their leaders' programs run, and stand for those of all their members.

    computes, steps      the leader's; members run them together
    messages             bundles: one transfer for all pieces from group to group (``bundles``)
    sums of gradients    the leader's; those of other members of its group run beside it, and last as long as the slowest
    memory               the leader's, beside each member's own state; it has the pieces that the leader has

So a step of 16,384 ranks in 16 groups costs as much as one of 16. Where pieces and links of all members are alike, times
are those of the ranks' own programs, run one by one. Elsewhere a bundle ends with its slowest piece, and the next one
between the same groups begins no earlier.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, overload

from runtime.collector import collector_paused
from runtime.program.communicators import ProcessBytes
from runtime.program.crossings import BundleKey
from runtime.program.groups import on_leaders
from runtime.program.members import GroupPrograms
from runtime.program.program import (
    Backward,
    Forward,
    Instruction,
    Message,
    OptimizerStep,
    Program,
    Recv,
    ReduceGradients,
    SegmentGraph,
    Send,
)
from runtime.simulate.event_loop import EventLoop
from runtime.simulate.fair_share import Links
from runtime.simulate.flatten import FlatPrograms, Overheads, SumReady, count_microbatches
from runtime.simulate.flows import Bundle, bundles_of
from runtime.simulate.memory import MemoryCurve, MessageTimes, memory_curves
from runtime.simulate.simulation import (
    Occupied,
    Simulation,
    Transfer,
    busy_seconds,
    refuse_stuck,
    refuse_wrong_lengths,
    spans_of,
    step_times,
)

_NO_OVERHEADS = Overheads()


@collector_paused()
def simulate(
    groups: GroupPrograms,
    *,
    links: Links,
    contention: float = 1.0,
    state_bytes: Sequence[float] = (),
    microbatch_scale: Sequence[float] = (),
    optimizer_seconds: Sequence[float] = (),
    update_bytes: Sequence[float] = (),
    process: Sequence[ProcessBytes] = (),
    overheads: Overheads = _NO_OVERHEADS,
    reduce_seconds: Callable[[ReduceGradients], float] | None = None,
    reduce_bytes: Callable[[ReduceGradients], float] | None = None,
    reduce_ready: SumReady | None = None,
) -> Simulation:
    """Run the programs of ``groups``, which must have passed a check, on paper.

    contention         factor by which a rank's computes slow down while a transfer of that rank is under way
    state_bytes        bytes of each rank's parameters, gradients, optimizer state, and its part of the batch
    microbatch_scale   size of each micro-batch relative to a full one (the last may be smaller); scales times and bytes
    optimizer_seconds  seconds of an optimizer step on each rank; a group's are those of its slowest member
    update_bytes       bytes that each rank holds on top meanwhile (default: none); a group's are the most of any member
    process            what each rank's process holds beside tensors (default: nothing)
    reduce_seconds     time of a reduction once all its ranks have come
    reduce_bytes       bytes that each of its ranks sends to the next one meanwhile (default: not counted)
    reduce_ready       segment that makes a reduction's gradients, and the share of its backward after which they are there
                       (default: reductions start after the backward)
    """
    graph, leader_of = groups.graph, groups.leader_of
    world = graph.world_size
    led = [_of_leader(program) for program in groups.programs]
    programs = [program for program, _ in led]
    beside = {own: others for _, sums in led for own, others in sums.items()}
    microbatches = count_microbatches(programs)
    scale = list(microbatch_scale) or [1.0] * microbatches
    state, steps = list(state_bytes) or [0.0] * world, list(optimizer_seconds) or [0.0] * world
    most = list(update_bytes) or [0.0] * world
    refuse_wrong_lengths(programs, world, scale, microbatches, state, steps, most)
    slowest = list(steps)
    for rank, leader in enumerate(leader_of):
        slowest[leader] = max(slowest[leader], steps[rank])
        most[leader] = max(most[leader], most[rank])
    quotient = on_leaders(graph).graph
    bundles = bundles_of(graph, links)
    flat = FlatPrograms(programs, quotient, links, scale, contention, bundles, frozenset(leader_of))
    flat.flatten(overheads, slowest, reduce_seconds or _nothing, False, beside, reduce_ready, graph)
    run = EventLoop(flat, range(world)).run()
    refuse_stuck(programs, run)
    led_spans = [spans_of(program, flat, run) for program in programs]
    busy = [busy_seconds(spans) for spans in led_spans]
    pair_bytes: defaultdict[tuple[int, int], float] = defaultdict(float)
    moved = []
    sent: defaultdict[BundleKey, float] = defaultdict(float)
    """Full micro-batches that send each bundle."""
    for message, number in flat.messages.items():
        key = message.value, message.gradient, message.source, message.target
        bundle = bundles[key]
        since, until = run.transfer_start[number], run.transfer_end[number]
        moved.append(_Moved(since, until, message, bundle, scale[message.microbatch]))
        sent[key] += scale[message.microbatch]
    for key, times in sent.items():
        for source, target, size_bytes in bundles[key].pieces:
            pair_bytes[source, target] += size_bytes * times
    rings: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for ranks, given_bytes in itertools.chain(
        _collectives(programs, graph, scale), _sums(groups, reduce_bytes or _nothing)
    ):
        rings[ranks] += given_bytes
    for ranks, given_bytes in rings.items():
        for pair in itertools.pairwise((*ranks, ranks[0])):
            pair_bytes[pair] += given_bytes
    link_bytes: defaultdict[str, float] = defaultdict(float)
    for ends, moved_bytes in pair_bytes.items():
        for link in links.path(*ends).links:
            link_bytes[link] += moved_bytes
    instants = step_times(flat, run)
    instants = replace(instants, messages=_of_leaders_pieces(instants.messages, bundles))
    processes = list(process) or [ProcessBytes()] * world
    curves = memory_curves(graph, instants, state, scale, most, [float(sum(own)) for own in processes])
    always = [held + sum(own) for held, own in zip(state, processes, strict=True)]
    return Simulation(
        step_seconds=run.finish_seconds,
        timeline=_Timelines(groups, tuple(led_spans)),
        busy_seconds=tuple(busy[leader] for leader in leader_of),
        memory=tuple(_beside_state(curves[a], always[rank] - always[a]) for rank, a in enumerate(leader_of)),
        transfers=_Transfers(tuple(moved)),
        link_bytes=dict(link_bytes),
        pair_bytes=dict(pair_bytes),
        process=tuple(processes),
    )


def _nothing(_: ReduceGradients) -> float:
    return 0.0


def _of_leader(program: Program) -> tuple[Program, dict[ReduceGradients, list[ReduceGradients]]]:
    """Return a group's program with the sums of its leader alone, and to each of them those that run beside it."""
    own: list[Instruction] = []
    beside: dict[ReduceGradients, list[ReduceGradients]] = {}
    last: ReduceGradients | None = None
    for instruction in program.instructions:
        if not isinstance(instruction, ReduceGradients):
            last = None
            own.append(instruction)
        elif program.rank in instruction.ranks:
            last = instruction
            own.append(instruction)
        elif last is not None:
            beside.setdefault(last, []).append(instruction)
    return Program(program.rank, tuple(own)), beside


def _collectives(
    programs: Sequence[Program], graph: SegmentGraph, scale: Sequence[float]
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield (ranks, bytes that each sends in the step) of every group of ranks with collectives inside segments."""
    runs: defaultdict[tuple[int, bool], float] = defaultdict(float)
    for program in programs:
        for instruction in program.instructions:
            if isinstance(instruction, Forward | Backward):
                runs[instruction.segment, isinstance(instruction, Backward)] += scale[instruction.microbatch]
    given_bytes: defaultdict[tuple[tuple[int, ...], ...], float] = defaultdict(float)
    for segment in graph.segments:
        for collective in segment.collectives:
            times = runs[segment.index, collective.backward]
            if times:
                given_bytes[collective.groups] += collective.sent_bytes * times
    for groups, sent_bytes in given_bytes.items():
        for ranks in groups:
            yield ranks, sent_bytes


def _sums(
    groups: GroupPrograms, reduce_bytes: Callable[[ReduceGradients], float]
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield (ranks, bytes that each sends) of all sums of gradients, those of several groups once."""
    for program in groups.programs:
        for instruction in program.instructions:
            if isinstance(instruction, ReduceGradients):
                first = groups.leader_of[instruction.ranks[0]]
                if first == program.rank and (sent_bytes := reduce_bytes(instruction)):
                    yield instruction.ranks, sent_bytes


def _of_leaders_pieces(
    times: Mapping[BundleKey, MessageTimes], bundles: Mapping[BundleKey, Bundle]
) -> dict[BundleKey, MessageTimes]:
    """Return the times of the pieces that leaders send and receive: those of their bundles."""
    found: dict[BundleKey, MessageTimes] = {}
    for key, own in times.items():
        value, gradient, sender, receiver = key
        for piece in bundles[key].pieces:
            if piece.source == sender or piece.target == receiver:
                found[value, gradient, piece.source, piece.target] = own
    return found


def _beside_state(curve: MemoryCurve, more_bytes: float) -> MemoryCurve:
    return replace(curve, bytes_held=curve.bytes_held + more_bytes) if more_bytes else curve


class _Moved(NamedTuple):
    """A bundle of one micro-batch on its way."""

    start_seconds: float
    end_seconds: float
    message: Message
    bundle: Bundle
    scale: float

    def pieces(self) -> Iterator[Transfer]:
        """Yield its pieces."""
        for source, target, size_bytes in self.bundle.pieces:
            message = self.message._replace(source=source, target=target)
            yield Transfer(self.start_seconds, self.end_seconds, message, size_bytes * self.scale)


class _Transfers(Sequence[Transfer]):
    """The pieces of all bundles, made when somebody looks at them."""

    def __init__(self, moved: Sequence[_Moved]) -> None:
        self._moved = moved

    def __len__(self) -> int:
        return sum(len(moved.bundle.pieces) for moved in self._moved)

    @overload
    def __getitem__(self, index: int) -> Transfer: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Transfer, ...]: ...

    def __getitem__(self, index: int | slice) -> Transfer | tuple[Transfer, ...]:
        return self._all[index]

    @cached_property
    def _all(self) -> tuple[Transfer, ...]:
        pieces = (piece for moved in self._moved for piece in moved.pieces())
        return tuple(sorted(pieces, key=lambda transfer: (transfer.start_seconds, transfer.message)))


class _Timelines(Sequence[tuple[Occupied, ...]]):
    """The leaders' spans, which are their members' but for the sums of gradients."""

    def __init__(self, groups: GroupPrograms, led: Sequence[tuple[Occupied, ...]]) -> None:
        self._groups, self._led = groups, led
        self._known: dict[int, tuple[tuple[Occupied, ...], list[tuple[frozenset[int] | None, Occupied]]]] = {}

    def __len__(self) -> int:
        return len(self._led)

    @overload
    def __getitem__(self, index: int) -> tuple[Occupied, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[Occupied, ...], ...]: ...

    def __getitem__(self, index: int | slice) -> tuple[Occupied, ...] | tuple[tuple[Occupied, ...], ...]:
        ranks = range(len(self._led))[index]
        return self._of(ranks) if isinstance(ranks, int) else tuple(map(self._of, ranks))

    def _of(self, rank: int) -> tuple[Occupied, ...]:
        leader = self._groups.leader_of[rank]
        if rank == leader:
            return self._led[leader]
        before, after = self._parts(leader)
        return before + tuple(span for ranks, span in after if ranks is None or rank in ranks)

    def _parts(
        self, leader: int
    ) -> tuple[tuple[Occupied, ...], list[tuple[frozenset[int] | None, Occupied]]]:
        """Return the leader's spans before the first sum, and what follows: spans of all members, sums of some."""
        known = self._known.get(leader)
        if known is not None:
            return known
        spans = iter(self._led[leader])
        last = Occupied(0.0, 0.0, OptimizerStep())
        found: list[tuple[frozenset[int] | None, Occupied]] = []
        for instruction in self._groups.programs[leader].instructions:
            if isinstance(instruction, ReduceGradients):
                if leader in instruction.ranks:
                    last = next(spans)
                found.append((frozenset(instruction.ranks), last._replace(instruction=instruction)))
            elif not isinstance(instruction, Send | Recv):
                found.append((None, next(spans)))
        first = next((n for n, (ranks, _) in enumerate(found) if ranks is not None), len(found))
        known = tuple(span for _, span in found[:first]), found[first:]
        self._known[leader] = known
        return known
