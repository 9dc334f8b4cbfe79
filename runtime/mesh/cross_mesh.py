"""Values from mesh to mesh: which rank of one group sends which block of a tensor to which rank of another.

    a tensor of 12 rows     source S0 on ranks 0, 1      0: rows 0-5     1: rows 6-11
                            target S0 on ranks 2, 3, 4   2: rows 0-3     3: rows 4-7     4: rows 8-11

    pieces                  0 -> 2 rows 0-3    0 -> 3 rows 4-5    1 -> 3 rows 6-7    1 -> 4 rows 8-11

A target rank receives each element of its block once: where several source ranks have it, from the nearest of them, and
of equally near ones from that which sends the least so far. Two blocks have one block in common, so a pair of ranks has at
most one piece of a tensor; two groups of a and b ranks that split one dimension have ``a + b - gcd(a, b)`` pieces. The
gradient of a value goes the other way, by the same function with the two layouts exchanged.

A source may be a sum of which each of its ranks has a part. Then a target rank receives each element once from every part,
and adds up what arrives. A fully connected layer of F parts takes the whole value from F others, and gives each of them a
part of its gradient: F² pieces there and F² back.

    a tensor of 4 rows      source P on ranks 2, 3       2: all rows     3: all rows, to be added
    (a gradient)            target S0 on ranks 0, 1      0: rows 0-1     1: rows 2-3

    pieces                  2 -> 0 rows 0-1    3 -> 0 rows 0-1    2 -> 1 rows 2-3    3 -> 1 rows 2-3
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cost_models.errors import InternalError
from cost_models.layout import Layout, Partial
from runtime.mesh.sharding import Block, coordinates


@dataclass(frozen=True)
class MovedBlock:
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
) -> tuple[MovedBlock, ...]:
    """Cut a tensor of ``shape`` into the pieces that change its layout from ``source`` to ``target``.

    ``seconds(source rank, target rank)`` says how near two ranks are: the time of a message between them. Pieces come in
    the order of their targets, then of the parts of a sum, then of their blocks; the same arguments give the same pieces
    on every rank. Of one part of a sum, pieces of a target have nothing in common; of two parts, their blocks are equal or
    have nothing in common. Raises ``InternalError`` for targets that are parts of sums, and for dimensions that ranks do
    not divide.
    """
    if any(isinstance(placement, Partial) for placement in target.placements):
        raise InternalError("send a tensor to another mesh", [f"it would be a part of a sum on {target}"])
    blocks, own = _blocks(shape, source), _blocks(shape, target)
    parts = [_Holders.of(shape, blocks, ranks) for ranks in _ranks_by_part(source)]
    sent: dict[int, int] = dict.fromkeys(source.ranks, 0)
    shared: dict[Block, list[tuple[Block, list[int]]]] = {}
    """The parts that a block of the target has in common with the source's, and the ranks that have them."""
    found: list[MovedBlock] = []
    for rank in target.ranks:
        wanted = own[rank]
        if wanted not in shared:
            shared[wanted] = [
                (common, ranks)
                for part in parts
                for block, ranks in part.near(wanted)
                if (common := wanted.shared_with(block)) is not None
            ]
        for common, ranks in shared[wanted]:
            if rank in ranks:
                found.append(MovedBlock(rank, rank, common))
                continue
            nearest = min(ranks, key=lambda other: (seconds(other, rank), sent[other], other))
            found.append(MovedBlock(nearest, rank, common))
            sent[nearest] += found[-1].elements
    return tuple(found)


class _Holders(NamedTuple):
    """The ranks that have each block of a tensor, or of one part of a sum, in the order of the blocks."""

    blocks: list[tuple[Block, list[int]]]
    rows: list[int]
    """The first row of each block."""
    most: int
    """Rows of the largest block."""
    ranks_of: dict[Block, list[int]]
    """The ranks that have each block; blocks have nothing in common."""

    @classmethod
    def of(cls, shape: Sequence[int], block_of_rank: Mapping[int, Block], ranks: Sequence[int]) -> _Holders:
        holders: dict[Block, list[int]] = defaultdict(list)
        for rank in ranks:
            holders[block_of_rank[rank]].append(rank)
        blocks = sorted(holders.items(), key=lambda item: item[0].offsets)
        rows = [block.offsets[0] if shape else 0 for block, _ in blocks]
        return cls(
            blocks, rows, max((block.shape[0] if shape else 1 for block, _ in blocks), default=0), holders
        )

    def near(self, wanted: Block) -> list[tuple[Block, list[int]]]:
        """Return the blocks that may have rows in common with ``wanted``: itself alone, if it is one of them."""
        if wanted in self.ranks_of:
            return [(wanted, self.ranks_of[wanted])]
        begin, length = (wanted.offsets[0], wanted.shape[0]) if wanted.shape else (0, 1)
        first = bisect_left(self.rows, begin - self.most + 1)
        return self.blocks[first : bisect_left(self.rows, begin + length)]


def _ranks_by_part(layout: Layout) -> list[list[int]]:
    """Return the ranks that have each part of a sum; all of them together where the layout has no sums."""
    summed = [axis for axis, placement in enumerate(layout.placements) if isinstance(placement, Partial)]
    if not summed:
        return [list(layout.ranks)]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in layout.ranks:
        place = coordinates(layout.mesh, rank)
        found.setdefault(tuple(place[axis] for axis in summed), []).append(rank)
    return list(found.values())


def _blocks(shape: Sequence[int], layout: Layout) -> dict[int, Block]:
    """Return the block of each rank; refuse layouts in which they have none."""
    blocks = [Block((0,) * len(shape), tuple(shape))]
    """Those of all ranks, cut along the axes so far, each axis the fastest then."""
    for placement, size in zip(layout.placements, layout.mesh.shape, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is None:
            blocks = [block for block in blocks for _ in range(size)]
        elif blocks[0].shape[dim] % size:
            raise InternalError(
                "send a tensor to another mesh",
                [f"dimension {dim} of {tuple(shape)} is not divided by {layout}"],
            )
        else:
            blocks = [block.cut(dim, size, index) for block in blocks for index in range(size)]
    return dict(zip(layout.mesh.ranks, blocks, strict=True))
