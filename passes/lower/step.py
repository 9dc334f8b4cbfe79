"""Segments become a step: one program per group of ranks, and what running them costs. No graph, no search.

The search's candidates, the plan and the executor all come through here: what was predicted is what runs.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from cost_models.cluster import ClusterSpec
from cost_models.conversion import group_links
from cost_models.layout import Mesh
from passes.shard.sent import GradientSum
from runtime.mesh.ranks_along import all_ranks_along
from runtime.program.communicators import process_bytes
from runtime.program.members import GroupPrograms
from runtime.program.order import build_group_programs
from runtime.program.program import (
    Collective,
    ReduceGradients,
    SegmentGraph,
    TiedGroup,
    TransferSeconds,
)
from runtime.schedules import SCHEDULES
from runtime.simulate.flatten import Overheads
from runtime.simulate.simulate import simulate
from runtime.simulate.simulation import Simulation

SumKey: TypeAlias = tuple[tuple[str, ...], tuple[int, ...]]
"""The parameters, and the ranks of one of the groups that sum, ascending."""


class SumCost(NamedTuple):
    """``sent_bytes``: by each rank. Its gradients are made by ``segment``, and are there after the share ``ready`` of its
    backward."""

    seconds: float
    sent_bytes: float
    segment: int = -1
    ready: float = 1.0


@dataclass(frozen=True)
class StepCosts:
    """Costs of a step beside its segments: state held on each rank, optimizer steps, reductions."""

    state_bytes: tuple[int, ...]
    optimizer_seconds: tuple[float, ...]
    update_bytes: tuple[int, ...]
    """Bytes that each rank holds on top while its optimizer steps."""
    tied_bytes: Mapping[str, int]
    """Bytes of each tied parameter's gradient."""
    sums: Mapping[SumKey, SumCost] = field(default_factory=dict)
    """Sums of gradients whose costs are known; others are a ring's all-reduce of ``tied_bytes``."""
    gathers: tuple[Collective, ...] = ()
    """Collectives after the update; their seconds are part of ``optimizer_seconds``."""
    allocator_bytes: tuple[int, ...] = ()
    """Bytes that torch's allocator reserves on each rank beyond its tensors; empty where that was not replayed."""


def programs_for(
    segments: SegmentGraph,
    cluster: ClusterSpec,
    schedule: str,
    microbatches: int,
    tied: Sequence[TiedGroup],
    *,
    left_bytes: Sequence[int] | None = None,
    one_queue: bool = False,
) -> GroupPrograms:
    """One program per group of ranks: the schedule's order of computes, then the one global order of communications.

    ``left_bytes``: what each rank's room leaves beside the state that it holds throughout. Schedules that can hold fewer
    micro-batches in flight then keep within that, as far as they know it.
    ``one_queue``: receives come late enough for devices that have one queue for everything (``order``).
    """
    seconds = transfer_seconds(cluster)
    orders = SCHEDULES[schedule].order(segments, microbatches, left_bytes, transfer_seconds=seconds)
    return build_group_programs(
        segments, orders, microbatches, transfer_seconds=seconds, tied=tied, one_queue=one_queue
    )


def left_beside(state_bytes: Sequence[int], room_bytes: Iterable[int]) -> list[int]:
    """Return what rooms leave beside state, by rank."""
    return [max(0, room - held) for room, held in zip(room_bytes, state_bytes, strict=True)]


def simulate_step(
    programs: GroupPrograms,
    cluster: ClusterSpec,
    step: StepCosts,
    sizes: Sequence[int],
) -> Simulation:
    """One training step of ``programs`` on ``cluster``, with micro-batches of ``sizes`` samples."""

    def cost(reduction: ReduceGradients) -> SumCost:
        known = step.sums.get((reduction.parameters, tuple(sorted(reduction.ranks))))
        if known is not None:
            return known
        size_bytes = sum(step.tied_bytes[name] for name in reduction.parameters)
        ranks = len(reduction.ranks)
        seconds = group_links([reduction.ranks], cluster).seconds("all_reduce", size_bytes)
        return SumCost(seconds, sum_bytes(size_bytes, ranks, reduction.scattered))

    host = cluster.host_costs
    simulation = simulate(
        programs,
        links=cluster,
        contention=cluster.contention({rank for s in programs.graph.segments for rank in s.ranks}),
        overheads=Overheads(host.compute_overhead, host.send_overhead, host.receive_overhead),
        state_bytes=step.state_bytes,
        microbatch_scale=[size / sizes[0] for size in sizes],
        optimizer_seconds=step.optimizer_seconds,
        update_bytes=step.update_bytes,
        process=process_bytes(programs, cluster, step.gathers),
        reduce_seconds=lambda reduction: cost(reduction).seconds,
        reduce_bytes=lambda reduction: cost(reduction).sent_bytes,
        reduce_ready=lambda reduction: (cost(reduction).segment, cost(reduction).ready),
    )
    if any(step.allocator_bytes):
        simulation = simulation.with_allocator(step.allocator_bytes)
    return _with_gathers(simulation, step.gathers, cluster) if step.gathers else simulation


def sum_bytes(size_bytes: float, ranks: int, scattered: bool) -> float:
    """Bytes that each of ``ranks`` sends to sum ``size_bytes`` of gradients round a ring; half where each keeps its part
    only."""
    return (1 if scattered else 2) * (ranks - 1) / ranks * size_bytes


def sums_with_costs(
    segment: int, sums: Iterable[GradientSum], mesh: Mesh
) -> Iterator[tuple[TiedGroup, SumCost]]:
    """Yield every sum of a segment that the ranks of ``mesh`` share, for each group of ranks that makes it."""
    for item in sums:
        for ranks in all_ranks_along(mesh, item.axes):
            sent_bytes = sum_bytes(sum(item.size_bytes), len(ranks), item.scattered)
            group = TiedGroup(item.parameters, ranks, item.scattered)
            yield group, SumCost(item.seconds, sent_bytes, segment, item.ready)


def _with_gathers(simulation: Simulation, gathers: Sequence[Collective], cluster: ClusterSpec) -> Simulation:
    """Their bytes as well, each group's round a ring."""
    pair_bytes = defaultdict(float, simulation.pair_bytes)
    link_bytes = defaultdict(float, simulation.link_bytes)
    for gather in gathers:
        for ranks in gather.groups:
            for source, target in itertools.pairwise((*ranks, ranks[0])):
                pair_bytes[source, target] += gather.sent_bytes
                for link in cluster.path(source, target).links:
                    link_bytes[link] += gather.sent_bytes
    return replace(simulation, pair_bytes=dict(pair_bytes), link_bytes=dict(link_bytes))


def transfer_seconds(cluster: ClusterSpec) -> TransferSeconds:
    """(source rank, target rank, bytes) -> seconds of a message that has its links to itself."""

    def seconds(source: int, target: int, size_bytes: int) -> float:
        return cluster.path(source, target).transfer_seconds(size_bytes)

    return seconds
