"""Programs and segments with their ranks renamed: from the devices of a plan to the ranks of a launch.

A plan speaks of the devices of a cluster, numbered in the cluster's order. Processes have ranks of their own: devices
that the plan leaves idle get no process, and a launcher numbers hosts as it likes.

    device_of_rank = (0, 3, 2)           device 1 is idle; rank 1 plays device 3, rank 2 plays device 2

    device 0: 0F0 >h:0@2 <d(h):0@2 0B0   ──►   rank 0: 0F0 >h:0@2 <d(h):0@2 0B0
    device 1:                                  rank 1: +wte@1,2
    device 2: <h:0@0 1F0 1B0 >d(h):0@0         rank 2: <h:0@0 1F0 1B0 >d(h):0@0

Only names change: each rank's order of instructions is its device's, so what was proved of the programs still holds
(and the checker proves it again).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cost_models.errors import InternalError
from runtime.program.program import (
    Instruction,
    PieceBytes,
    Program,
    Recv,
    ReduceGradients,
    SegmentGraph,
    Send,
    group_queue,
    pair_queue,
)


@dataclass(frozen=True)
class RankMap:
    """The device of the plan that each rank plays: ``device_of_rank[r]`` is the device of rank r."""

    device_of_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(set(self.device_of_rank)) != len(self.device_of_rank):
            raise InternalError(
                "give every rank a device", [f"a device stands twice in {self.device_of_rank}"]
            )

    @cached_property
    def rank_of_device(self) -> dict[int, int]:
        """The rank that plays each device; idle devices are not in it."""
        return {device: rank for rank, device in enumerate(self.device_of_rank)}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.device_of_rank)

    def ranks(self, devices: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that play ``devices``, in the same order."""
        return tuple(self.rank_of_device[device] for device in devices)


def relabelled_programs(programs: Sequence[Program], ranks: RankMap) -> tuple[Program, ...]:
    """Return one program per rank: that of the device it plays, with peers and queues renamed."""
    idle = [p for p in programs if p.rank not in ranks.rank_of_device and p.instructions]
    if idle:
        raise InternalError(
            "rename the ranks of a plan's programs",
            [
                f"nobody plays device {p.rank}, whose program has {len(p.instructions)} instructions"
                for p in idle
            ],
        )
    return tuple(
        Program(rank, tuple(_relabelled(i, ranks) for i in programs[device].instructions))
        for rank, device in enumerate(ranks.device_of_rank)
    )


def relabelled_segments(graph: SegmentGraph, ranks: RankMap) -> SegmentGraph:
    """Return the same DAG, each segment on the ranks that play its devices."""
    segments = tuple(
        replace(
            segment,
            ranks=ranks.ranks(segment.ranks),
            collectives=tuple(
                replace(own, groups=tuple(map(ranks.ranks, own.groups))) for own in segment.collectives
            ),
        )
        for segment in graph.segments
    )
    values = tuple(
        replace(
            value,
            pieces=_relabelled_pieces(value.pieces, ranks),
            gradient_pieces=_relabelled_pieces(value.gradient_pieces, ranks),
        )
        for value in graph.values
    )
    return SegmentGraph(segments, values, ranks.world_size)


def _relabelled_pieces(pieces: Sequence[PieceBytes], ranks: RankMap) -> tuple[PieceBytes, ...]:
    rank_of = ranks.rank_of_device
    return tuple(
        PieceBytes(rank_of[piece.source], rank_of[piece.target], piece.size_bytes) for piece in pieces
    )


def _relabelled(instruction: Instruction, ranks: RankMap) -> Instruction:
    rank_of = ranks.rank_of_device
    match instruction:
        case Send(message=message, queue=queue) | Recv(message=message, queue=queue):
            moved = message._replace(source=rank_of[message.source], target=rank_of[message.target])
            old, new = pair_queue(message.source, message.target), pair_queue(moved.source, moved.target)
            return replace(instruction, message=moved, queue=_renamed(queue, old, new))
        case ReduceGradients(ranks=group, queue=queue):
            renamed = tuple(sorted(rank_of[device] for device in group))
            queue = _renamed(queue, group_queue(group), group_queue(renamed))
            return replace(instruction, ranks=renamed, queue=queue)
        case _:
            return instruction


def _renamed(queue: str, old: str, new: str) -> str:
    """Return ``new`` if the queue is called ``old``; refuse a name that would silently keep the devices' numbers."""
    if queue != old:
        raise InternalError("rename the ranks of a queue", [f"it is called {queue}, not {old}"])
    return new
