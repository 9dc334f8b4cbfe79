"""The spread of a parameter or buffer over the ranks of a mesh: the part that each stores, and the part that each trains.

leaf     what a rank's graph reads: its block of the tensor, by the placements on each axis (the first outermost)
owner    what its optimizer updates: the leaf, or a part of it where gradients and optimizer state are sharded further
         (ZeRO-1, 2). Parts lie inside the leaf, whichever axes they come from: axes of ``summed`` are cut first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add, sub

from torch import Tensor

from cost_models.layout import Mesh, Placement, Shard


@dataclass(frozen=True)
class Block:
    """A block of a tensor: ``shape`` elements from ``offsets`` on."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return this block of a tensor: a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.shape, strict=True)):
            whole = whole.narrow(dim, offset, size)
        return whole

    def shared_with(self, other: Block) -> Block | None:
        """Return the block of the same tensor that both have; None if they have nothing in common."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, map(add, self.offsets, self.shape), map(add, other.offsets, other.shape))
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Block(begins, shape) if all(size > 0 for size in shape) else None

    def within(self, offsets: Sequence[int]) -> Block:
        """Return this block as a part of the block that starts at ``offsets``."""
        return Block(tuple(map(sub, self.offsets, offsets)), self.shape)

    def cut(self, dim: int, parts: int, index: int) -> Block:
        """Return the ``index``-th of equal parts along ``dim``."""
        dim %= len(self.shape)
        size = self.shape[dim] // parts
        return Block(
            (*self.offsets[:dim], self.offsets[dim] + index * size, *self.offsets[dim + 1 :]),
            (*self.shape[:dim], size, *self.shape[dim + 1 :]),
        )


@dataclass(frozen=True)
class Sharding:
    """Placements per axis of ``mesh``. ``summed``: axes whose sums of gradients leave each rank its owner's part."""

    mesh: Mesh
    leaf: tuple[Placement, ...]
    owner: tuple[Placement, ...]
    summed: frozenset[int] = frozenset()

    @cached_property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """(axis, dimension) of each cut that makes a leaf's part of the owner, outermost first."""
        found = [
            (axis, owner.dim)
            for axis, (leaf, owner) in enumerate(zip(self.leaf, self.owner, strict=True))
            if isinstance(owner, Shard) and not isinstance(leaf, Shard) and self.mesh.shape[axis] > 1
        ]
        return tuple(sorted(found, key=lambda cut: (cut[0] not in self.summed, cut[0])))

    @property
    def is_cut(self) -> bool:
        """True if ranks train parts of the tensor."""
        return any(
            isinstance(owner, Shard) and size > 1
            for owner, size in zip(self.owner, self.mesh.shape, strict=True)
        )

    def leaf_block(self, shape: Sequence[int], rank: int) -> Block:
        """Return the block that ``rank`` stores of a tensor of ``shape``."""
        return block_of(shape, self.leaf, self.mesh, rank)

    def owner_block(self, shape: Sequence[int], rank: int) -> Block:
        """Return the block that ``rank`` trains of a tensor of ``shape``."""
        block = self.leaf_block(shape, rank)
        place = coordinates(self.mesh, rank)
        for axis, dim in self.cuts:
            block = block.cut(dim, self.mesh.shape[axis], place[axis])
        return block

    def part(self, leaf: Tensor, rank: int, cuts: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """Return the owner's part of a leaf or its gradient: a view. ``cuts``: the cuts still to make (default: all)."""
        place = coordinates(self.mesh, rank)
        for axis, dim in self.cuts if cuts is None else cuts:
            size = leaf.shape[dim] // self.mesh.shape[axis]
            leaf = leaf.narrow(dim, place[axis] * size, size)
        return leaf

    def leaf_part(self, rank: int) -> tuple[int, ...]:
        """Return the number of the leaf's block that ``rank`` stores: its place on the axes that cut it."""
        return _places(coordinates(self.mesh, rank), self.leaf)

    def owner_part(self, rank: int) -> tuple[int, ...]:
        """Return the number of the owner's block that ``rank`` trains: its place on the axes that cut it."""
        return _places(coordinates(self.mesh, rank), self.owner)

    def speaks(self, rank: int) -> bool:
        """Tell whether ``rank`` is the first of those that train the same block."""
        place = coordinates(self.mesh, rank)
        return all(
            index == 0 or isinstance(placement, Shard)
            for index, placement in zip(place, self.owner, strict=True)
        )


def block_of(shape: Sequence[int], placements: Sequence[Placement], mesh: Mesh, rank: int) -> Block:
    """Return the block that ``rank`` has of a tensor of ``shape``."""
    block = Block((0,) * len(shape), tuple(shape))
    for placement, size, index in zip(placements, mesh.shape, coordinates(mesh, rank), strict=True):
        if isinstance(placement, Shard):
            block = block.cut(placement.dim, size, index)
    return block


def _places(place: Sequence[int], placements: Sequence[Placement]) -> tuple[int, ...]:
    return tuple(i for i, placement in zip(place, placements, strict=True) if isinstance(placement, Shard))


def coordinates(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Return the place of ``rank`` on each axis."""
    place, found = mesh.ranks.index(rank), []
    for size in reversed(mesh.shape):
        place, index = divmod(place, size)
        found.append(index)
    return tuple(reversed(found))
