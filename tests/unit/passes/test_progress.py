"""The progress of a compile: phases in order, the best so far falling, the bound below it, options counted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from passes.compile import compile_graph
from passes.lower.job import Job
from passes.progress import Progress, is_watched, report_found, report_option, report_phase, watched
from passes.search.feature.place import FeatureRequest
from passes.search.free.request import FreeRequest
from passes.search.hybrid.fix import Fix
from passes.search.hybrid.request import HybridRequest
from passes.search.layer.request import LayerRequest
from passes.search.request import Request
from tests.unit.passes.search.hybrid.test_directions import SAMPLES, cluster, graph, planned


def test_nobody_is_told_nothing() -> None:
    assert not is_watched()
    report_phase("costs")
    report_option("a")
    report_found(1.0)


def test_the_hybrid_search_tells_its_options_and_bounds() -> None:
    told: list[Progress] = []
    with watched(told.append):
        found = planned(cluster()).outcome
    assert not is_watched()
    families = ["recipes that people know"]
    families += ["stages on device groups", "stages on single devices", "one stage on all devices"]
    before, behind = ["verify", "costs", "place"], ["bound", "bridge", "check", "baselines"]
    phases = list(dict.fromkeys(p.phase for p in told if p.phase != "simulating"))
    assert phases == [*before, *families, *behind]
    searching = [p for p in told if p.phase == "stages on device groups" and p.options]
    assert {p.options for p in searching} == {searching[0].options}
    assert all(p.solved + p.bounded <= p.options for p in searching)
    assert max(p.solved for p in searching) > 1
    best = [p.found_seconds for p in searching if math.isfinite(p.found_seconds)]
    assert best == sorted(best, reverse=True)
    assert min(best) >= found.certificate.bound_seconds * (1 - 1e-9)
    for p in searching:
        assert p.bound_seconds <= min(best) * (1 + 1e-9)
    assert told[-1].step_seconds == pytest.approx(found.best.step_seconds)
    assert all(str(p.trying) for p in searching)


@pytest.mark.parametrize(
    "request_",
    [
        LayerRequest(Job(SAMPLES)),
        FeatureRequest(Job(SAMPLES)),
        FreeRequest(Job(SAMPLES), time_limit_seconds=1.0),
        HybridRequest(Job(SAMPLES), fix=Fix(pipeline=2, tensor=2)),
    ],
    ids=lambda request: f"{request.strategy}{' fixed' * (request.strategy == 'hybrid')}",
)
def test_every_search_says_what_it_tries_and_the_fastest_step(request_: Request) -> None:
    told: list[Progress] = []
    with watched(told.append):
        found = compile_graph(graph(), cluster(), request_)
    tried = {str(p.trying) for p in told if p.trying}
    assert tried
    assert all(any(word in each for word in ("micro-batch", "samples", "simulating")) for each in tried)
    assert told[-1].step_seconds <= found.outcome.best.step_seconds * (1 + 1e-9)


def test_a_search_that_begins_anew_forgets_what_it_found() -> None:
    told: list[Progress] = []
    with watched(told.append):
        report_option("a")
        report_found(2.0)
        report_found(3.0)
        report_option("b", looked_at=1)
        assert told[-1].found_seconds == 2.0
        report_option("a")
        assert told[-1].found_seconds == math.inf
        report_phase("bound")
    assert told[-1] == Progress("bound")


def test_the_gap_needs_both() -> None:
    assert Progress().gap == math.inf
    assert Progress(found_seconds=2.0).gap == math.inf
    known = Progress(found_seconds=2.0, bound_seconds=1.5)
    assert known.gap == pytest.approx(0.25)
    assert replace(known, bound_seconds=2.5).gap == 0
