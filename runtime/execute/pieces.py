"""Pieces of values between device groups: which part of a rank's tensor a message moves, and where what arrives belongs.

a tensor of 4 rows on this rank      <h:0@0 rows 0-1     <h:0@1 rows 2-3      both into one tensor
its gradient                         >d(h):0@0 rows 0-1  >d(h):0@1 rows 2-3   parts of one tensor

Ranks may send parts of a sum: then several pieces of a gradient belong in one place. The one of the lowest rank is received
there, the others are added to it in the order of their ranks, once all have arrived: the same numbers in every run.

a sum of which ranks 2, 3 have parts   <d(h):0@2 rows 0-1   <d(h):0@3 rows 0-1   the second added to the first
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.execute.context import ProgramContext, Shared
from runtime.mesh.sharding import Block
from runtime.program.program import Message, Recv


class MovedPieces:
    """The pieces that one program moves for one batch shape."""

    def __init__(self, context: ProgramContext, shared: Shared) -> None:
        self._interfaces, self._rank = context.interfaces, context.program.rank
        self._shapes = shared.shapes
        self._blocks: dict[tuple[str, tuple[int, ...], int], Block] = {}
        self._keepers: dict[tuple[str, int, tuple[int, ...]], int] = {}
        self._scattered: dict[int, tuple[Tensor, Tensor]] = {}
        """Pieces under way that do not lie in one stretch where they belong, by position: (place, what arrives)."""
        self._added = self._positions_added(context)
        self._addends: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
        """Pieces to be added, by the position of their gradient's first piece: (source, place, what arrives)."""

    def of(self, message: Message, peer: int) -> Block | None:
        """Return the part of this rank's tensor that a message moves; None if it is all of it."""
        interface = self._interfaces.get(message.value)
        if interface is None:
            return None
        shape, _ = self._shapes[message.microbatch][message.value]
        key = message.value, shape, peer
        if key not in self._blocks:
            self._blocks[key] = interface.piece(shape, self._rank, peer)
        return self._blocks[key]

    def _positions_added(self, context: ProgramContext) -> frozenset[int]:
        """Return the positions at which a piece arrives that is added to one of a lower rank."""
        arriving: dict[tuple[str, int, tuple[int, ...]], list[tuple[int, int, Block]]] = {}
        for position, instruction in enumerate(context.program.instructions):
            if isinstance(instruction, Recv) and instruction.message.gradient:
                message = instruction.message
                block = self.of(message, message.source)
                if block is not None:
                    key = message.value, message.microbatch, self._group(message)
                    arriving.setdefault(key, []).append((message.source, position, block))
        found = set()
        for entries in arriving.values():
            first: list[Block] = []
            for _, position, block in sorted(entries):
                if any(block.shared_with(other) is not None for other in first):
                    found.add(position)
                else:
                    first.append(block)
        return frozenset(found)

    def _group(self, message: Message) -> tuple[int, ...]:
        """Return the group that sends a gradient."""
        others = self._interfaces[message.value].others
        return next(layout.ranks for layout in others if message.source in layout.ranks)

    def keeper(self, position: int, message: Message) -> int:
        """Return the position of the first piece of a gradient that a group sends: there all of it is put together."""
        if message.value not in self._interfaces:
            return position
        key = message.value, message.microbatch, self._group(message)
        return self._keepers.setdefault(key, position)

    def receiver(self, position: int, message: Message, block: Block, whole: Tensor) -> Tensor:
        """Return the memory that the piece at ``position`` is received in: its place in ``whole``, if it is one stretch.

        A piece that is to be added to another has memory of its own until ``add``.
        """
        place = block.of(whole)
        if position in self._added:
            piece = torch.empty_like(place, memory_format=torch.contiguous_format)
            addends = self._addends.setdefault(self.keeper(position, message), [])
            addends.append((message.source, place, piece))
            return piece
        if place.is_contiguous():
            return place
        piece = torch.empty_like(place, memory_format=torch.contiguous_format)
        self._scattered[position] = place, piece
        return piece

    def put(self, position: int) -> None:
        """Put what has arrived at ``position`` where it belongs."""
        if position in self._scattered:
            place, piece = self._scattered.pop(position)
            place.copy_(piece)

    def add(self, keeper: int) -> None:
        """Add up the parts of a sum, in the order of their ranks; all of them have arrived."""
        for _, place, piece in sorted(self._addends.pop(keeper, ()), key=lambda addend: addend[0]):
            place.add_(piece)

    def clear(self) -> None:
        """Drop what a failed step left."""
        self._scattered.clear()
        self._addends.clear()
