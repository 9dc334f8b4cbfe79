"""A feature-wise plan whose simulated step does not fit is searched for again, with less memory, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from passes.compile import Compiled, compile_graph
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.lower.realize import Realized
from passes.search.feature import provider
from passes.search.feature.place import FeatureRequest, FeatureResult, MeshSurvey, survey_meshes
from passes.search.judge import Judge, Simulated
from passes.trace.trace import trace
from tests.distributed.sharded_models import Mlp

MEMORY_BYTES = 2**20
GRAPH = trace(Mlp(), {name: torch.randn(4, 8) for name in ("x", "y")})
Search = tuple[float, FeatureResult]
"""The bytes that a search left free, and what it found."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[Compiled, list[Search]]]:
    """Compile with a simulation that finds some bytes more than there are; the compile, and its searches."""

    def run(extra_bytes: int) -> tuple[Compiled, list[Search]]:
        def seen(
            graph: object,
            costs: object,
            cluster: object,
            request: FeatureRequest,
            *rest: object,
            **more: object,
        ) -> MeshSurvey:
            found = survey_meshes(graph, costs, cluster, request, *rest, **more)  # type: ignore[arg-type]
            whole = cluster.world_size == 2  # type: ignore[attr-defined]
            if (
                whole and found.best is not None and not request.pins
            ):  # data parallelism, and parts, beside it
                searches.append((request.reserved_bytes, found.best))
            return found

        def heavier(self: Judge, candidate: Candidate, realized: Realized) -> Simulated:
            found = simulated(self, candidate, realized)
            return replace(found, overflow_bytes=found.overflow_bytes + extra_bytes)

        searches.clear()
        monkeypatch.setattr(provider, "survey_meshes", seen)
        monkeypatch.setattr(Judge, "simulated", heavier)
        tight = ClusterSpec.local(2, memory=MEMORY_BYTES)
        return compile_graph(GRAPH, tight, FeatureRequest(Job(512))), searches

    simulated, searches = Judge.simulated, list[Search]()
    return run


def test_what_fits_is_searched_for_once(compiled: Callable[[int], tuple[Compiled, list[Search]]]) -> None:
    _, searches = compiled(0)
    assert [reserved for reserved, _ in searches] == [0.0]


def test_searched_again_with_less_memory(compiled: Callable[[int], tuple[Compiled, list[Search]]]) -> None:
    free = max(compiled(0)[0].realized.simulation.peak_bytes)
    found, searches = compiled(int(MEMORY_BYTES - free) + 2000)
    reserved = [bytes_ for bytes_, _ in searches]
    assert reserved[0] == 0.0
    assert len(reserved) > 1
    assert reserved == sorted(reserved)
    assert max(found.realized.simulation.peak_bytes) < free
    last = searches[-1][1]
    assert found.outcome.best.candidate.shardings[0] is last.placement
    assert last.cost.memory_bytes <= MEMORY_BYTES - reserved[-1]


def test_refused_where_no_search_helps(compiled: Callable[[int], tuple[Compiled, list[Search]]]) -> None:
    with pytest.raises(InfeasibleError):
        compiled(MEMORY_BYTES)
