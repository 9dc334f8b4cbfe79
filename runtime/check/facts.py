"""The places of everything in a set of programs, and the faults that are found there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.check.deadlock import ProgramPlace
from runtime.program.program import (
    Message,
    OptimizerStep,
    Program,
    Recv,
    ReduceGradients,
    SegmentGraph,
    Send,
    TiedGroup,
)


class Fault(NamedTuple):
    """One broken rule. ``hangs``: some rank would wait forever."""

    text: str
    hangs: bool = False


@dataclass
class ProgramFacts:
    """The places of everything in the programs, gathered in one pass."""

    programs: Sequence[Program]
    graph: SegmentGraph
    microbatches: int
    tied: Sequence[TiedGroup]
    training: bool
    optimizer: bool | None
    blocking: bool
    one_queue: bool = False
    computes: dict[tuple[str, int, int], list[ProgramPlace]] = field(default_factory=dict)
    """Places by (F, B, I or W; segment; micro-batch)."""
    sends: dict[Message, list[tuple[ProgramPlace, str]]] = field(default_factory=dict)
    """Places and queues of each message's sends."""
    receives: dict[Message, list[tuple[ProgramPlace, str]]] = field(default_factory=dict)
    reductions: list[tuple[ProgramPlace, ReduceGradients]] = field(default_factory=list)
    steps: list[ProgramPlace] = field(default_factory=list)
    last_backward: dict[int, int] = field(default_factory=dict)
    """Index of each rank's last backward of any kind."""

    def __post_init__(self) -> None:
        for rank, program in enumerate(self.programs):
            for index, instruction in enumerate(program.instructions):
                place = (rank, index)
                if isinstance(instruction, Send):
                    self.sends.setdefault(instruction.message, []).append((place, instruction.queue))
                elif isinstance(instruction, Recv):
                    self.receives.setdefault(instruction.message, []).append((place, instruction.queue))
                elif isinstance(instruction, ReduceGradients):
                    self.reductions.append((place, instruction))
                elif isinstance(instruction, OptimizerStep):
                    self.steps.append(place)
                else:
                    key = (instruction.letter, instruction.segment, instruction.microbatch)
                    self.computes.setdefault(key, []).append(place)
                    if instruction.letter != "F":
                        self.last_backward[rank] = index

    def at(self, kind: str, segment: int, microbatch: int, rank: int) -> int | None:
        """Return the index of a compute on ``rank``; None if it is not there."""
        for place in self.computes.get((kind, segment, microbatch), ()):
            if place[0] == rank:
                return place[1]
        return None

    def gradients_at(self, segment: int, microbatch: int, rank: int) -> int | None:
        """Return the index of the compute that takes and makes gradients between segments: B, or I if split."""
        whole = self.at("B", segment, microbatch, rank)
        return whole if whole is not None else self.at("I", segment, microbatch, rank)

    def text(self, place: ProgramPlace) -> str:
        return f"rank {place[0]}: {self.programs[place[0]].instructions[place[1]]} (instruction {place[1]})"
