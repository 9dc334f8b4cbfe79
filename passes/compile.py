"""The compile, on one page: a model's graph and a cluster become a placement, and a placement becomes programs.

    trace ─► costs ─► place ─► bridge ─► segment ─► summarize ─► schedule ─► order ─► check ─► simulate     layer
    trace ─► costs ─► place ─► shard (bridges) ─► one segment ─► summarize ─► order ─► check ─► simulate    feature
    trace ─► split ─► costs ─► place ─► bridge ─► segment ─► summarize ─► schedule ─► order ─► check ─► simulate  free

Each line of :func:`compile_graph` is one pass. A request's type says which strategy places.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from cost_models.layout import Layout
from cost_models.units import format_bytes
from passes.costs.costs import GraphCosts, costs_of
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.graph.verify import verify_graph
from passes.lower.bridge import bridges
from passes.lower.realize_features import SCHEDULE, realize_features
from passes.search.candidates import Candidates
from passes.search.feature.place import FeatureRequest, FeatureResult, place_features
from passes.search.free.place import FreeRequest
from passes.search.free.rounds import place_rounds
from passes.search.free.variants import TimeBudget, layer_start
from passes.search.layer.place import LayerRequest, place_layers
from passes.search.placed import Placed, Realized
from passes.shard.discover import Discovery
from passes.shard.shard import shard_graph
from runtime.check.check import Proof, check
from runtime.collector import collector_paused

log = logging.getLogger("partitioner")

Request = LayerRequest | FeatureRequest | FreeRequest

SEARCHES = 4
"""How often shardings are searched for, each time with less memory, until the simulated step fits as well."""

LEAST_RESERVE = 0.01
"""The share of a device's memory by which it is lessened at least."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """The outcome of a compile."""

    costs: GraphCosts
    placed: Placed
    proof: Proof


@collector_paused()
def compile_graph(graph: OpGraph, cluster: ClusterSpec, request: Request) -> Compiled:
    """Choose a placement of ``graph`` on ``cluster``, build its programs and prove them free of deadlock."""
    verify_graph(graph, after="trace")
    costs = costs_of(graph, cluster)
    if isinstance(request, FeatureRequest):
        placed = feature_wise(graph, costs, cluster, request)
    elif isinstance(request, FreeRequest):
        placed = free(graph, costs, cluster, request)
    else:
        placed = layer_wise(graph, costs, cluster, request)
    realized = placed.realized
    proof = check(realized.programs, realized.segments, placed.microbatches, tied=realized.tied)
    log.info("compiled: %s", placed.description)
    return Compiled(costs, placed, proof)


def layer_wise(graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, request: LayerRequest) -> Placed:
    """Every op on one device, every device one contiguous run of the graph; candidates are simulated."""
    recomputed = recomputed_ops(graph)
    candidates = Candidates(graph, costs, cluster, request, recomputed)
    search = place_layers(graph, costs, cluster, request, candidates.simulate, candidates.lower_bound_seconds)
    chosen = search.best.candidate
    layouts = {name: Layout.on(chosen.ranks[stage]) for name, stage in chosen.stage_of.items()}
    return Placed(
        strategy="layer",
        stage_of=chosen.stage_of,
        groups=tuple((rank,) for rank in chosen.ranks),
        microbatches=chosen.microbatches,
        schedule=chosen.schedule,
        recomputed=recomputed,
        recomputed_blocks=tuple(map(tuple, chosen.recomputed_blocks)),
        bridges=bridges(graph, layouts),
        realized=candidates.realized(chosen),
        certificate=search.certificate,
        runner_ups=search.runner_ups,
        search=search,
        graph=graph,
        description=chosen.description,
    )


def free(graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, request: FreeRequest) -> Placed:
    """Any op, or block of its neurons, on any device; in simulation never slower than the layer-wise plan."""
    budget = TimeBudget.of(request)
    # With all of the time, as layer-wise planning would have it: with less, the plan may be worse than layer-wise.
    start = layer_start(graph, request, lambda layers: layer_wise(graph, costs, cluster, layers))
    return place_rounds(graph, costs, cluster, request, start, budget)


def feature_wise(graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, request: FeatureRequest) -> Placed:
    """Every op on all devices, tensors sharded over a mesh of them, such that the simulated step fits too."""
    excess = 0.0
    for _ in range(SEARCHES):
        placed = _sharded(graph, costs, cluster, request)
        excess = _excess_bytes(placed.realized, cluster)
        if excess <= 0:
            return placed
        log.info("the simulated step exceeds a device by %s: searching again", format_bytes(int(excess)))
        smallest = min(device.memory_bytes for device in cluster.devices)
        assert isinstance(placed.search, FeatureResult)
        unseen = smallest + excess - placed.search.cost.memory_bytes  # by the search, of what is simulated
        more = request.reserved_bytes + LEAST_RESERVE * smallest
        request = replace(request, reserved_bytes=max(more, unseen))
    raise InfeasibleError(
        f"no sharding of {graph.model_name} was found whose simulated step fits {cluster.name}",
        [f"the last of {SEARCHES} searches exceeds a device by {format_bytes(int(excess))}"],
        ["a smaller batch, more devices, an optimizer with less state, or the layer-wise strategy"],
    )


def _excess_bytes(realized: Realized, cluster: ClusterSpec) -> float:
    """By how much the simulated peak exceeds a device's memory; 0 or less where it fits."""
    peaks = realized.simulation.peak_bytes
    return max(peak - device.memory_bytes for peak, device in zip(peaks, cluster.devices, strict=True))


def _sharded(graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, request: FeatureRequest) -> Placed:
    search = place_features(graph, costs, cluster, request, Discovery.stored())
    sharded = shard_graph(graph, search.placement)
    verify_graph(sharded.graph, after="shard")
    mesh = sharded.mesh
    return Placed(
        strategy="feature",
        stage_of={node.name: 0 for node in graph.ops},
        groups=(mesh.ranks,),
        microbatches=search.placement.microbatches,
        schedule=SCHEDULE,
        recomputed=frozenset(),
        recomputed_blocks=(),
        bridges=(),
        realized=realize_features(graph, sharded, cluster, request),
        certificate=search.certificate,
        runner_ups=(),
        search=search,
        graph=graph,
        sharded=sharded,
        description=f"mesh {'×'.join(map(str, mesh.shape))}, {search.placement.microbatches} micro-batches",
    )
