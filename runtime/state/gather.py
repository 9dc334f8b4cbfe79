"""The whole model's state on rank 0, tensor by tensor, under the names of ``model.state_dict()``.

    StateEntry  key of the state dict → canonical name, stored dtype, full shape
    HeldPiece   the block of a named tensor that a rank has: the whole of it, a part, or of a sharded one what it trains

Each block comes from the first rank that has it, and they are put together here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cost_models.errors import InternalError
from runtime.mesh.sharding import Block
from runtime.ranks.side_group import SideGroup
from runtime.state.rank_state import RankState
from runtime.state.state_view import StateView


@dataclass(frozen=True)
class StateEntry:
    """One key of ``model.state_dict()``. Keys of tied tensors share their canonical ``name``.

    ``shape``: of the tensor called ``name``, of which the key may be a ``view`` only.
    """

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    view: StateView | None = None

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape under this key."""
        return self.shape if self.view is None else self.view.shape


@dataclass(frozen=True)
class HeldPiece:
    """The block of a tensor that ``rank`` speaks for, as ``name``."""

    rank: int
    name: str
    block: Block


def pieces_of(state: RankState, name: str, shape: tuple[int, ...]) -> tuple[HeldPiece, ...]:
    """Return the blocks that make up the tensor called ``name``, and who has them; the same on every rank."""
    sharding = state.shardings.get(name) or state.elsewhere.get(name)
    if sharding is not None:
        speakers = (rank for rank in sharding.mesh.ranks if sharding.speaks(rank))
        return tuple(HeldPiece(rank, name, sharding.owner_block(shape, rank)) for rank in speakers)
    names = state.names_of(name)
    if names == (name,):
        return (HeldPiece(state.holders[name][0], name, Block((0,) * len(shape), shape)),)
    found = [HeldPiece(state.holders[n][0], n, state.parts[n].block) for n in names]
    if sum(math.prod(piece.block.shape) for piece in found) != math.prod(shape):
        raise InternalError(f"the parts of {name} are not the whole of it", [f"{p.name}: {p}" for p in found])
    return tuple(found)


def gather_state(
    order: Sequence[str],
    entries: Mapping[str, StateEntry],
    others: Mapping[str, Any],
    state: RankState,
    side: SideGroup,
) -> dict[str, Any]:
    """Gather ``model.state_dict()`` on rank 0's CPU, with its keys in ``order``; an empty dict elsewhere. Collective.

    ``others``: entries that are no tensors of the model (a module's extra state), by key. A sender holds one tensor
    more than usual at a time.
    """
    result: dict[str, Any] = {}
    gathered: dict[str, Tensor] = {}
    ahead_bytes = 0
    for key in order:
        if key in others:
            result[key] = others[key]
            continue
        entry = entries[key]
        if entry.name not in gathered:
            gathered[entry.name] = full = _gathered(entry, state, side, ahead_bytes)
            ahead_bytes += full.numel() * full.itemsize
        full = gathered[entry.name]
        result[key] = full if entry.view is None else entry.view.of(full)
    return result if side.rank == 0 else {}


def _gathered(entry: StateEntry, state: RankState, side: SideGroup, ahead_bytes: int) -> Tensor:
    """Return the tensor of one entry: full on rank 0, on the meta device elsewhere."""
    pieces = pieces_of(state, entry.name, entry.shape)
    full = torch.empty(entry.shape, dtype=entry.dtype, device="cpu" if side.rank == 0 else "meta")
    for piece in pieces:
        block = piece.block.of(full)
        if piece.rank == side.rank:
            own = state.own(piece.name).detach()
            if side.rank == 0:
                block.copy_(own)
            else:
                side.send(own.to("cpu", entry.dtype).contiguous(), 0, ahead_bytes=ahead_bytes)
        elif side.rank == 0:
            received = block if block.is_contiguous() else torch.empty(piece.block.shape, dtype=entry.dtype)
            side.receive(received, piece.rank)
            if received is not block:
                block.copy_(received)
    return full
