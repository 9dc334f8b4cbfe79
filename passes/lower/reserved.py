"""Memory that torch's allocator reserves on GPUs beyond a step's tensors: the programs' allocations, replayed.

    program of a rank ─► what each instruction allocates and releases ─► ``runtime.simulate.allocator`` ─► reserved bytes

Replayed are the state, tensor by tensor, and two steps: the first makes the optimizer's state, the second finds memory as
the first left it. Of equal micro-batches only the first few run: as many as are in flight at once, and two more.
The device has its room, less what the process holds beside tensors: where that is full, the allocator gives free segments
back. What libraries take for a time inside of an op (cuDNN's and cuBLAS's workspaces) is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cost_models.cluster import ClusterSpec
from cost_models.memory import OPTIMIZERS, StateBytes, state_bytes
from passes.costs.allocations import RELEASED, Allocations, TensorChange, allocations
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.lower.lower import crossing_values
from passes.lower.mesh_stages import MeshStages
from passes.lower.realize import Realized
from passes.lower.summarize import counted_parameter, ops_by_segment, state_names_of_ranks
from runtime.program.program import (
    Backward,
    BackwardInput,
    Forward,
    Instruction,
    OptimizerStep,
    SegmentGraph,
)
from runtime.simulate.allocator import CachingAllocator, MemoryBlock

STEPS = 2
MORE_MICROBATCHES = 2
"""Micro-batches beyond those in flight: then each finds what one before it has left."""


@dataclass(frozen=True, eq=False)
class RankAllocations:
    """All that a rank allocates. ``state``: by parameter and buffer; ``received_bytes``: values from others, by segment.

    ``room_bytes``: what the device has for all of it.
    """

    instructions: Sequence[Instruction]
    segments: Mapping[int, Allocations]
    state: Mapping[str, StateBytes]
    batch_bytes: int
    received_bytes: Mapping[int, Sequence[int]]
    optimizer: str
    room_bytes: float = math.inf


def reserved(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    job: Job,
    candidate: Candidate,
    realized: Realized,
    stages: MeshStages,
) -> tuple[int, ...]:
    """Return by rank what the allocator reserves beyond the tensors of a realized candidate; 0 on CPUs, and where idle."""
    programs = realized.groups_programs
    of_segments = stages.allocations(candidate, realized.segmentation) or _of_segments(
        graph, costs, realized, job.batch_size // candidate.microbatches
    )
    names = [] if realized.meshes else state_names_of_ranks(graph, realized.segmentation, cluster.world_size)
    known: dict[int, int] = {}
    for leader in sorted({segment.rank for segment in realized.segments.segments}):
        if cluster.devices[leader].kind != "cuda":
            continue
        own = [segment.index for segment in realized.segments.segments if leader in segment.ranks]
        if realized.meshes:
            state = {name: held for index in own for name, held in realized.meshes[index].state.items()}
        else:
            state = {
                name: state_bytes([counted_parameter(graph, job.precision, name)], job.optimizer)
                for name in sorted(names[leader])
            }
        known[leader] = allocator_bytes(
            RankAllocations(
                programs.programs[leader].instructions,
                {index: of_segments[index] for index in own},
                state,
                realized.state[leader].batch,
                received_by(realized.segments, [leader]),
                job.optimizer,
                cluster.devices[leader].room_bytes - sum(realized.simulation.process[leader]),
            )
        )
    return tuple(known.get(leader, 0) for leader in programs.leader_of)


def _of_segments(graph: OpGraph, costs: GraphCosts, realized: Realized, size: int) -> dict[int, Allocations]:
    """Return what each segment on a single rank allocates for a micro-batch."""
    segmentation = realized.segmentation
    index_of = {node.name: index for index, node in enumerate(graph.ops)}
    kept = {*crossing_values(graph, segmentation), *(output.node for output in graph.outputs)}
    return {
        index: allocations(
            graph,
            costs,
            ops.tolist(),
            size,
            kept,
            [[index_of[name] for name in names] for names in segmentation.regions_of(index)],
        )
        for index, ops in enumerate(ops_by_segment(graph, segmentation))
    }


def received_by(segments: SegmentGraph, ranks: Iterable[int]) -> dict[int, list[int]]:
    """Return the bytes of the values that each segment of these ranks gets from other ranks."""
    own = set(ranks)
    found: dict[int, list[int]] = {}
    for value in segments.values:
        if not own.issubset(segments.segments[value.producer].ranks):
            for consumer in value.consumers:
                found.setdefault(consumer, []).append(value.size_bytes)
    return found


def allocator_bytes(rank: RankAllocations) -> int:
    """Return how much more the allocator reserves than the rank's tensors hold at their peak."""
    return _Replay(rank).run()


