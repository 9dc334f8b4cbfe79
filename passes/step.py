"""From segments to a step: one program per rank, and what running them costs. No graph, no search.

The search's candidates, the plan and the executor all come through here: what was predicted is what runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cost_models.cluster import ClusterSpec
from cost_models.communication import ring_all_reduce_seconds, slowest_hop
from passes.summarize import TiedGroup
from runtime.order import build_programs
from runtime.program import Program, ReduceGradients, SegmentGraph
from runtime.schedules import SCHEDULES, TransferSeconds
from runtime.simulate import Overheads, Simulation, simulate


@dataclass(frozen=True)
class StepCosts:
    """What a step costs beside its segments: state held on each rank, optimizer steps, reductions."""

    state_bytes: tuple[int, ...]
    optimizer_seconds: tuple[float, ...]
    tied_bytes: Mapping[str, int]
    """Bytes of each tied parameter's gradient."""
    sum_seconds: Mapping[tuple[str, ...], float] = field(default_factory=dict)
    """Of sums of gradients whose time is known, by their parameters; of others a ring's."""


def programs_for(
    segments: SegmentGraph, cluster: ClusterSpec, schedule: str, microbatches: int, tied: Sequence[TiedGroup]
) -> tuple[Program, ...]:
    """One program per rank: the schedule's order of computes, then the one global order of communications."""
    seconds = transfer_seconds(cluster)
    orders = SCHEDULES[schedule].order(segments, microbatches, transfer_seconds=seconds)
    groups = [group.as_tuple for group in tied]
    return build_programs(segments, orders, microbatches, transfer_seconds=seconds, tied=groups)


def simulate_step(
    programs: Sequence[Program],
    segments: SegmentGraph,
    cluster: ClusterSpec,
    step: StepCosts,
    sizes: Sequence[int],
) -> Simulation:
    """One training step of ``programs`` on ``cluster``, with micro-batches of ``sizes`` samples."""

    def reduce_seconds(reduction: ReduceGradients) -> float:
        known = step.sum_seconds.get(reduction.parameters)
        if known is not None:
            return known
        size_bytes = sum(step.tied_bytes[name] for name in reduction.parameters)
        hop = slowest_hop([list(reduction.ranks)], cluster)
        return ring_all_reduce_seconds(size_bytes, len(reduction.ranks), hop)

    host = cluster.host_costs
    return simulate(
        programs,
        segments,
        links=cluster,
        contention=host.contention,
        overheads=Overheads(host.compute_overhead, host.send_overhead, host.receive_overhead),
        state_bytes=step.state_bytes,
        microbatch_scale=[size / sizes[0] for size in sizes],
        optimizer_seconds=step.optimizer_seconds,
        reduce_seconds=reduce_seconds,
    )


def transfer_seconds(cluster: ClusterSpec) -> TransferSeconds:
    """(source rank, target rank, bytes) -> seconds of a message that has its links to itself."""

    def seconds(source: int, target: int, size_bytes: int) -> float:
        return cluster.path(source, target).transfer_seconds(size_bytes)

    return seconds
