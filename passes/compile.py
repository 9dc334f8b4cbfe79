"""The compile, on one page: a model's graph and a cluster become a placement, and a placement becomes programs.

    trace ─► costs ─► place ─► bridge ─► segment ─► summarize ─► schedule ─► order ─► check ─► simulate

Each line of :func:`compile_graph` is one pass. ``Candidates`` carries a placement from segments to its simulated step, for
the search as for the plan.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from cost_models.cluster import ClusterSpec
from cost_models.layout import Layout
from passes.bridge import Bridge, bridges
from passes.candidates import Candidates, Realized
from passes.cheap import recomputed_ops
from passes.costs import GraphCosts, cost_graph
from passes.graph import OpGraph
from passes.place_layers import LayerCandidate, LayerRequest, LayerResult, place_layers
from passes.verify_graph import verify_graph
from runtime.check import Proof, check
from runtime.collector import collector_paused

log = logging.getLogger("partitioner")


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
    candidates = Candidates(graph, costs, cluster, request, recomputed_ops(graph))
    search = place_layers(graph, costs, cluster, request, candidates.simulate, candidates.lower_bound_seconds)
    placement = search.best.candidate
    layouts = {name: Layout.on(placement.ranks[stage]) for name, stage in placement.stage_of.items()}
    bridged = bridges(graph, layouts)
    realized = candidates.realized(placement)
    tied = [(group.parameters, group.ranks) for group in realized.tied]
    proof = check(realized.programs, realized.segments, placement.microbatches, tied=tied)
    log.info("compiled: %s", placement.description)
    return Compiled(costs, placement, layouts, bridged, realized, proof, search)


def costs_of(graph: OpGraph, cluster: ClusterSpec) -> GraphCosts:
    """The graph's costs on devices of the cluster's kind; computed once per graph."""
    key = ("costs", cluster.devices[0].kind)
    if key not in graph.memo:
        graph.memo[key] = cost_graph(graph, device_kind=cluster.devices[0].kind)
    costs = graph.memo[key]
    assert isinstance(costs, GraphCosts)
    return costs
