"""The request of the layer-wise search, and everything that the search of it reads, as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.search.layer.options import device_table, microbatch_counts, options
from passes.search.layer.search import LayerSearch
from passes.search.layer.spaces import spaces
from passes.search.microbatches import accepted_counts
from passes.search.model import read_model
from passes.search.pins import resolve_pins
from passes.search.request import Request
from passes.search.words import RecomputeMode, StrategyName


@dataclass(frozen=True)
class LayerRequest(Request):
    """A layer-wise plan is wanted. ``pins``: glob over module paths or op names -> stage."""

    strategy: ClassVar[StrategyName] = "layer"

    pins: Mapping[str, int] = field(default_factory=dict)
    schedule: str = "auto"
    max_stages: int | None = None
    min_stages: int | None = None
    """Devices with a stage, at least."""
    recompute: RecomputeMode = "auto"
    simulations: int = 12
    """Candidates simulated at most."""


def prepare(graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, request: LayerRequest) -> LayerSearch:
    """Everything that the search of ``request`` reads, as arrays."""
    _refuse_too_few_devices(cluster, request)
    model = read_model(graph, costs, request.job)
    paths = [str(graph.nodes[name].meta.get("module_path", "")) for name in model.names]
    pins = resolve_pins(request.pins, model.names, paths, model.readers, model.together)
    table = device_table(cluster)
    size_of_batch = request.job.batch_size
    counts = accepted_counts(graph, size_of_batch, microbatch_counts(size_of_batch, request.microbatches))
    size = max(1, size_of_batch // counts[-1])
    work = model.seconds(size, table.representatives[0])
    return LayerSearch(
        model=model,
        cluster=cluster,
        table=table,
        spaces=spaces(model, work, pins, size),
        batch_size=size_of_batch,
        pins=pins,
        max_stages=request.max_stages or 1 << 30,
        options=options(counts, request.schedule, len(cluster.devices)),
        min_stages=request.min_stages or 1,
        recompute=request.recompute,
    )


def branches(graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, request: LayerRequest) -> bool:
    """Tell whether some part of a model may run beside another: it has splits that no cut of its order makes."""
    return len(prepare(graph, costs, cluster, request).spaces) > 1


def _refuse_too_few_devices(cluster: ClusterSpec, request: LayerRequest) -> None:
    world = len(cluster.devices)
    if request.min_stages is not None and request.min_stages > world:
        raise InfeasibleError(
            f"no layer-wise plan uses {request.min_stages} devices",
            [f"the cluster has {world}, and min_stages is {request.min_stages}"],
            [f"min_stages={world} uses all of them", "a cluster with more devices"],
        )
