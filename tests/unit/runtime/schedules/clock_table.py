"""An order as a clock table that a reader checks by eye.

    time      0   1   2   3   4   5
    rank 0   F0  F1   .  B0   .  B1
    rank 1    .  F0  B0  F1  B1   .

Rows are ranks, columns units of time. Symbols:

    F0  forward of micro-batch 0        B0  whole backward
    I0  input half of a backward        W0  weight half of a backward
    2F0 the same of segment 2, where some rank runs more than one segment
    =   the instruction to the left goes on        .  idle
"""

from __future__ import annotations

from collections.abc import Mapping

from cost_models.errors import DeadlockError
from runtime.program.program import (
    BackwardInput,
    BackwardWeight,
    Compute,
    ComputeOrder,
    Forward,
    SegmentGraph,
)

UNIT_TIMES: Mapping[str, int] = {"F": 1, "B": 1, "I": 1, "W": 1}


def table(
    order: ComputeOrder, graph: SegmentGraph | None = None, units: Mapping[str, int] = UNIT_TIMES
) -> str:
    """Return the clock table of ``order``.

    graph  whose values say what waits for what; None: the segments form a chain
    units  time units per kind of instruction; transfers take none
    """
    starts = clock_times(order, graph, units)
    several = any(len({i.segment for i in instructions}) > 1 for instructions in order)
    end = max((start + units[i.letter] for (_, i), start in starts.items()), default=0)
    rows = []
    for rank, instructions in enumerate(order):
        cells = ["."] * end
        for instruction in instructions:
            start = starts[rank, instruction]
            length = units[instruction.letter]
            cells[start : start + length] = ["="] * length
            cells[start] = str(instruction) if several else f"{instruction.letter}{instruction.microbatch}"
        rows.append((f"rank {rank}", cells))
    head = [str(t) for t in range(end)]
    width = max((len(cell) for _, cells in [*rows, ("", head)] for cell in cells), default=1) + 1
    label_width = max(len(label) for label, _ in [*rows, ("time", head)]) + 1
    lines = [
        (label.ljust(label_width) + "".join(cell.rjust(width) for cell in cells)).rstrip()
        for label, cells in [("time", head), *rows]
    ]
    return "\n".join(lines)


def clock_times(
    order: ComputeOrder, graph: SegmentGraph | None = None, units: Mapping[str, int] = UNIT_TIMES
) -> dict[tuple[int, Compute], int]:
    """Start of each rank's instructions in time units, each as early as its inputs and its rank allow."""
    members: dict[Compute, list[int]] = {}
    for rank, instructions in enumerate(order):
        for instruction in instructions:
            members.setdefault(instruction, []).append(rank)
    edges = _edges(order, graph)
    done: dict[Compute, int] = {}
    starts: dict[tuple[int, Compute], int] = {}
    free = [0] * len(order)
    at = [0] * len(order)
    moved = True
    while moved:
        moved = False
        for rank, instructions in enumerate(order):
            while at[rank] < len(instructions):
                instruction = instructions[at[rank]]
                group = members[instruction]
                inputs = _inputs(instruction, edges, members)
                heads = all(at[r] < len(order[r]) and order[r][at[r]] == instruction for r in group)
                if not heads or any(i not in done for i in inputs):
                    break
                start = max([free[r] for r in group] + [done[i] for i in inputs])
                done[instruction] = start + units[instruction.letter]
                for r in group:
                    starts[r, instruction] = start
                    free[r] = done[instruction]
                    at[r] += 1
                moved = True
    stuck = [f"rank {r} waits before {order[r][at[r]]}" for r in range(len(order)) if at[r] < len(order[r])]
    if stuck:
        raise DeadlockError("this order cannot run", stuck)
    return starts


def _edges(order: ComputeOrder, graph: SegmentGraph | None) -> dict[tuple[int, int], bool]:
    """Tell, by (producer, consumer), whether a gradient comes back."""
    if graph is None:
        last = max((i.segment for instructions in order for i in instructions), default=0)
        return {(s, s + 1): True for s in range(last)}
    edges: dict[tuple[int, int], bool] = {}
    for value in graph.values:
        for consumer in value.consumers:
            edge = (value.producer, consumer)
            edges[edge] = edges.get(edge, False) or value.needs_grad
    return edges


def _inputs(
    instruction: Compute, edges: Mapping[tuple[int, int], bool], known: Mapping[Compute, list[int]]
) -> list[Compute]:
    """Return the instructions of the order that must be done before this one."""
    segment, microbatch = instruction.segment, instruction.microbatch
    if isinstance(instruction, Forward):
        return [Forward(producer, microbatch) for producer, consumer in edges if consumer == segment]
    if isinstance(instruction, BackwardWeight):
        return [BackwardInput(segment, microbatch)]
    kind = type(instruction)
    downstream = [
        kind(consumer, microbatch)
        for (producer, consumer), back in edges.items()
        if producer == segment and back
    ]
    return [Forward(segment, microbatch), *(d for d in downstream if d in known)]
