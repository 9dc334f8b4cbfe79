"""The compile as a whole: what is simulated, what is only bounded, and that the plan is what was simulated."""

from __future__ import annotations

import pytest

from cost_models.cluster import ClusterSpec
from passes import compile as compiler
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.search.judge import Carried, Judge
from passes.search.layer.request import LayerRequest
from runtime.segment.microbatch import microbatch_sizes
from tests.support.traced_models import small_gpt2


def test_the_best_candidate_is_realized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, graph = small_gpt2()
    carried: list[Candidate] = []
    original = Judge.carry

    def counted(self: Judge, candidate: Candidate) -> Carried:
        carried.append(candidate)
        return original(self, candidate)

    monkeypatch.setattr(Judge, "carry", counted)
    compiled = compiler.compile_graph(graph, ClusterSpec.parse("dgx-a100"), LayerRequest(Job(16)))
    outcome = compiled.outcome
    simulated = [r for r in outcome.runner_ups if not r.bounded]
    assert len(carried) == len(outcome.judge.tried) == len(simulated) + 1
    assert any(candidate is outcome.best.candidate for candidate in carried)
    assert compiled.realized is outcome.carried.realized
    assert compiled.realized.simulation.step_seconds == outcome.best.step_seconds


@pytest.mark.parametrize("batch_size", [8, 10])
def test_the_quick_bound_is_below_the_simulation_of_every_candidate(batch_size: int) -> None:
    _, graph = small_gpt2()
    cluster, job = ClusterSpec.parse("dgx-a100"), Job(batch_size)
    costs = compiler.costs_of(graph, cluster)
    seen = 0
    for schedule in ("1f1b", "gpipe", "zb-h1", "interleaved"):
        for microbatches in (4, 8):
            request = LayerRequest(
                job, microbatches=microbatches, schedule=schedule, max_stages=4, simulations=2
            )
            best = compiler.compile_graph(graph, cluster, request).outcome.best
            bound = Judge(graph, costs, cluster, job).lower_bound_seconds(best.candidate)
            assert bound <= best.step_seconds
            even = len(set(microbatch_sizes(batch_size, microbatches))) == 1
            assert (bound >= 0.5 * best.step_seconds) if even else bound == 0.0
            seen += 1
    assert seen == 8
