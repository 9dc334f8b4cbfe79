"""The strategies: one row each, looked up by name. A new way of partitioning is a room and a row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from cost_models.cluster import ClusterSpec
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.search.free.rounds import place_anywhere
from passes.search.judge import Judge
from passes.search.outcome import Outcome
from passes.search.place import place_stages
from passes.search.words import STRATEGY_WORDS, StrategyWords

Place: TypeAlias = Callable[[OpGraph, GraphCosts, ClusterSpec, Any, Judge], Outcome]
"""A search: (graph, its costs, cluster, the strategy's own request, judge) -> outcome."""


@dataclass(frozen=True)
class Strategy:
    """A way of partitioning."""

    place: Place
    words: StrategyWords


STRATEGIES: Mapping[str, Strategy] = {
    "layer": Strategy(place_stages, STRATEGY_WORDS["layer"]),
    "feature": Strategy(place_stages, STRATEGY_WORDS["feature"]),
    "hybrid": Strategy(place_stages, STRATEGY_WORDS["hybrid"]),
    "free": Strategy(place_anywhere, STRATEGY_WORDS["free"]),
}