@dataclass(eq=False)
class _Replay:
    rank: RankAllocations
    allocator: CachingAllocator = field(init=False)
    gradients: dict[str, MemoryBlock] = field(default_factory=dict)
    live: dict[tuple[int, int], dict[int, MemoryBlock]] = field(default_factory=dict)
    """Blocks by slot of each (segment, micro-batch) between its forward and its backward."""

    def __post_init__(self) -> None:
        self.allocator = CachingAllocator(self.rank.room_bytes)

    def run(self) -> int:
        take = self.allocator.allocate
        for own in self.rank.state.values():
            for size in (own.parameters, own.owners):
                if size:
                    take(size)
        if self.rank.batch_bytes:
            take(self.rank.batch_bytes)
        instructions = self._few()
        for step in range(STEPS):
            for instruction in instructions:
                if isinstance(instruction, Forward):
                    self._forward(instruction.segment, instruction.microbatch)
                elif isinstance(instruction, Backward | BackwardInput):
                    self._backward(instruction.segment, instruction.microbatch)
                elif isinstance(instruction, OptimizerStep):
                    self._update(first=step == 0)
            for blocks in self.live.values():  # of segments without a backward
                self._release_all(blocks.values())
            self.live.clear()
        return self.allocator.peak_reserved_bytes - self.allocator.peak_allocated_bytes

    def _few(self) -> list[Instruction]:
        """Return the instructions of the first micro-batches."""
        flying: set[tuple[int, int]] = set()
        most = 0
        for instruction in self.rank.instructions:
            if isinstance(instruction, Forward):
                flying.add((instruction.segment, instruction.microbatch))
                most = max(most, len({microbatch for _, microbatch in flying}))
            elif isinstance(instruction, Backward | BackwardInput):
                flying.discard((instruction.segment, instruction.microbatch))
        limit = most + MORE_MICROBATCHES
        return [i for i in self.rank.instructions if getattr(i, "microbatch", 0) < limit]

    def _forward(self, segment: int, microbatch: int) -> None:
        blocks = self.live[segment, microbatch] = {}
        for number, size in enumerate(self.rank.received_bytes.get(segment, ())):
            blocks[-1 - number] = self.allocator.allocate(size)
        self._change(self.rank.segments[segment].forward, blocks, ())

    def _backward(self, segment: int, microbatch: int) -> None:
        own = self.rank.segments[segment]
        blocks = self.live.pop((segment, microbatch))
        received = [self.allocator.allocate(size) for size in self.rank.received_bytes.get(segment, ())]
        self._change(own.backward, blocks, own.parameters)
        self._release_all([*blocks.values(), *received])

    def _change(
        self, changes: Iterable[TensorChange], blocks: dict[int, MemoryBlock], parameters: Sequence[str]
    ) -> None:
        take, release = self.allocator.allocate, self.allocator.release
        for slot, size in changes:
            if size == RELEASED:
                release(blocks.pop(slot))
            elif slot >= 0:
                blocks[slot] = take(size)
            else:
                self._add(parameters[-1 - slot], take(size), size)

    def _add(self, name: str, made: MemoryBlock, size: int) -> None:
        """Add a gradient to that of earlier micro-batches; the first stays, or is cast to the type of the sums."""
        wanted = self.rank.state[name].gradients
        if name in self.gradients:
            self.allocator.release(made)
        elif wanted > size:
            self.gradients[name] = self.allocator.allocate(wanted)
            self.allocator.release(made)
        else:
            self.gradients[name] = made

    def _update(self, *, first: bool) -> None:
        rule = OPTIMIZERS[self.rank.optimizer]
        trained = [own.trained for own in self.rank.state.values() if own.trained]
        for size in trained if first else ():
            for _ in range(rule.copies):
                self.allocator.allocate(size)
        self._release_all([self.allocator.allocate(size) for size in trained * rule.update_copies])
        self._release_all(self.gradients.values())
        self.gradients.clear()

    def _release_all(self, blocks: Iterable[MemoryBlock]) -> None:
        for block in blocks:
            self.allocator.release(block)
