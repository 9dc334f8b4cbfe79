"""Models that are no plain chain of blocks, planned with nothing fixed: a whole certificate, and the right numbers."""

from __future__ import annotations

import math
from functools import cache

import pytest

from benchmarks.found_matrix import find_plan
from benchmarks.hybrid_matrix import verify_from_file
from benchmarks.unlike_clusters import THREE_KINDS, UNLIKE
from partitioner import Workload
from partitioner.models.as_graph import as_graph
from passes.graph.graph import OpGraph
from runtime.ranks.launch import WorkerPool
from tests.support.matrix import thinned
from tests.support.ranking import ranking
from tests.support.traced_models import loaded

SHOWN = [("ranking", "2 + 1 + 1")]
OTHERS = [("ranking", "1 + 3"), ("mixtral", "2 + 2"), ("t5", "1 + 3"), ("unet", "2 + 2"), ("vit", "1 + 3")]
"""Experts; an encoder and a decoder that reads it everywhere; skips across the model; images."""


@cache
def made(model: str) -> tuple[Workload, OpGraph]:
    if model != "ranking":
        return loaded(model)
    workload = ranking()
    return workload, as_graph(workload)


@pytest.mark.parametrize(("model", "cluster"), thinned([*SHOWN, *OTHERS], SHOWN))
def test_it_is_planned_certified_and_computes_what_it_computed(
    model: str, cluster: str, pool: WorkerPool
) -> None:
    workload, graph = made(model)
    plan = find_plan(graph, {**UNLIKE, **THREE_KINDS}[cluster], microbatches=4)
    assert plan.strategy == "hybrid"
    assert len(plan.used_devices) > 2
    certificate = plan.certificate
    assert 0 < certificate.bound_seconds <= certificate.objective_seconds < math.inf
    assert 0 <= certificate.gap < 0.1
    assert certificate.solver_status in ("optimal", "bounded")
    assert certificate.terms is not None  # added up again when the file is read
    report = verify_from_file(plan, workload, graph, pool)
    report.raise_if_different()
    assert report.compared["gradient"] > 10
