"""Device groups: the ranks that run a segment together, and the one of them that speaks for all.

Every rank of a group runs the group's computes and takes part in its collectives, in one order. The first of them, the
leader, stands for the group in orders, times and memory:

    segment 0 on ranks (0, 1)     leader 0     programs 0 and 1: computes of segment 0, sums of gradients
    segment 1 on ranks (2, 3)     leader 2     programs 2 and 3: computes of segment 1, sums of gradients
    segment 2 on rank  (4,)       leader 4     program 4: computes of segment 2, messages to and from rank 5
    segment 3 on rank  (5,)       leader 5     program 5: computes of segment 3, messages to and from rank 4

A message has one source and one target. Between groups of which one has several ranks a value goes in pieces, one message
each (``crossings``); a value that does not list them is refused. Groups that overlap are refused, too: their common ranks
would follow two leaders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cost_models.errors import InternalError
from runtime.program.crossings import crossings
from runtime.program.program import ComputeOrder, PieceBytes, SegmentGraph


@dataclass(frozen=True)
class OnLeaders:
    """A graph whose every segment runs on the leader of its device group alone."""

    graph: SegmentGraph
    leader_of: tuple[int, ...]
    """The first of each rank's group; ranks without a segment lead themselves."""

    def orders(self, orders: ComputeOrder) -> ComputeOrder:
        """Return the leaders' orders and empty ones for the other ranks, who may come with their leader's or with none.

        Raises ``InternalError`` if a rank comes with another order than its leader's.
        """
        leaders = [orders[leader] if leader < len(orders) else () for leader in self.leader_of]
        unlike = [
            f"rank {rank} has another order than rank {self.leader_of[rank]}, the first of its group"
            for rank, (order, leaders_order) in enumerate(zip(orders, leaders, strict=False))
            if rank != self.leader_of[rank] and order not in ((), leaders_order)
        ]
        if unlike:
            raise InternalError("order the computes of device groups", unlike)
        return tuple(
            order if leader == rank else ()
            for rank, (order, leader) in enumerate(zip(orders, self.leader_of, strict=False))
        )


def on_leaders(graph: SegmentGraph) -> OnLeaders:
    """Put every segment on its group's leader; raise ``InternalError`` for groups that programs cannot serve."""
    leader_of = list(range(graph.world_size))
    if all(len(segment.ranks) == 1 for segment in graph.segments):
        return OnLeaders(graph, tuple(leader_of))
    refuse_impossible_groups(graph)
    for segment in graph.segments:
        for rank in segment.ranks:
            leader_of[rank] = segment.rank
    segments = tuple(replace(segment, ranks=(segment.rank,)) for segment in graph.segments)
    return OnLeaders(replace(graph, segments=segments), tuple(leader_of))


def refuse_impossible_groups(graph: SegmentGraph) -> None:
    """Raise ``InternalError`` if groups overlap, or a value goes to or from several ranks in no pieces."""
    because = [*_overlaps(graph), *_values_without_pieces(graph)]
    if because:
        raise InternalError("run segments on device groups", because)


def _overlaps(graph: SegmentGraph) -> Iterator[str]:
    """Yield a text for every two different groups with a rank in common."""
    group_of: dict[int, tuple[int, ...]] = {}
    found: dict[tuple[tuple[int, ...], ...], None] = {}
    for segment in graph.segments:
        for rank in segment.ranks:
            group = group_of.setdefault(rank, segment.ranks)
            if group != segment.ranks:
                found[tuple(sorted((group, segment.ranks)))] = None
    for a, b in found:
        yield f"ranks {a} and {b} overlap"


def _values_without_pieces(graph: SegmentGraph) -> Iterator[str]:
    """Yield a text for every value that goes between groups of several ranks and does not say in which pieces."""
    for value in graph.values:
        home = graph.segments[value.producer].ranks
        for ranks, _, there, back in crossings(graph, value):
            way = f"value {value.name} goes from segment {value.producer} on ranks {home} to ranks {ranks}"
            ways = [(way, there, home, ranks)]
            if value.needs_grad:
                ways.append((f"the gradient of {way}, and back", back, ranks, home))
            for text, pieces, sources, targets in ways:
                reached, left = {piece.target for piece in pieces}, {piece.source for piece in pieces}
                if reached != set(targets):
                    yield f"{text}, but its pieces reach {sorted(reached)}"
                if not left <= set(sources):
                    yield f"{text}, but its pieces come from {sorted(left)}"
            if value.needs_grad and value.size_bytes:
                yield from _uneven(f"the gradient of {way}, and back", back, value.size_bytes)


def _uneven(text: str, pieces: Sequence[PieceBytes], size_bytes: int) -> Iterator[str]:
    """Yield a text if pieces do not bring every rank all of a gradient once, or all parts of its sum once."""
    came: Counter[int] = Counter()
    for piece in pieces:
        came[piece.target] += piece.size_bytes
    if len(set(came.values())) > 1 or any(size % size_bytes for size in came.values()):
        sizes = ", ".join(f"{size} B to rank {rank}" for rank, size in sorted(came.items()))
        yield f"{text}, but its pieces bring {sizes}: not as many parts of {size_bytes} B to each"
