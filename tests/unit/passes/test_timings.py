"""Passes as they run: their names in order, what they say, and who is told."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from torch import nn

from cost_models.cluster import ClusterSpec
from partitioner.commands.plan_model import pass_table
from passes.compile import compile_graph
from passes.lower.job import Job
from passes.search.feature.place import FeatureRequest
from passes.search.free.request import FreeRequest
from passes.search.hybrid.request import HybridRequest
from passes.search.layer.request import LayerRequest
from passes.search.request import Request
from passes.timings import pass_times, phase, run_pass
from passes.trace.trace import trace

TWO, JOB = ClusterSpec.local(2), Job(4)
PASSES = ["verify", "costs", "place", "bound", "bridge", "check", "baselines"]


@pytest.mark.parametrize(
    "request_",
    [LayerRequest(JOB), FeatureRequest(JOB), FreeRequest(JOB, split=False, time_limit_seconds=0.5)],
    ids=lambda request_: request_.strategy,
)
def test_a_compile_runs_the_same_passes_whatever_the_strategy(request_: Request) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    graph = trace(model, (torch.randn(2, 8),), loss_fn=lambda y, x: y.square().mean())
    with pass_times() as times:
        compiled = compile_graph(graph, TWO, request_)
    assert [each.name for each in times] == PASSES
    assert all(each.seconds >= 0 for each in times)
    said = {each.name: each.result for each in times}
    assert said["verify"] == said["costs"] == f"{len(graph)} ops"
    assert said["place"] == str(compiled.outcome.label)
    assert said["check"].startswith(f"{compiled.proof.instructions:,} instruction")
    assert said["baselines"] == "one device, data parallel x2"


def double(x: int) -> int:
    return 2 * x


def test_a_pass_returns_what_it_makes_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="partitioner"):
        assert run_pass("double", lambda found: f"{found} of them", double, x=4) == 8
    (record,) = caplog.records
    assert record.getMessage().startswith("double: ")
    assert record.getMessage().endswith(", 8 of them")


def test_the_table_says_processor_seconds_and_the_peak_of_memory() -> None:
    kept = []
    with pass_times() as times:
        run_pass("small", str, double, 1)
        run_pass("large", lambda _: "64 MiB", lambda: kept.append(bytearray(2**26)))
    small, large = times
    assert 0 <= large.processor_seconds <= large.seconds + 0.1
    assert 0 < small.peak_bytes <= large.peak_bytes
    head, *rows = pass_table(times).splitlines()
    assert head.split() == ["pass", "time", "share", "processor", "peak", "result"]
    assert [row.split()[0] for row in rows] == ["small", "large", "all"]


def test_collectors_nest_and_the_inner_one_is_told() -> None:
    with pass_times() as outer:
        run_pass("first", str, double, 1)
        with pass_times() as inner:
            run_pass("second", str, double, 2)
        run_pass("third", str, double, 3)
    run_pass("after", str, double, 4)
    assert [(each.name, each.result) for each in outer] == [("first", "2"), ("third", "6")]
    assert [(each.name, each.result) for each in inner] == [("second", "4")]


def test_phases_count_their_own_seconds_within_the_pass() -> None:
    @phase("inner")
    def inner() -> None:
        time.sleep(0.02)

    @phase("outer")
    def outer() -> int:
        time.sleep(0.01)
        inner()
        inner()
        return 1

    outer()  # nobody collects: it only runs
    with pass_times() as times:
        run_pass("search", str, outer)
        run_pass("plain", str, double, 1)
    search, plain = times
    assert plain.phases == ()
    seconds = {each.name: each.seconds for each in search.phases}
    assert {each.name: each.calls for each in search.phases} == {"inner": 2, "outer": 1}
    assert seconds["inner"] >= 0.04
    assert 0.01 <= seconds["outer"] < search.seconds - 0.04 + 1e-9
    assert sum(seconds.values()) <= search.seconds
    lines = pass_table(times).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["search", "inner", "outer", "plain", "all"]
    assert "2 times" in lines[2]


def test_the_hybrid_search_has_phases() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    graph = trace(model, (torch.randn(2, 8),), loss_fn=lambda y, x: y.square().mean())
    with pass_times() as times:
        compile_graph(graph, TWO, HybridRequest(JOB))
    (place,) = (each for each in times if each.name == "place")
    phases = {"options", "recipes", "ranges", "program", "simulation", "allocator"}
    assert {each.name for each in place.phases} == phases
    assert sum(each.seconds for each in place.phases) <= place.seconds


def test_a_pass_that_fails_is_not_collected_and_collecting_ends() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pass_times() as times:
        with pytest.raises(ValueError, match="no"), pass_times():
            run_pass("bad", str, fail)
        run_pass("good", str, double, 1)
    assert [each.name for each in times] == ["good"]
