"""A feature-wise plan whose simulated step does not fit is searched for again, with less memory, or refused."""

from __future__ import annotations

import pytest
import torch
from passes.lower.realize_features import realize_features

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from passes import compile as compiling
from passes.compile import Compiled, compile_graph
from passes.search.feature.place import FeatureRequest, FeatureResult
from passes.trace.trace import trace
from tests.distributed.sharded_models import Mlp

MEMORY_BYTES = 2**20
GRAPH = trace(Mlp(), {name: torch.randn(4, 8) for name in ("x", "y")})


def compiled(extra_bytes: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Compiled, list[float]]:
    """With a simulation that finds ``extra_bytes`` more than there are; and what each search left free."""
    reserved: list[float] = []

    def seen(graph: object, sharded: object, cluster: object, request: FeatureRequest) -> object:
        reserved.append(request.reserved_bytes)
        return realize_features(graph, sharded, cluster, request)  # type: ignore[arg-type]

    own = compiling._excess_bytes
    monkeypatch.setattr(compiling, "realize_features", seen)
    monkeypatch.setattr(compiling, "_excess_bytes", lambda *given: own(*given) + extra_bytes)
    tight = ClusterSpec.local(2, memory=MEMORY_BYTES)
    return compile_graph(GRAPH, tight, FeatureRequest(batch_size=512)), reserved


def test_what_fits_is_searched_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled(0.0, monkeypatch)[1] == [0.0]


def test_searched_again_with_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free, _ = compiled(0.0, monkeypatch)
    monkeypatch.undo()
    room = MEMORY_BYTES - max(free.placed.realized.simulation.peak_bytes)
    found, reserved = compiled(room + 2000, monkeypatch)
    assert reserved[0] == 0.0
    assert len(reserved) > 1
    assert reserved == sorted(reserved)
    assert max(found.placed.realized.simulation.peak_bytes) < max(free.placed.realized.simulation.peak_bytes)
    assert isinstance(found.placed.search, FeatureResult)
    assert found.placed.search.cost.memory_bytes <= MEMORY_BYTES - reserved[-1]


def test_refused_where_no_search_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfeasibleError):
        compiled(MEMORY_BYTES, monkeypatch)
