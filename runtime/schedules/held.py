"""The memory of an order: micro-batches in flight, and the bytes that autograd saves for them.

Counted from the instruction order itself, so it is exact for whatever a schedule generates. Only the rank's
own order matters: holding begins with a forward and ends with a backward of the same rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from runtime.program.program import Backward, BackwardInput, ComputeOrder, Forward, SegmentGraph

Kind: TypeAlias = Literal["F", "B", "I", "W"]
Step: TypeAlias = tuple[Kind, int, int]
"""The (forward, whole backward, input half or weight half; chunk on the rank; micro-batch) of a compute."""

Moment: TypeAlias = tuple[tuple[int, int], ...]
"""Micro-batches of each chunk that are held whole, and those of which only the weight half is left.

whole         forward done, (input) backward not done: each holds ``saved_bytes``
weights left  input half done, weight half not done:   each holds ``weight_saved_bytes``
"""

_CHANGE: dict[Kind, tuple[int, int]] = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}


def fullest_moments(steps: Iterable[Step], chunks: int) -> tuple[Moment, ...]:
    """Return the moments of a rank's order that no other moment holds at least as much as, in every count.

    The peak of any non-negative weighting of the counts, so of bytes, is reached at one of them.
    """
    whole = [0] * chunks
    weights = [0] * chunks
    seen: set[Moment] = set()
    for kind, chunk, _ in steps:
        more_whole, more_weights = _CHANGE[kind]
        whole[chunk] += more_whole
        weights[chunk] += more_weights
        # A step that only releases leads to a moment that holds no more than the one before: it cannot be the fullest.
        if more_whole > 0 or more_weights > 0:
            seen.add(tuple(zip(whole, weights, strict=True)))
    return _undominated(seen)


def _undominated(moments: set[Moment]) -> tuple[Moment, ...]:
    kept: list[Moment] = []
    by_size = sorted(moments, key=lambda moment: (sum(map(sum, moment)), moment), reverse=True)
    for moment in by_size:  # a dominating moment has a larger sum, so it comes first
        if not any(_dominates(other, moment) for other in kept):
            kept.append(moment)
    return tuple(kept)


def _dominates(one: Moment, other: Moment) -> bool:
    return all(a[0] >= b[0] and a[1] >= b[1] for a, b in zip(one, other, strict=True))


def chunk_corners(steps: Iterable[Step], chunks: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return, for each chunk alone, the few (whole, weights left) at which it may hold the most.

    ``whole·a + weights·b`` with a, b >= 0 is largest at a corner of the counts' convex hull, whatever a and b are.
    """
    whole, weights = [0] * chunks, [0] * chunks
    seen: list[set[tuple[int, int]]] = [set() for _ in range(chunks)]
    for kind, chunk, _ in steps:
        more_whole, more_weights = _CHANGE[kind]
        whole[chunk] += more_whole
        weights[chunk] += more_weights
        if more_whole > 0 or more_weights > 0:
            seen[chunk].add((whole[chunk], weights[chunk]))
    return tuple(_corners(points) for points in seen)


def _corners(points: set[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the upper right of the convex hull, by falling x and rising y."""
    hull: list[tuple[int, int]] = []
    for x, y in sorted(points, reverse=True):
        if hull and y <= hull[-1][1]:
            continue
        while len(hull) > 1 and _right_of(hull[-2], hull[-1], (x, y)) <= 0:
            hull.pop()
        hull.append((x, y))
    return tuple(hull)


def _right_of(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> int:
    """Return a positive number if ``b`` lies beyond the line from ``a`` up to ``c``, seen from the origin."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def held_microbatches(steps: Iterable[Step], chunks: int) -> tuple[int, ...]:
    """Return, for each chunk, the most micro-batches at once whose forward is done and last backward half is not."""
    now = [0] * chunks
    most = [0] * chunks
    for kind, chunk, _ in steps:
        if kind == "F":
            now[chunk] += 1
            most[chunk] = max(most[chunk], now[chunk])
        elif kind != "I":
            now[chunk] -= 1
    return tuple(most)


def peak_bytes(
    moments: Iterable[Moment], saved_bytes: Sequence[int], weight_saved_bytes: Sequence[int]
) -> int:
    """Return the most bytes saved for backward at once on a rank, given the bytes per chunk and micro-batch."""
    return max(
        (
            sum(
                whole * saved_bytes[chunk] + weights * weight_saved_bytes[chunk]
                for chunk, (whole, weights) in enumerate(moment)
            )
            for moment in moments
        ),
        default=0,
    )


def peak_saved_bytes(graph: SegmentGraph, order: ComputeOrder) -> tuple[int, ...]:
    """Return, for each rank, the most bytes saved for backward at once in ``order``: any graph, any schedule."""
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
