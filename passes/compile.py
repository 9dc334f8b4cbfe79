"""The compile, on one page: a model's graph and a cluster become a placement, and a placement becomes programs.

    trace ─► costs ─► place ─► bridge ─► segment ─► summarize ─► schedule ─► order ─► check ─► simulate

Each line of :func:`compile_graph` is one pass. Everything from the placement on is in :func:`realize`, which the search
also runs for every candidate it simulates, and :func:`programs_for`, which the executor runs from a saved plan: what was
predicted is what runs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cost_models.cluster import ClusterSpec
from cost_models.communication import ring_all_reduce_seconds, slowest_hop
from cost_models.compute import optimizer_seconds
from cost_models.layout import Layout
from cost_models.memory import StateBytes
from passes.bridge import Bridge, bridges
from passes.cheap import recomputed_ops
from passes.costs import GraphCosts, cost_graph
from passes.graph import OpGraph
from passes.place_layers import LayerCandidate, LayerRequest, LayerResult, SimulatedCandidate, place_layers
from passes.segment import Segmentation, by_stage
from passes.summarize import TiedGroup, segment_graph, state_of_ranks, tied_groups, trained_tensors
from passes.verify_graph import verify_graph
from runtime.check import Proof, check
from runtime.collector import collector_paused
from runtime.microbatch import microbatch_sizes
from runtime.order import build_programs, quick_makespan
from runtime.program import Program, ReduceGradients, SegmentGraph
from runtime.schedules import SCHEDULES, TransferSeconds
from runtime.simulate import Overheads, Simulation, simulate

log = logging.getLogger("partitioner")


@dataclass(frozen=True)
class StepCosts:
    """What a step costs beside its segments: state held on each rank, optimizer steps, reductions."""

    state_bytes: tuple[int, ...]
    optimizer_seconds: tuple[float, ...]
    tied_bytes: Mapping[str, int]
    """Bytes of each tied parameter's gradient."""


@dataclass(frozen=True)
class Realized:
    """A placement carried through to programs and their simulation."""

    segmentation: Segmentation
    segments: SegmentGraph
    tied: tuple[TiedGroup, ...]
    programs: tuple[Program, ...]
    state: tuple[StateBytes, ...]
    step: StepCosts
    simulation: Simulation


@dataclass(frozen=True)
class Compiled:
    """The outcome of a compile: the chosen placement, everything made of it, and how it was found."""

    costs: GraphCosts
    placement: LayerCandidate
    layouts: dict[str, Layout]
    bridges: tuple[Bridge, ...]
    realized: Realized
    proof: Proof
    search: LayerResult


@collector_paused()
def compile_graph(graph: OpGraph, cluster: ClusterSpec, request: LayerRequest) -> Compiled:
    """Choose a layer-wise placement of ``graph`` on ``cluster``, build its programs and prove them free of deadlock."""
    verify_graph(graph, after="trace")
    costs = costs_of(graph, cluster)
    recomputed = recomputed_ops(graph)

    best = _Best(cluster)

    def simulated(candidate: LayerCandidate) -> SimulatedCandidate:
        result = realize(graph, costs, cluster, candidate, request, recomputed)
        best.offer(candidate, result)
        return SimulatedCandidate(candidate, result.simulation.step_seconds, result.simulation.peak_bytes)

    def lower_bound(candidate: LayerCandidate) -> float:
        return quick_seconds(graph, costs, cluster, candidate, request, recomputed)

    search = place_layers(graph, costs, cluster, request, simulated, lower_bound)
    placement = search.best.candidate
    layouts = {name: Layout.on(placement.ranks[stage]) for name, stage in placement.stage_of.items()}
    bridged = bridges(graph, layouts)
    realized = best.of(placement) or realize(graph, costs, cluster, placement, request, recomputed)
    proof = check(
        realized.programs,
        realized.segments,
        placement.microbatches,
        tied=[(t.parameters, t.ranks) for t in realized.tied],
    )
    log.info(
        "compiled: %d stages, %s, %d micro-batches",
        len(placement.ranks),
        placement.schedule,
        placement.microbatches,
    )
    return Compiled(costs, placement, layouts, bridged, realized, proof, search)


