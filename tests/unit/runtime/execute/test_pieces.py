"""Pieces that arrive on a rank: each in its place, parts of a sum added in the order of their ranks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cost_models.layout import Layout, Mesh, Placement, Replicate, Shard
from runtime.execute.pieces import MovedPieces
from runtime.program.program import Message, Program, Recv, pair_queue
from runtime.segment.code import Interface

PARTS = {2: 1e16, 3: 1.0, 4: -1e16}
"""By rank; in another order they have another sum."""


def layout(ranks: tuple[int, ...], placement: Placement) -> Layout:
    return Layout(Mesh(ranks, (len(ranks),), ("all",)), (placement,))


def pieces_of(interface: Interface, sources: tuple[int, ...]) -> tuple[MovedPieces, list[Message]]:
    """Those of rank 0, which has rows 0-1 of a value of four and receives its gradient from ``sources`` in turn."""
    messages = [Message("h", 0, True, source, 0) for source in sources]
    program = Program(0, tuple(Recv(m, pair_queue(0, m.source)) for m in messages))
    context: Any = SimpleNamespace(interfaces={"h": interface}, program=program)
    shared: Any = SimpleNamespace(shapes=[{"h": ((2, 1), torch.float64)}])
    return MovedPieces(context, shared), messages


def received(interface: Interface, sources: tuple[int, ...], arrive: tuple[int, ...]) -> torch.Tensor:
    """Post receives from ``sources`` in turn; what is sent arrives in another order."""
    pieces, messages = pieces_of(interface, sources)
    whole = torch.full((2, 1), float("nan"), dtype=torch.float64)
    buffers = {}
    for position, message in enumerate(messages):
        block = pieces.of(message, message.source)
        assert block is not None
        buffers[message.source] = position, pieces.receiver(position, message, block, whole)
    for source in arrive:
        position, buffer = buffers[source]
        buffer.fill_(PARTS[source])
        pieces.put(position)
    pieces.add(pieces.keeper(0, messages[0]))
    return whole


@pytest.mark.parametrize("sources", itertools.permutations(PARTS))
def test_parts_of_a_sum_are_added_in_the_order_of_their_ranks(sources: tuple[int, ...]) -> None:
    interface = Interface(layout((0, 1), Shard(0)), (layout((2, 3, 4), Replicate()),))
    for arrive in itertools.permutations(PARTS):
        assert received(interface, sources, arrive).tolist() == [[PARTS[2] + PARTS[3] + PARTS[4]]] * 2


def test_parts_of_a_tensor_are_put_beside_each_other() -> None:
    interface = Interface(layout((0,), Shard(0)), (layout((2, 3), Shard(0)),))
    assert received(interface, (2, 3), (3, 2)).tolist() == [[PARTS[2]], [PARTS[3]]]
