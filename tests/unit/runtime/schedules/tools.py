"""What the schedule tests share: graphs to order, and a validator and clock written apart from the product's.

Both work on one graph of instructions: an edge for "next on the same rank" and one for every "needs". An order
can run if that graph has no cycle; the clock is its longest path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

from runtime.program.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    ComputeOrder,
    Forward,
    Segment,
    SegmentCost,
    SegmentGraph,
    TransferSeconds,
    Value,
)
from runtime.schedules import SCHEDULES
from runtime.schedules.held import ComputeStep
from runtime.schedules.list_scheduler import Alone
from runtime.schedules.list_work import work_of

UNIT = SegmentCost(1, 1, 1, saved_bytes=10, weight_saved_bytes=4)
HALF = SegmentCost(1, 0.5, 0.5, saved_bytes=10, weight_saved_bytes=4)


def graph_of(
    ranks: Sequence[Sequence[int]],
    edges: Iterable[tuple[int, int]],
    cost: SegmentCost | Sequence[SegmentCost] = UNIT,
    frozen: Iterable[int] = (),
    world_size: int | None = None,
    integers: Iterable[tuple[int, int]] = (),
) -> SegmentGraph:
    """Segments on ``ranks``, one value per edge. No gradient: to or from ``frozen`` segments, on ``integers``."""
    still, without = set(frozen), set(integers)
    costs = [cost] * len(ranks) if isinstance(cost, SegmentCost) else list(cost)
    segments = tuple(Segment(i, tuple(r), costs[i], i not in still) for i, r in enumerate(ranks))
    values = tuple(
        Value(f"v{n}", a, (b,), 100, needs_grad=(a, b) not in without and not still & {a, b})
        for n, (a, b) in enumerate(sorted(edges))
    )
    return SegmentGraph(segments, values, world_size or 1 + max(rank for r in ranks for rank in r))


def chain(schedule: str, ranks: int, chunks: int = 1, cost: SegmentCost = UNIT) -> SegmentGraph:
    """A chain of equal stages, placed as the schedule wants them."""
    stages = ranks * chunks
    places = SCHEDULES[schedule].stage_ranks(stages, range(ranks))
    return graph_of([(r,) for r in places], [(s, s + 1) for s in range(stages - 1)], cost)


def needs(graph: SegmentGraph, instruction: Compute, split: bool) -> list[Compute]:
    """What must be done before ``instruction``, from the graph alone."""
    s, mb = instruction.segment, instruction.microbatch
    if isinstance(instruction, Forward):
        return [Forward(v.producer, mb) for v in graph.values if s in v.consumers]
    if isinstance(instruction, BackwardWeight):
        return [BackwardInput(s, mb)]
    gradient = BackwardInput if split else Backward
    return [Forward(s, mb)] + [
        gradient(c, mb) for v in graph.values if v.producer == s and v.needs_grad for c in v.consumers
    ]


def faults(graph: SegmentGraph, order: ComputeOrder, microbatches: int, split: bool) -> list[str]:
    """Everything that is wrong with an order; an empty list if it can run and is complete."""
    found = []
    halves: tuple[type[Compute], ...] = (BackwardInput, BackwardWeight) if split else (Backward,)
    if len(order) != graph.world_size:
        return [f"{len(order)} orders for {graph.world_size} ranks"]
    for rank, instructions in enumerate(order):
        expected = {
            kind(s.index, mb)
            for s in graph.segments
            if rank in s.ranks
            for mb in range(microbatches)
            for kind in ((Forward, *halves) if s.has_backward else (Forward,))
        }
        if len(instructions) != len(set(instructions)):
            found.append(f"rank {rank} repeats an instruction")
        if set(instructions) != expected:
            found.append(f"rank {rank} differs: {sorted(map(str, set(instructions) ^ expected))}")
        for s in graph.segments:
            forwards = [i.microbatch for i in instructions if isinstance(i, Forward) and i.segment == s.index]
            if forwards != sorted(forwards):
                found.append(f"rank {rank} runs forwards of segment {s.index} out of order")
    if not nx.is_directed_acyclic_graph(_waits(graph, order, split)):
        found.append("the order waits in a circle")
    return found


def _waits(graph: SegmentGraph, order: ComputeOrder, split: bool) -> nx.DiGraph[Compute]:
    waits: nx.DiGraph[Compute] = nx.DiGraph()
    for instructions in order:
        waits.add_nodes_from(instructions)
        waits.add_edges_from(pairwise(instructions))
        for instruction in instructions:
            waits.add_edges_from((need, instruction) for need in needs(graph, instruction, split))
    return waits


def default_limits(
    graph: SegmentGraph, microbatches: int, transfer_seconds: TransferSeconds | None = None
) -> tuple[int, ...]:
    """The limits of the schedule "list", which is not tight of memory."""
    return Alone.of(graph, work_of(graph, transfer_seconds, "whole")).limits(microbatches)


def held_microbatches(steps: Iterable[ComputeStep], chunks: int) -> tuple[int, ...]:
    """For each chunk, the most micro-batches at once whose forward is done and last backward half is not."""
    now = [0] * chunks
    most = [0] * chunks
    for kind, chunk, _ in steps:
        if kind == "F":
            now[chunk] += 1
            most[chunk] = max(most[chunk], now[chunk])
        elif kind != "I":
            now[chunk] -= 1
    return tuple(most)


def peak_saved_bytes(graph: SegmentGraph, order: ComputeOrder) -> tuple[int, ...]:
    """For each rank, the most bytes saved for backward at once in ``order``: any graph, any schedule."""
    peaks = []
    for instructions in order:
        held = peak = 0
        for instruction in instructions:
            segment = graph.segments[instruction.segment]
            if not segment.has_backward:
                continue
            cost = segment.cost
            if isinstance(instruction, Forward):
                held += cost.saved_bytes
            elif isinstance(instruction, Backward):
                held -= cost.saved_bytes
            elif isinstance(instruction, BackwardInput):
                held += cost.weight_saved_bytes - cost.saved_bytes
            else:
                held -= cost.weight_saved_bytes
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


@dataclass(frozen=True)
class Clock:
    """When everything ran. ``idle`` is between a rank's first and last instruction."""

    makespan: float
    idle: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The part of all ranks' time that is not work."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)


def clock(
    graph: SegmentGraph, order: ComputeOrder, split: bool, seconds: Callable[[Compute], float] = lambda i: 1
) -> Clock:
    """The longest path: every instruction as soon as its rank and its inputs are there. Transfers take no time."""
    waits = _waits(graph, order, split)
    end: dict[Compute, float] = {}
    for instruction in nx.topological_sort(waits):
        start = max((end[before] for before in waits.predecessors(instruction)), default=0)
        end[instruction] = start + seconds(instruction)
    idle, busy = [], []
    for instructions in order:
        work = sum(map(seconds, instructions))
        busy.append(work)
        if instructions:
            first = end[instructions[0]] - seconds(instructions[0])
            idle.append(end[instructions[-1]] - first - work)
        else:
            idle.append(0)
    return Clock(max(end.values()), tuple(idle), tuple(busy))


def ordered(
    schedule: str, ranks: int, microbatches: int, chunks: int | None = None
) -> tuple[SegmentGraph, Clock]:
    """A chain ordered and clocked with every instruction taking one unit."""
    made = SCHEDULES[schedule]
    graph = chain(schedule, ranks, chunks or made.chunks or made.minimum_chunks)
    order = made.order(graph, microbatches)
    assert faults(graph, order, microbatches, made.splits_backward) == []
    return graph, clock(graph, order, made.splits_backward)