class _Best:
    """The fastest candidate so far that fits, carried through: the search will most likely choose it."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self._memory_bytes = [device.memory_bytes for device in cluster.devices]
        self._kept: tuple[LayerCandidate, Realized] | None = None

    def offer(self, candidate: LayerCandidate, realized: Realized) -> None:
        simulation = realized.simulation
        if any(a > b for a, b in zip(simulation.peak_bytes, self._memory_bytes, strict=True)):
            return
        if self._kept is None or simulation.step_seconds < self._kept[1].simulation.step_seconds:
            self._kept = candidate, realized

    def of(self, candidate: LayerCandidate) -> Realized | None:
        """What the candidate became, if it is still kept."""
        return self._kept[1] if self._kept is not None and self._kept[0] is candidate else None


def costs_of(graph: OpGraph, cluster: ClusterSpec) -> GraphCosts:
    """The graph's costs on devices of the cluster's kind; computed once per graph."""
    key = ("costs", cluster.devices[0].kind)
    if key not in graph.memo:
        graph.memo[key] = cost_graph(graph, device_kind=cluster.devices[0].kind)
    costs = graph.memo[key]
    assert isinstance(costs, GraphCosts)
    return costs


def realize(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    placement: LayerCandidate,
    request: LayerRequest,
    recomputed: frozenset[str],
) -> Realized:
    """Carry a placement through segments, schedule, order and simulation."""
    segmentation = by_stage(graph, placement.stage_of, placement.ranks, recomputed)
    sizes = microbatch_sizes(request.batch_size, placement.microbatches)
    segments = segment_graph(graph, costs, segmentation, cluster, sizes[0])
    tied = tied_groups(graph, segmentation)
    state = state_of_ranks(graph, segmentation, cluster.world_size, request.optimizer, master=request.master)
    step = StepCosts(
        state_bytes=tuple(s.total for s in state),
        optimizer_seconds=tuple(
            optimizer_seconds(held, device, request.optimizer, tensors)
            for held, device, tensors in zip(
                state, cluster.devices, trained_tensors(graph, segmentation, cluster.world_size), strict=True
            )
        ),
        tied_bytes={name: graph.parameters[name].size_bytes for group in tied for name in group.parameters},
    )
    programs = programs_for(segments, cluster, placement.schedule, placement.microbatches, tied)
    simulation = simulate_step(programs, segments, cluster, step, sizes)
    return Realized(segmentation, segments, tied, programs, state, step, simulation)


def quick_seconds(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    placement: LayerCandidate,
    request: LayerRequest,
    recomputed: frozenset[str],
) -> float:
    """What ``realize`` cannot simulate below: no shared links, no queues, no optimizer. 20 times as fast.

    0 where micro-batches differ in size.
    """
    sizes = microbatch_sizes(request.batch_size, placement.microbatches)
    if sizes[0] != sizes[-1]:
        return 0.0
    segmentation = by_stage(graph, placement.stage_of, placement.ranks, recomputed)
    segments = segment_graph(graph, costs, segmentation, cluster, sizes[0])
    seconds = _transfer_seconds(cluster)
    orders = SCHEDULES[placement.schedule].order(segments, placement.microbatches, transfer_seconds=seconds)
    return quick_makespan(segments, orders, placement.microbatches, seconds)


def _transfer_seconds(cluster: ClusterSpec) -> TransferSeconds:
    def transfer_seconds(source: int, target: int, size_bytes: int) -> float:
        return cluster.path(source, target).transfer_seconds(size_bytes)

    return transfer_seconds


def programs_for(
    segments: SegmentGraph, cluster: ClusterSpec, schedule: str, microbatches: int, tied: Sequence[TiedGroup]
) -> tuple[Program, ...]:
    """One program per rank: the schedule's order of computes, then the one global order of communications."""

    transfer_seconds = _transfer_seconds(cluster)
    orders = SCHEDULES[schedule].order(segments, microbatches, transfer_seconds=transfer_seconds)
    return build_programs(
        segments,
        orders,
        microbatches,
        transfer_seconds=transfer_seconds,
        tied=[(group.parameters, group.ranks) for group in tied],
    )


def simulate_step(
    programs: Sequence[Program],
    segments: SegmentGraph,
    cluster: ClusterSpec,
    step: StepCosts,
    sizes: Sequence[int],
) -> Simulation:
    """One training step of ``programs`` on ``cluster``, with micro-batches of ``sizes`` samples."""

    def reduce_seconds(reduction: ReduceGradients) -> float:
        size_bytes = sum(step.tied_bytes[name] for name in reduction.parameters)
        hop = slowest_hop([list(reduction.ranks)], cluster)
        return ring_all_reduce_seconds(size_bytes, len(reduction.ranks), hop)

    return simulate(
        programs,
        segments,
        links=cluster,
        contention=cluster.host_costs.contention,
        overheads=Overheads(
            cluster.host_costs.compute_overhead,
            cluster.host_costs.send_overhead,
            cluster.host_costs.receive_overhead,
        ),
        state_bytes=step.state_bytes,
        microbatch_scale=[size / sizes[0] for size in sizes],
        optimizer_seconds=step.optimizer_seconds,
        reduce_seconds=reduce_seconds,
    )
