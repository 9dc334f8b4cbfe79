"""The memory of an order: micro-batches in flight, and the bytes that autograd saves for them.

Counted from the instruction order itself, so it is exact for whatever a schedule generates. Only the rank's
own order matters: holding begins with a forward and ends with a backward of the same rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from runtime.program.program import Letter

ComputeStep: TypeAlias = tuple[Letter, int, int]
"""The (letter, chunk on the rank, micro-batch) of a compute."""

Moment: TypeAlias = tuple[tuple[int, int], ...]
"""Micro-batches of each chunk that are held whole, and those whose weight half alone is still to run.

whole         forward done, (input) backward not done: each holds ``saved_bytes``
weights left  input half done, weight half not done:   each holds ``weight_saved_bytes``
"""

_CHANGE: dict[Letter, tuple[int, int]] = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}


def fullest_moments(steps: Iterable[ComputeStep], chunks: int) -> tuple[Moment, ...]:
    """Return the moments of a rank's order that no other moment holds at least as much as, in every count.

    The peak of any non-negative weighting of the counts, so of bytes, is reached at one of them.
    """
    kept: list[Moment] = []
    moments = _growing(steps, chunks)
    by_size = sorted(moments, key=lambda moment: (sum(map(sum, moment)), moment), reverse=True)
    for moment in by_size:  # a dominating moment has a larger sum, so it comes first
        if not any(_dominates(other, moment) for other in kept):
            kept.append(moment)
    return tuple(kept)


def _growing(steps: Iterable[ComputeStep], chunks: int) -> set[Moment]:
    """Return the moments after steps that hold more. A step that only releases leads to no moment that is fuller."""
    counts = [(0, 0)] * chunks
    seen: set[Moment] = set()
    for letter, chunk, _ in steps:
        whole, weights = _CHANGE[letter]
        counts[chunk] = (counts[chunk][0] + whole, counts[chunk][1] + weights)
        if whole > 0 or weights > 0:
            seen.add(tuple(counts))
    return seen


def _dominates(one: Moment, other: Moment) -> bool:
    return all(a[0] >= b[0] and a[1] >= b[1] for a, b in zip(one, other, strict=True))


def chunk_corners(steps: Iterable[ComputeStep], chunks: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return, for each chunk alone, the few (whole, weights left) at which it may hold the most.

    ``whole·a + weights·b`` with a, b >= 0 is largest at a corner of the counts' convex hull, whatever a and b are.
    """
    moments = _growing(steps, chunks)
    return tuple(_corners({moment[chunk] for moment in moments}) for chunk in range(chunks))


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
