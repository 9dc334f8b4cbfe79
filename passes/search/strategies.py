"""The searches by the strategy that a request asks for; a new way of partitioning is a room and a case here."""

from __future__ import annotations

from typing import Any

from cost_models.cluster import ClusterSpec
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.search.judge import Judge
from passes.search.outcome import Outcome
from passes.search.place import place_stages


def search(graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, request: Any, judge: Judge) -> Outcome:
    """Search a placement by ``request.strategy``; ``request``: the strategy's own kind."""
    if request.strategy == "free":
        from passes.search.free.rounds import place_anywhere  # twenty modules that no other strategy reads

        return place_anywhere(graph, costs, cluster, request, judge)
    return place_stages(graph, costs, cluster, request, judge)
