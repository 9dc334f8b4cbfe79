"""Bundles: the pieces that go from one device group to another at once, as one transfer.

    pieces of a value      0 -> 4, 1 -> 5, 2 -> 6, 3 -> 7, all at once, rates shared fairly where they share links
    the bundle             0 -> 4, done with its slowest piece

A bundle takes its slowest piece's path, and as many bytes as that path would move in the piece's time. So two bundles
that share a link share it by what each of them loads it with.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property

from cost_models.links import Path, fair_rates
from runtime.program.crossings import BundleKey, bundles_of_pieces
from runtime.program.program import PieceBytes, SegmentGraph
from runtime.simulate.fair_share import Links
from runtime.simulate.flows import crowd


@dataclass(frozen=True)
class Bundle:
    """The pieces of one value (or gradient) of a full micro-batch between two groups, and the transfer they are."""

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
