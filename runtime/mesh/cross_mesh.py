"""Values from mesh to mesh: which rank of one group sends which block of a tensor to which rank of another.

    a tensor of 12 rows     source S0 on ranks 0, 1      0: rows 0-5     1: rows 6-11
                            target S0 on ranks 2, 3, 4   2: rows 0-3     3: rows 4-7     4: rows 8-11

    pieces                  0 -> 2 rows 0-3    0 -> 3 rows 4-5    1 -> 3 rows 6-7    1 -> 4 rows 8-11

A target rank receives each element of its block once: where several source ranks have it, from the nearest of them, and
of equally near ones from that which sends the least so far. Two blocks have one block in common, so a pair of ranks has at
most one piece of a tensor; two groups of a and b ranks that split one dimension have ``a + b - gcd(a, b)`` pieces. The
gradient of a value goes the other way, by the same function with the two layouts exchanged.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cost_models.errors import InternalError
from cost_models.layout import Layout, Partial
from runtime.mesh.sharding import Block, block_of


@dataclass(frozen=True)
class Piece:
    """A block of a tensor on its way from one rank to another, in elements of the whole tensor.

    A rank of both groups keeps what it has: there, ``source`` is ``target``, and nothing is sent.
    """

    source: int
    target: int
    block: Block

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.block.shape)


def pieces(
    shape: Sequence[int],
    source: Layout,
    target: Layout,
    seconds: Callable[[int, int], float] = lambda source, target: 0.0,
) -> tuple[Piece, ...]:
    """Cut a tensor of ``shape`` into the pieces that change its layout from ``source`` to ``target``.

    ``seconds(source rank, target rank)`` says how near two ranks are: the time of a message between them. Pieces come in
    the order of their targets, then of their blocks; the same arguments give the same pieces on every rank. Raises
    ``InternalError`` for parts of sums, which have to be summed before they leave, and for dimensions that ranks do not
    divide.
    """
    holders: dict[Block, list[int]] = defaultdict(list)
    for rank in source.ranks:
        holders[_block(shape, source, rank)].append(rank)
    sent: dict[int, int] = dict.fromkeys(source.ranks, 0)
    found: list[Piece] = []
    blocks = sorted(holders.items(), key=lambda item: item[0].offsets)
    rows = [block.offsets[0] if shape else 0 for block, _ in blocks]
    most = max((block.shape[0] if shape else 1 for block, _ in blocks), default=0)
    for rank in target.ranks:
        wanted = _block(shape, target, rank)
        begin, length = (wanted.offsets[0], wanted.shape[0]) if shape else (0, 1)
        for block, ranks in blocks[bisect_left(rows, begin - most + 1) : bisect_left(rows, begin + length)]:
            common = wanted.shared_with(block)
            if common is None:
                continue
            if rank in ranks:
                found.append(Piece(rank, rank, common))
                continue
            nearest = min(ranks, key=lambda other: (seconds(other, rank), sent[other], other))
            found.append(Piece(nearest, rank, common))
            sent[nearest] += found[-1].elements
    return tuple(found)


def _block(shape: Sequence[int], layout: Layout, rank: int) -> Block:
    """Return the block of ``rank``; refuse layouts in which it has none."""
    if any(isinstance(placement, Partial) for placement in layout.placements):
        raise InternalError("send a tensor to another mesh", [f"it is a part of a sum on {layout}"])
    sizes = list(shape)
    for placement, size in zip(layout.placements, layout.mesh.shape, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        if sizes[dim] % size:
            raise InternalError(
                "send a tensor to another mesh",
                [f"dimension {dim} of {tuple(shape)} is not divided by {layout}"],
            )
        sizes[dim] //= size
    return block_of(shape, layout.placements, layout.mesh, rank)
