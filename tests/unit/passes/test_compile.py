"""The compile as a whole: what is simulated, what is only bounded, and that the plan is what was simulated."""

from __future__ import annotations

import pytest
from passes.search.candidates import Candidates, Realized

from cost_models.cluster import ClusterSpec
from passes import compile as compiler
from passes.graph.recomputed import recomputed_ops
from passes.search.layer.place import LayerCandidate, LayerRequest
from runtime.segment.microbatch import microbatch_sizes
from tests.support.traced_models import small_gpt2


def test_the_best_candidate_is_realized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, graph = small_gpt2()
    realized: list[LayerCandidate] = []
    original = Candidates.realize

    def counted(self: Candidates, candidate: LayerCandidate) -> Realized:
        realized.append(candidate)
        return original(self, candidate)

    monkeypatch.setattr(Candidates, "realize", counted)
    compiled = compiler.compile_graph(graph, ClusterSpec.parse("dgx-a100"), LayerRequest(batch_size=16))
    simulated = [r for r in compiled.placed.search.runner_ups if not r.reason.startswith("at least")]
    assert len(realized) == len(simulated) + 1
    assert any(candidate is compiled.placed.search.best.candidate for candidate in realized)
    assert compiled.placed.realized.simulation.step_seconds == compiled.placed.search.best.step_seconds


@pytest.mark.parametrize("batch_size", [8, 10])
def test_the_quick_bound_is_below_the_simulation_of_every_candidate(batch_size: int) -> None:
    _, graph = small_gpt2()
    cluster, recomputed = ClusterSpec.parse("dgx-a100"), recomputed_ops(graph)
    costs = compiler.costs_of(graph, cluster)
    seen = 0
    for schedule in ("1f1b", "gpipe", "zb-h1", "interleaved"):
        for microbatches in (4, 8):
            request = LayerRequest(
                batch_size, microbatches=microbatches, schedule=schedule, max_stages=4, simulations=2
            )
            best = compiler.compile_graph(graph, cluster, request).placed.search.best
            candidates = Candidates(graph, costs, cluster, request, recomputed)
            bound = candidates.lower_bound_seconds(best.candidate)
            assert bound <= best.step_seconds
            even = len(set(microbatch_sizes(batch_size, microbatches))) == 1
            assert (bound >= 0.5 * best.step_seconds) if even else bound == 0.0
            seen += 1
    assert seen == 8
