"""Schedules: the rank that runs each stage, the order in which it does, and what it holds meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from cost_models.errors import UsageError
from runtime.program.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    ComputeOrder,
    Forward,
    Letter,
    SegmentGraph,
    TransferSeconds,
)
from runtime.schedules.held import ComputeStep, Moment, chunk_corners, fullest_moments

INSTRUCTION: dict[Letter, type[Compute]] = {
    made.letter: made for made in (Forward, Backward, BackwardInput, BackwardWeight)
}


@dataclass(frozen=True)
class Schedule:
    """A way to order the segments of all ranks over the micro-batches of a step."""

    name: str
    title: str
    source: str
    """Publication that it comes from."""
    splits_backward: bool = False
    """True if backwards come in halves (``BackwardInput``, ``BackwardWeight``)."""
    chunks: int | None = 1
    """Stages per rank; None if any number from ``minimum_chunks`` up."""
    minimum_chunks: int = 1
    folded: bool = False
    """True if stages are placed as a V (down the ranks and up again) and not round and round."""

    def stage_ranks(self, stages: int, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the rank of each stage, in stage order."""
        return tuple(ranks[position] for position in self.positions(stages, len(ranks)))

    def positions(self, stages: int, ranks: int) -> tuple[int, ...]:
        """Return the place in the pipeline (0 .. ranks-1) that runs each stage."""
        if not self.folded:
            return tuple(stage % ranks for stage in range(stages))
        turns = (divmod(stage, ranks) for stage in range(stages))
        return tuple(place if turn % 2 == 0 else ranks - 1 - place for turn, place in turns)

    def stages_at(self, position: int, stages: int, ranks: int) -> tuple[int, ...]:
        """Return the stages that a place in the pipeline runs: element c is its chunk c."""
        return tuple(s for s, place in enumerate(self.positions(stages, ranks)) if place == position)

    def check(self, stages: int, ranks: int, microbatches: int) -> str | None:
        """Tell why the schedule cannot be used; None if it can."""
        if ranks < 1 or microbatches < 1:
            return f"{self.name} needs at least one rank and one micro-batch, not {ranks} and {microbatches}"
        if self.chunks is not None and stages != self.chunks * ranks:
            need = f"{self.chunks} × {ranks} = {self.chunks * ranks}" if self.chunks > 1 else str(ranks)
            return f"{self.name} on {ranks} ranks needs {need} stages, not {stages}"
        if self.chunks is None and (stages % ranks or stages < self.minimum_chunks * ranks):
            least = f"a multiple of {ranks}, {self.minimum_chunks * ranks} or more"
            return f"{self.name} on {ranks} ranks needs {least} stages, not {stages}"
        return None

    def in_flight(self, position: int, ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
        """Return, for each chunk of the rank, the most micro-batches at once whose forward is done and backward is not.

        A split backward is done with its weight half. Exact for each chunk; but chunks need not peak together,
        and a micro-batch that waits for its weight half holds less. ``moments`` has both.
        """
        corners = self.corners(position, ranks, chunks, microbatches)
        return tuple(max(map(sum, points), default=0) for points in corners)

    def moments(self, position: int, ranks: int, chunks: int, microbatches: int) -> tuple[Moment, ...]:
        """Return the moments at which the rank may hold the most; ``peak_bytes`` turns them into bytes. Exact."""
        return fullest_moments(self.steps(position, ranks, chunks, microbatches), chunks)

    def corners(
        self, position: int, ranks: int, chunks: int, microbatches: int
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return, for each chunk of the rank alone, the (whole, weights left) at which it may hold the most."""
        return _corners(self, position, ranks, chunks, self.settled(ranks, microbatches))

    def settled(self, ranks: int, microbatches: int) -> int:
        """Return a number of micro-batches, as small as is known, with which every rank holds as many at once."""
        return microbatches

    def steps(self, position: int, ranks: int, chunks: int, microbatches: int) -> Sequence[ComputeStep]:
        """Return what the rank at ``position`` does, in order, on a chain of equal stages."""
        raise NotImplementedError

    def order(
        self,
        graph: SegmentGraph,
        microbatches: int,
        memory_bytes: Sequence[int] | None = None,
        transfer_seconds: TransferSeconds | None = None,
    ) -> ComputeOrder:
        """Return each rank's compute instructions in order; ranks without segments get none.

        memory_bytes      bytes that each rank may hold in saved activations. Only ``list`` bends to it; what a
                          published order holds is fixed (``moments``).
        transfer_seconds  time of a message between two ranks. Only ``list`` looks at times at all.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class PipelineSchedule(Schedule):
    """A published order: what a rank does follows from its place in the pipeline, not from any times."""

    generate: Callable[[int, int, int, int], list[ComputeStep]] = (
        lambda position, ranks, chunks, microbatches: []
    )
    """Function from (position, ranks, chunks, microbatches) to the steps of that rank."""
    settles: Literal["never", "always", "in groups"] = "never"
    """Cases in which more than 2p micro-batches only repeat what p ranks do; "in groups": p divides their number."""

    def settled(self, ranks: int, microbatches: int) -> int:
        repeats = self.settles == "always" or (self.settles == "in groups" and microbatches % ranks == 0)
        return min(microbatches, 2 * ranks) if repeats else microbatches

    def steps(self, position: int, ranks: int, chunks: int, microbatches: int) -> Sequence[ComputeStep]:
        return self.generate(position, ranks, chunks, microbatches)

    def order(
        self,
        graph: SegmentGraph,
        microbatches: int,
        memory_bytes: Sequence[int] | None = None,
        transfer_seconds: TransferSeconds | None = None,
    ) -> ComputeOrder:
        groups = list(dict.fromkeys(segment.ranks for segment in graph.segments))
        self._check_placement(graph, groups, microbatches)
        ranks, stages = len(groups), len(graph.segments)
        orders: list[tuple[Compute, ...]] = [()] * graph.world_size
        for position, group in enumerate(groups):
            own = self.stages_at(position, stages, ranks)
            backward = [graph.segments[stage].has_backward for stage in own]
            instructions = tuple(
                INSTRUCTION[kind](own[chunk], microbatch)
                for kind, chunk, microbatch in self.steps(position, ranks, len(own), microbatches)
                if kind == "F" or backward[chunk]
            )
            for rank in group:
                orders[rank] = instructions
        return tuple(orders)

    def _check_placement(
        self, graph: SegmentGraph, groups: Sequence[tuple[int, ...]], microbatches: int
    ) -> None:
        problems = []
        reason = self.check(len(graph.segments), len(groups), microbatches)
        if reason:
            problems.append(reason)
        members = Counter(rank for group in groups for rank in group)
        shared = sorted(rank for rank, count in members.items() if count > 1)
        if shared:
            problems.append(f"ranks {shared} belong to more than one device group")
        if not problems:
            places = self.positions(len(graph.segments), len(groups))
            problems += [
                f"stage {segment.index} is on ranks {segment.ranks}, {self.name} wants it on {groups[place]}"
                for segment, place in zip(graph.segments, places, strict=True)
                if segment.ranks != groups[place]
            ]
        if problems:
            raise UsageError(
                f"schedule {self.name} cannot order these stages",
                problems,
                ["schedule 'list' takes any placement", "place the stages as schedule.stage_ranks says"],
            )


@lru_cache(maxsize=65536)
def _corners(
    schedule: Schedule, position: int, ranks: int, chunks: int, microbatches: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    return chunk_corners(schedule.steps(position, ranks, chunks, microbatches), chunks)
