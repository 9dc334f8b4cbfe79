"""What helps a request that does not fit: every suggestion is planned really, and fits at about the said time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from cost_models.units import parse_bytes
from cost_models.variants import with_memory, with_more_nodes
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.search.fastest import fastest_of
from passes.search.hybrid.fix import Fix, read_fix
from passes.search.hybrid.provider import GroupsProvider
from passes.search.hybrid.relax.infeasible import largest, smallest
from passes.search.hybrid.request import HybridRequest
from passes.search.hybrid.search import GroupSearch
from passes.search.hybrid.survey import survey
from passes.search.judge import Judge, Simulated
from passes.search.place import place_stages
from passes.trace.trace import trace
from tests.support.matrix import thinned
from tests.unit.passes.search.hybrid.test_directions import SAMPLES, cluster, graph

ABOUT = 1.15
"""Factor by which a suggestion may be slower than the plan of the whole search: it is made of the leanest options."""
Planned = tuple[OpGraph, ClusterSpec, HybridRequest]


def planned(model: OpGraph, machine: ClusterSpec, request: HybridRequest) -> Simulated:
    judge = Judge(model, costs_of(model, machine), machine, request.job)
    return place_stages(request, judge).best


def by_groups(model: OpGraph, machine: ClusterSpec, request: HybridRequest) -> Simulated:
    """Plan without the families that suggestions are not solved with: single devices, and one stage on any mesh."""
    if not request.open:
        return planned(model, machine, request)
    judge = Judge(model, costs_of(model, machine), machine, request.job)
    recompute = request.fix.recompute or request.recompute
    search = GroupSearch(
        model, judge.costs, machine, request.job, request.microbatches, request.schedule, recompute
    )
    one_queue = request.fix.one_queue(machine)
    return fastest_of([GroupsProvider(search, judge, one_queue)], judge, math.inf).best


def refused(model: OpGraph, machine: ClusterSpec, request: HybridRequest) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as raised:
        planned(model, machine, request)
    return raised.value


def with_change(
    words: str, machine: ClusterSpec, request: HybridRequest
) -> tuple[ClusterSpec, HybridRequest]:
    """Do what a suggestion says."""
    if found := re.match(r"devices with ([\d.,]+ \w+) of usable memory \(of", words):
        size = parse_bytes(found[1].replace(",", ""))
        # three digits are written: at most so much was cut off
        return with_memory(machine, 1.001 * size / machine.devices[0].memory_bytes), request
    if found := re.match(r"devices with ([\d.]+) times the memory", words):
        return with_memory(machine, 1.005 * float(found[1])), request
    if found := re.match(r"(\d+) more node", words):
        larger = with_more_nodes(machine, int(found[1]))
        assert larger is not None
        return larger, request
    if found := re.match(r"batch ([\d,]+) ", words):
        size = int(found[1].replace(",", ""))
        return machine, replace(request, job=replace(request.job, batch_size=size))
    if found := re.match(r"optimizer_memory=(\w+),", words):
        return machine, replace(request, job=replace(request.job, optimizer=found[1]))
    if found := re.match(r"([\d,]+) micro-batch", words):
        return machine, replace(request, microbatches=int(found[1]))
    if found := re.match(r"schedule (\S+):", words):
        return machine, replace(request, schedule=found[1])
    if words.startswith("recompute=auto: "):
        return machine, replace(request, recompute="auto")
    changed = re.match(r"((?:\w+=\w+ ?)+)(?: \(of|: fits)", words)
    assert changed, words
    fix = {**{f: v for f, v in vars(request.fix).items() if v is not None}, **vars_of(changed[1])}
    return machine, replace(request, fix=Fix(**fix))


def vars_of(text: str) -> dict[str, Any]:
    return {name: value for name, value in vars(read_fix(text)).items() if value is not None}


def seconds_of(words: str) -> float:
    found = re.search(r"step ([\d.,]+) (us|ms|s)\b", words)
    assert found, words
    return float(found[1].replace(",", "")) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def check(model: OpGraph, machine: ClusterSpec, request: HybridRequest, error: InfeasibleError) -> list[str]:
    """Do what each suggestion of a refusal says, and return them. The whole search is asked about the first."""
    assert 1 <= len(error.suggestions) <= 6
    for words in error.suggestions:
        changed = with_change(words, machine, request)
        by = by_groups(model, *changed)
        assert by.fits, words
        assert seconds_of(words) / ABOUT <= by.step_seconds <= seconds_of(words) * 1.01, words
        if request.open and words == error.suggestions[0]:
            found = planned(model, *changed)
            assert found.fits, words
            assert found.step_seconds <= by.step_seconds, words
    return list(error.suggestions)


def begins(suggestions: list[str], *words: str) -> bool:
    """Tell whether each of the words begins a suggestion, in this order."""
    at = [next((i for i, each in enumerate(suggestions) if each.startswith(word)), -1) for word in words]
    return -1 not in at and at == sorted(at)


MIB = 2**20


@cache
def short_of_memory() -> tuple[InfeasibleError, int]:
    """Refuse any plan on devices of 5 MiB, and count the options that were solved for that."""
    solve = GroupSearch.solve
    with mock.patch.object(GroupSearch, "solve", autospec=True, side_effect=solve) as solved:
        error = refused(graph(), cluster(memory_bytes=5 * MIB), HybridRequest(Job(SAMPLES)))
    return error, solved.call_count


@pytest.mark.parametrize(
    ("memory", "further", "expected"),
    [
        (5 * MIB, {}, ("optimizer_memory=", "devices with", "4 more nodes")),
        pytest.param(3 * MIB, {}, ("devices with",), marks=pytest.mark.matrix),
        (
            10 * MIB,
            {"microbatches": 1, "recompute": "none"},
            ("recompute=auto", "4 micro-batches (of 1)", "batch"),
        ),
        (7.5 * MIB, {"schedule": "gpipe", "recompute": "none"}, ("schedule", "devices with")),
    ],
    ids=["memory", "less memory", "micro-batches", "schedule"],
)
def test_each_suggestion_is_planned_and_fits(
    memory: float, further: dict[str, Any], expected: tuple[str, ...]
) -> None:
    machine, request = cluster(memory_bytes=memory), HybridRequest(Job(SAMPLES), **further)
    error = short_of_memory()[0] if memory == 5 * MIB else refused(graph(), machine, request)
    found = check(graph(), machine, request, error)
    assert begins(found, *expected), found


@pytest.mark.matrix
def test_unlike_devices_are_suggested_in_times() -> None:
    """Half a minute; ``test_changes_are_looked_for_until_time_runs_out`` has unlike devices too."""
    machine = cluster(speeds=(1.0, 2.0))
    nodes = with_memory(machine, 0.005).nodes[0], with_memory(machine, 0.006).nodes[1]
    machine = ClusterSpec.from_dict(machine.model_copy(update={"nodes": nodes}).to_dict())
    request = HybridRequest(Job(SAMPLES))
    (words,) = [each for each in refused(graph(), machine, request).suggestions if "times the memory" in each]
    found = by_groups(graph(), *with_change(words, machine, request))
    assert found.fits
    assert found.step_seconds <= seconds_of(words) * 1.01


@pytest.mark.parametrize(
    ("memory", "fix", "expected"),
    [
        (
            16 * MIB,
            "data=8 zero=0 recompute=none microbatch=1",
            ("data=8 zero=3 microbatch=1", "devices with"),
        ),
        (30 * MIB, "data=8 zero=0 recompute=none microbatch=1", ("zero=3 (of 0)", "devices with")),
        (6 * MIB, "pipeline=2 tensor=4 recompute=none", ("devices with",)),
        pytest.param(
            13 * MIB,
            "pipeline=2 tensor=2 data=2 zero=0 microbatch=4",
            ("zero=3 (of 0)", "devices with"),
            marks=pytest.mark.matrix,
        ),
        (
            14 * MIB,
            "pipeline=2 tensor=2 data=2 zero=0 microbatch=2 recompute=none",
            ("microbatch=1 (of 2)", "tensor=4 data=1", "devices with"),
        ),
        (
            13 * MIB,
            "pipeline=2 tensor=2 data=2 zero=0 microbatch=2 recompute=none",
            ("tensor=4 data=1", "pipeline=4 data=1", "devices with"),
        ),
    ],
)
def test_each_change_of_what_is_fixed_is_planned_and_fits(
    memory: float, fix: str, expected: tuple[str, ...]
) -> None:
    machine, request = cluster(memory_bytes=memory), HybridRequest(Job(SAMPLES), fix=read_fix(fix))
    found = check(graph(), machine, request, refused(graph(), machine, request))
    assert begins(found, *expected), found


@pytest.mark.parametrize("end", [1, 2, 3, 10, 100])
def test_bisection_finds_the_border(end: int) -> None:
    asked: list[int] = []

    class Fitting:
        def simulated(self) -> str:
            return "found"

    def below(most: int) -> Callable[[int], Any]:
        return lambda n: asked.append(n) or (Fitting() if n <= most else None)  # type: ignore[func-returns-value]

    for most in range(1, end):
        assert largest(below(most), end) == (most, "found")
    assert largest(below(0), end)[1] is None
    for least in range(1, end):
        assert smallest(lambda n, least=least: Fitting() if n >= least else None, end) == (least, "found")  # type: ignore[misc]
    assert smallest(lambda n: None, end)[1] is None


def test_where_simulations_overflow_the_next_is_taken() -> None:
    class Overflowing:
        def __init__(self, fits: bool) -> None:
            self.fits = fits

        def simulated(self) -> str | None:
            return "found" if self.fits else None

    assert largest(lambda n: Overflowing(n < 8) if n <= 10 else None, 20) == (7, "found")  # type: ignore[arg-type]
    assert smallest(lambda n: Overflowing(n > 6) if n >= 5 else None, 20) == (7, "found")  # type: ignore[arg-type]


def test_the_work_is_bounded_in_solved_options_and_tables() -> None:
    machine = cluster(memory_bytes=5 * MIB)
    options = len(GroupSearch(graph(), costs_of(graph(), machine), machine, Job(SAMPLES)).options())
    assert 0 < short_of_memory()[1] <= 12 * options


TIGHT = 6.1 * MIB
"""Eight devices hold the parameters and their state once, and hardly anything else."""


def test_devices_that_cannot_hold_the_parameters_once_are_not_searched() -> None:
    request = HybridRequest(Job(SAMPLES))
    for memory, searched in ((5 * MIB, False), (TIGHT, True)):
        machine = cluster(memory_bytes=memory)
        own = GroupSearch(graph(), costs_of(graph(), machine), machine, request.job)
        surveyed = survey(own, math.inf)
        assert not surveyed.solved
        assert bool(own.tables.known) is searched


def test_a_search_that_finds_nothing_ends_with_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before some options were tried: a first plan is worth waiting for."""
    machine = cluster(memory_bytes=TIGHT)
    own = GroupSearch(graph(), costs_of(graph(), machine), machine, Job(SAMPLES))
    monkeypatch.setattr("passes.search.hybrid.survey.PATIENCE", len(own.options()))
    patient = survey(own, 0.0)
    assert (patient.solved, patient.stopped) == ((), "")
    monkeypatch.setattr("passes.search.hybrid.survey.PATIENCE", 1)
    hasty = survey(own, 0.0)
    assert (hasty.solved, hasty.stopped) == ((), "time limit")
    error = refused(graph(), machine, HybridRequest(Job(SAMPLES), time_limit_seconds=1e-6))
    assert "that was looked at fits" in error.because[0]
    assert error.because[0].endswith("time limit")


class Spare(nn.Module):
    """Four layers, and 64 MB of parameters with their state that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        self.spare = nn.Parameter(torch.zeros(4000, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


def test_parameters_that_nobody_reads_need_no_memory_of_a_pipeline() -> None:
    own = trace(Spare(), {"x": torch.randn(SAMPLES, 64)}, loss_reduction="mean")
    machine = cluster(memory_bytes=1.5e6)
    search = GroupSearch(own, costs_of(own, machine), machine, Job(SAMPLES))
    assert survey(search, math.inf).solved


@pytest.mark.parametrize("seconds", thinned([0.0, 0.5, 1.5, 4.0], [0.0, 1.5]))
def test_changes_are_looked_for_until_time_runs_out(seconds: float) -> None:
    """Whatever is under way then."""
    machine = cluster(memory_bytes=2 * MIB, speeds=(1.0, 0.05))
    request = HybridRequest(Job(SAMPLES), time_limit_seconds=2 * seconds)
    error = refused(graph(), machine, request)
    assert error.suggestions
