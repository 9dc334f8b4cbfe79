"""The ways in which every odd model is planned."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, UsageError
from partitioner import Plan, partition
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.graph.state import colocated


@dataclass(frozen=True)
class Way:
    """One way of planning. ``options``: of ``partition``, tried in this order until the model is not too small for them."""

    ranks: int
    microbatches: int
    options: tuple[Mapping[str, Any], ...]

    def plan(self, graph: OpGraph, samples: int) -> Plan:
        """Plan a trace this way."""
        for last, options in enumerate(self.options, 1 - len(self.options)):
            if options.get("pins") == "anywhere":
                options = {**options, "pins": anywhere(graph, self.ranks)}
            try:
                return partition(
                    graph,
                    ClusterSpec.local(self.ranks),
                    batch_size=samples,
                    microbatches=min(self.microbatches, samples),
                    time_limit_seconds=10.0,
                    optimizer_memory="momentum",
                    **{"strategy": "layer", **options},
                )
            except (UsageError, InfeasibleError):
                if last == 0:
                    raise
        raise AssertionError("a way has options")


def anywhere(graph: OpGraph, ranks: int) -> dict[str, int]:
    """Pin every op to a device drawn at random, the same one for all that have to be together."""
    draw = random.Random(len(graph))
    recomputed = recomputed_ops(graph)
    pins = {node.name: draw.randrange(ranks) for node in graph.ops if node.name not in recomputed}
    for group in colocated(graph):
        place = draw.randrange(ranks)
        pins.update({name: place for name in group if name in pins})
    return pins


def _stages(count: int, **options: Any) -> tuple[Mapping[str, Any], ...]:
    return tuple({"min_stages": stages, "max_stages": stages, **options} for stages in range(count, 0, -1))


def _mesh(*sizes: int, patterns: tuple[str, ...]) -> tuple[Mapping[str, Any], ...]:
    sharded = {"strategy": "feature", "mesh": sizes}
    return (*({**sharded, "pins": {"*": pattern}} for pattern in patterns), sharded)


WAYS: dict[str, Way] = {
    "layer2": Way(2, 2, _stages(2)),
    "recompute": Way(2, 2, _stages(2, recompute="full")),
    "feature2": Way(2, 1, _mesh(2, patterns=())),
    "data2": Way(2, 1, _mesh(2, patterns=("data",))),
    "zero3": Way(2, 1, _mesh(2, patterns=("zero3",))),
    "layer3": Way(3, 1, _stages(3, schedule="gpipe")),
    "free3": Way(3, 2, ({"strategy": "free", "pins": "anywhere"}, {"strategy": "free"})),
    "feature2x2": Way(4, 1, _mesh(2, 2, patterns=("data column_row", "column_row data"))),
}
