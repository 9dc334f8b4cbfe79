"""Values on their way from one device group to another: who sends how many bytes of them to whom.

    value h of segment 0 on rank 0, used by segment 1 on rank 3     0 -> 3 all of it;  its gradient 3 -> 0
    value h of segment 0 on (0, 1), used by segment 1 on (2, 3)     0 -> 2 and 1 -> 3 a half each, and back

Between single ranks a value goes whole, once per rank that uses it. Between groups of which one has several ranks it goes
in pieces, which its ``Value`` lists (``runtime.mesh.cross_mesh`` cuts them).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from runtime.program.program import PieceBytes, SegmentGraph, Value

BundleKey: TypeAlias = tuple[str, bool, int, int]
"""(value, gradient or not, first rank of the group that sends, first rank of the one that receives)."""


class GroupCrossing(NamedTuple):
    """The way of a value from the group that makes it to another one."""

    ranks: tuple[int, ...]
    """The group that uses it."""
    consumers: list[int]
    """The segments of that group that do."""
    there: tuple[PieceBytes, ...]
    back: tuple[PieceBytes, ...]
    """The pieces of its gradient; none if it needs none."""


def crossings(graph: SegmentGraph, value: Value) -> Iterator[GroupCrossing]:
    """Yield the ways of ``value`` to other groups, in the order of its consumers."""
    home = graph.segments[value.producer].ranks
    for away, consumers in consumers_by_group(graph, value).items():
        if away == home:
            continue
        there, back = pieces_between(value, home, away)
        yield GroupCrossing(away, consumers, there, back if value.needs_grad else ())


def bundles_of_pieces(graph: SegmentGraph) -> Iterator[tuple[BundleKey, tuple[PieceBytes, ...]]]:
    """Yield the pieces that go from group to group at once, by (target, source), of every value and gradient."""
    for value in graph.values:
        home = graph.segments[value.producer].rank
        for (away, *_), _, there, back in crossings(graph, value):
            for key, pieces in (
                ((value.name, False, home, away), there),
                ((value.name, True, away, home), back),
            ):
                if pieces:
                    yield key, tuple(sorted(pieces, key=lambda piece: (piece.target, piece.source)))


def pieces_between(
    value: Value, home: tuple[int, ...], away: tuple[int, ...]
) -> tuple[tuple[PieceBytes, ...], tuple[PieceBytes, ...]]:
    """Return the pieces of ``value`` from the group that makes it to another one, and those of its gradient back."""
    if len(home) == len(away) == 1:
        size_bytes = value.size_bytes
        return (PieceBytes(home[0], away[0], size_bytes),), (PieceBytes(away[0], home[0], size_bytes),)
    targets = frozenset(away)
    return (
        tuple(piece for piece in value.pieces if piece.target in targets),
        tuple(piece for piece in value.gradient_pieces if piece.source in targets),
    )


def consumers_by_group(graph: SegmentGraph, value: Value) -> dict[tuple[int, ...], list[int]]:
    """Return the segments that use ``value``, by the ranks that run them."""
    grouped: dict[tuple[int, ...], list[int]] = {}
    for segment in value.consumers:
        grouped.setdefault(graph.segments[segment].ranks, []).append(segment)
    return grouped
