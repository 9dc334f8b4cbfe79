"""The programs of device groups, and that of each of their ranks.

A group has one program, which its first rank, the leader, stands for. Leaders exchange *bundles* there: all pieces of a
value of one micro-batch on their way from one group to another. Each rank of the group runs the same program with its
own part of it:

    group (0, 1)    0F0 >h:0@2             rank 0    0F0 >h:0@2           rank 1    0F0 >h:0@2 >h:0@3
    group (2, 3)    <h:0@0 1F0             rank 2    <h:0@0 <h:0@1 1F0    rank 3    <h:0@1 1F0

    compute, step      everybody's
    bundle             the pieces that the rank sends or receives, by (target, source); none where it has none
    sum of gradients   that of the ranks it names

So a step of many ranks is as many programs as it has groups, and those of a few ranks are made when they are wanted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from runtime.program.crossings import bundles_of_pieces
from runtime.program.program import (
    Instruction,
    Program,
    Recv,
    ReduceGradients,
    SegmentGraph,
    Send,
    pair_queue,
)


@dataclass(frozen=True)
class GroupPrograms:
    """The programs of a step by device group. ``graph`` is that of the ranks."""

    graph: SegmentGraph
    leader_of: tuple[int, ...]
    programs: tuple[Program, ...]
    """The programs of the leaders, each at its rank's number; ranks that follow one have empty programs."""

    def member(self, rank: int) -> Program:
        """Return the program of one rank."""
        group = self.programs[self.leader_of[rank]]
        if self._nobody_shares:
            return group
        own, instructions = self._peers[rank], list[Instruction]()
        for instruction in group.instructions:
            if isinstance(instruction, Send):
                message = instruction.message
                for target in own.get((message.value, message.gradient, message.target), ()):
                    piece = message._replace(source=rank, target=target)
                    instructions.append(Send(piece, pair_queue(rank, target)))
            elif isinstance(instruction, Recv):
                message = instruction.message
                for source in own.get((message.value, message.gradient, message.source), ()):
                    piece = message._replace(source=source, target=rank)
                    instructions.append(Recv(piece, pair_queue(source, rank)))
            elif not isinstance(instruction, ReduceGradients) or rank in instruction.ranks:
                instructions.append(instruction)
        return Program(rank, tuple(instructions))

    def all(self) -> tuple[Program, ...]:
        """Return the program of every rank of the world."""
        return tuple(self.member(rank) for rank in range(len(self.leader_of)))

    @cached_property
    def _nobody_shares(self) -> bool:
        return all(len(segment.ranks) == 1 for segment in self.graph.segments)

    @cached_property
    def _peers(self) -> defaultdict[int, dict[tuple[str, bool, int], list[int]]]:
        """The ranks that each rank exchanges pieces with, by value, gradient or not, and leader of the other group."""
        found: defaultdict[int, dict[tuple[str, bool, int], list[int]]] = defaultdict(dict)
        for (value, gradient, sender, receiver), pieces in bundles_of_pieces(self.graph):
            for source, target, _ in pieces:
                found[source].setdefault((value, gradient, receiver), []).append(target)
                found[target].setdefault((value, gradient, sender), []).append(source)
        return found
