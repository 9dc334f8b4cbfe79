"""Pieces of values between device groups: which part of a rank's tensor a message moves, and where what arrives belongs.

a tensor of 4 rows on this rank      <h:0@0 rows 0-1     <h:0@1 rows 2-3      both into one tensor
its gradient                         >d(h):0@0 rows 0-1  >d(h):0@1 rows 2-3   parts of one tensor
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.execute.context import ProgramContext, Shared
from runtime.mesh.sharding import Block
from runtime.program.program import Message


class Pieces:
    """The pieces that one program moves for one batch shape."""

    def __init__(self, context: ProgramContext, shared: Shared) -> None:
        self._interfaces, self._rank = context.interfaces, context.program.rank
        self._shapes = shared.shapes
        self._keepers: dict[tuple[str, int, tuple[int, ...]], int] = {}
        self._scattered: dict[int, tuple[Tensor, Tensor]] = {}
        """Pieces under way that do not lie in one stretch where they belong, by position: (place, what arrives)."""

    def of(self, message: Message, peer: int) -> Block | None:
        """Return the part of this rank's tensor that a message moves; None if it is all of it."""
        interface = self._interfaces.get(message.value)
        if interface is None:
            return None
        shape, _ = self._shapes[message.microbatch][message.value]
        return interface.piece(shape, self._rank, peer)

    def keeper(self, position: int, message: Message) -> int:
        """Return the position of the first piece of a gradient that a group sends: there all of it is put together."""
        interface = self._interfaces.get(message.value)
        if interface is None:
            return position
        group = next(layout.ranks for layout in interface.others if message.source in layout.ranks)
        return self._keepers.setdefault((message.value, message.microbatch, group), position)

    def receiver(self, position: int, block: Block, whole: Tensor) -> Tensor:
        """Return the memory that the piece at ``position`` is received in: its place in ``whole``, if it is one stretch."""
        place = block.of(whole)
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

    def clear(self) -> None:
        """Drop what a failed step left."""
        self._scattered.clear()
