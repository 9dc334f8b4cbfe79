"""Transfers along links: bundles of messages, and collectives: sums of gradients, or what a compute sends inside, in rings.

    a sum         takes its seconds alone; beside others, its ring's links give it what is fair
    a compute     asks for its links for the share φ of its seconds in which it communicates; others keep it waiting in that
                  share, and it counts as φ of a transfer for them

So a compute with φ = 0.3 and a message on one link each run at 1 / 1.3 of their speed.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from cost_models.links import Path, fair_rates
from runtime.program.crossings import BundleKey, bundles_of_pieces
from runtime.program.program import Collective, PieceBytes, Segment, SegmentGraph
from runtime.simulate.fair_share import Links


class Flow(NamedTuple):
    """Bytes on their way along a path, as one transfer that stands for ``weight`` equal ones."""

    path: Path
    size_bytes: float
    weight: float = 1.0


class Load(NamedTuple):
    """A flow that a compute keeps up, which gives it ``asked`` bytes per second alone."""

    path: Path
    weight: float
    asked: float
    rank: int
    """The first rank of the group that computes."""


def crowd(path: Path, paths: Sequence[Path]) -> int:
    """Return how many of ``paths`` take the link of ``path`` that most of them take."""
    users = Counter(link for each in paths for link in set(each.links))
    return max((users[link] for link in path.links), default=1)


def ring_path(ranks: Sequence[int], links: Links) -> Path:
    """Return all links of a ring as one path: it goes as fast as the narrowest. Latency is its seconds' part."""
    hops = [links.path(*pair) for pair in itertools.pairwise((*ranks, ranks[0]))]
    rate = min(hop.bandwidth_bytes_per_second for hop in hops)
    if not math.isfinite(rate):
        return Path((), 1.0, 0.0)  # no links that anybody waits for: a "byte" is a second
    return Path(tuple(dict.fromkeys(link for hop in hops for link in hop.links)), rate, 0.0)


def sum_flow(ring: Path, siblings: Sequence[Path], links: Links, *, led: bool) -> Flow:
    """Return the flow of a sum that takes a second beside its ``siblings``, itself among them.

    ``led``: it stands for all of them, which run at once; else they are flows of their own.
    """
    if led or len(siblings) == 1:
        return Flow(ring, ring.bandwidth_bytes_per_second, crowd(ring, siblings))
    return Flow(ring, fair_rates(siblings, links.links)[siblings.index(ring)])


def loads_of(
    own: Segment, backward: bool, compute_seconds: float, ring_of: Callable[[tuple[int, ...]], Path]
) -> list[Load]:
    """List what a segment's collectives ask of links while it computes, by axis; its first rank's ring stands for all."""
    axes: dict[str, list[Collective]] = {}
    for item in own.collectives:
        if item.backward == backward and item.seconds > 0.0:
            axes.setdefault(item.axis, []).append(item)
    found = []
    for items in axes.values():
        seconds, groups = sum(item.seconds for item in items), items[0].groups
        rings = [ring_of(ranks) for ranks in groups]
        ring = next(ring for ring, ranks in zip(rings, groups, strict=True) if own.rank in ranks)
        share = min(1.0, seconds / compute_seconds)
        if ring.links and share > 0.0:
            weight = share * crowd(ring, rings)
            found.append(Load(ring, weight, share * ring.bandwidth_bytes_per_second, own.rank))
    return found


@dataclass(frozen=True)
class Bundle:
    """The pieces of one value (or gradient) of a full micro-batch between two groups, and the transfer they are.

        pieces of a value      0 -> 4, 1 -> 5, 2 -> 6, 3 -> 7, all at once, rates shared fairly where they share links
        the bundle             0 -> 4, done with its slowest piece

    A bundle takes its slowest piece's path, and as many bytes as that path would move in the piece's time. So two bundles
    that share a link share it by what each of them loads it with.
    """

    pieces: tuple[PieceBytes, ...]
    path: Path
    """The way of the slowest piece."""
    size_bytes: float
    """Bytes that take as long on this way alone as the slowest piece takes beside the others."""
    weight: int
    """The pieces that share this way, for which the transfer stands."""

    @cached_property
    def sends(self) -> int:
        """The most pieces that one rank sends."""
        return max(Counter(piece.source for piece in self.pieces).values())

    @cached_property
    def receives(self) -> int:
        """The most pieces that one rank receives."""
        return max(Counter(piece.target for piece in self.pieces).values())


def bundles_of(graph: SegmentGraph, links: Links) -> dict[BundleKey, Bundle]:
    """Return the bundles between the groups of ``graph``."""
    known: dict[tuple[tuple[int, int], ...], tuple[float, ...]] = {}

    @cache  # stages that go round the groups have equal ones
    def bundle(pieces: tuple[PieceBytes, ...]) -> Bundle:
        ends = tuple((piece.source, piece.target) for piece in pieces)
        paths = [links.path(*pair) for pair in ends]
        if ends not in known:
            known[ends] = fair_rates(paths, links.links)
        seconds = [
            path.latency_seconds + piece.size_bytes / rate
            for piece, path, rate in zip(pieces, paths, known[ends], strict=True)
        ]
        slowest = seconds.index(max(seconds))
        path = paths[slowest]
        moving = pieces[slowest].size_bytes / known[ends][slowest]
        alone = path.bandwidth_bytes_per_second
        size_bytes = pieces[slowest].size_bytes if known[ends][slowest] == alone else moving * alone
        return Bundle(pieces, path, size_bytes, crowd(path, paths))

    return {key: bundle(pieces) for key, pieces in bundles_of_pieces(graph)}
