"""Plans that were found with nothing fixed, trained: several optimizer steps, saved and resumed, beside a plain loop."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.found_matrix import CLUSTER, find_plan
from benchmarks.unlike_clusters import UNLIKE
from partitioner.models.as_graph import as_graph
from passes.graph.graph import OpGraph
from runtime.ranks.launch import WorkerPool
from tests.support.matrix import thinned
from tests.support.ranking import ranking

CLUSTERS = {"4 equal": CLUSTER, **UNLIKE}


@cache
def traced() -> OpGraph:
    return as_graph(ranking())


@pytest.mark.parametrize("cluster", thinned(CLUSTERS, ["1 + 3"]))
def test_a_found_plan_trains_as_a_plain_loop_does(cluster: str, pool: WorkerPool) -> None:
    plan = find_plan(traced(), CLUSTERS[cluster], microbatches=4)
    assert len(plan.stages) > 1
    report = plan.verify(ranking(), train=True, pool=pool)
    report.raise_if_different()
    assert report.steps > 2
    assert report.compared["parameter"] > 10
    assert report.compared["placement"] == len(plan.used_devices)
