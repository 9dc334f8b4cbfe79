"""What the same step costs without partitioning: on one device, and with plain data parallelism.

Simulated with the same costs as the plan, so the comparison is fair; an expert looks here first.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.cluster import ClusterSpec
from cost_models.communication import data_parallel_seconds

from cost_models.compute import optimizer_seconds
from passes.costs import GraphCosts
from passes.graph import OpGraph
from passes.place_layers import LayerRequest
from passes.segment import Segmentation
from passes.summarize import segment_graph, state_of_ranks

MAX_MICROBATCHES = 1024


@dataclass(frozen=True)
class Baseline:
    """One way of not partitioning. ``step_seconds`` is what it would take, even where it does not fit."""

    strategy: str
    feasible: bool
    reason: str
    step_seconds: float
    peak_memory_bytes: int
    microbatches: int


def one_device(graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, request: LayerRequest) -> Baseline:
    """The whole batch on rank 0, accumulated over as few micro-batches as memory needs."""
    return _replica(graph, costs, cluster, request, request.batch_size, "one device", 0.0)


def data_parallel(graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, request: LayerRequest) -> Baseline:
    """A replica of the model per device and one all-reduce of all gradients after the last backward."""
    world = cluster.world_size
    gradient_bytes = _state(graph, request).gradients
    seconds = data_parallel_seconds(gradient_bytes, cluster) if world > 1 else 0.0
    local_batch = -(-request.batch_size // world)
    return _replica(graph, costs, cluster, request, local_batch, f"data parallel x{world}", seconds)


def _replica(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    request: LayerRequest,
    batch: int,
    strategy: str,
    reduce_seconds: float,
) -> Baseline:
    whole = Segmentation({node.name: 0 for node in graph.ops}, ((0,),), frozenset())
    state = _state(graph, request)
    slowest = max(range(cluster.world_size), key=lambda rank: -cluster.devices[rank].memory_bytes)
    capacity = cluster.devices[slowest].memory_bytes if reduce_seconds else cluster.devices[0].memory_bytes
    baseline: Baseline | None = None
    microbatches = 1
    while microbatches <= min(batch, MAX_MICROBATCHES):
        size = -(-batch // microbatches)
        cost = segment_graph(graph, costs, whole, cluster, size).segments[0].cost
        peak = state.total + cost.saved_bytes
        step = microbatches * (cost.forward_seconds + cost.backward_seconds) + reduce_seconds
        step += optimizer_seconds(state, cluster.devices[0])
        fits = peak <= capacity
        reason = f"{microbatches} micro-batches" if fits else f"needs {peak:,} of {capacity:,} bytes"
        candidate = Baseline(strategy, fits, reason, step, peak, microbatches)
        if fits:
            return candidate
        baseline = candidate
        microbatches *= 2
    assert baseline is not None
    return baseline


def _state(graph: OpGraph, request: LayerRequest):  # type: ignore[no-untyped-def]
    whole = Segmentation({node.name: 0 for node in graph.ops}, ((0,),), frozenset())
    return state_of_ranks(graph, whole, 1, request.optimizer, master=request.master)[0]
