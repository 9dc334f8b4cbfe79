"""Plans of strategy "feature" whose placement is forced by hand (``sharded_models.place``), for the public API."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from cost_models.cluster import ClusterSpec
from cost_models.layout import Mesh
from partitioner import Plan, Workload, partition
from partitioner.api import as_graph
from passes.graph import OpGraph
from passes.place_features import place_features
from tests.distributed.sharded_models import Forced, place

NAMES = {1: ("tensor",), 2: ("data", "tensor")}


def forced_plan(
    made: Workload | OpGraph,
    shape: tuple[int, ...],
    forced: tuple[Forced, ...],
    *,
    batch_size: int,
    microbatches: int,
    **options: Any,
) -> Plan:
    """A plan on a mesh of ``shape``: one ``Forced`` per axis. Found by the search, but for its placement."""
    graph = made if isinstance(made, OpGraph) else as_graph(made, precision=options.get("precision"))
    ranks = tuple(range(shape[0] if len(shape) == 1 else shape[0] * shape[1]))
    placement = place(graph, Mesh(ranks, shape, NAMES[len(shape)]), forced, microbatches)

    def placed(*arguments: Any) -> Any:
        return replace(place_features(*arguments), placement=placement)

    with mock.patch("passes.compile.place_features", placed):
        return partition(
            graph,
            ClusterSpec.local(len(ranks)),
            strategy="feature",
            mesh=shape,
            batch_size=batch_size,
            microbatches=microbatches,
            **options,
        )
