"""The hybrid search turns where it should when links, memory or devices change."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from cost_models.layout import Shard
from passes.compile import Compiled, compile_graph
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.lower.realize import realize
from passes.search.feature.place import FeatureRequest, place_features
from passes.search.feature.provider import sharded_candidate
from passes.search.hybrid.request import HybridRequest
from passes.search.hybrid.search import GroupSearch
from passes.search.hybrid.solve import SolvedOption, fastest
from passes.search.hybrid.survey import survey
from passes.search.judge import Simulated
from passes.trace.trace import trace

SAMPLES = 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())  # type: ignore[no-any-return]


class Layers(nn.Module):
    """Six equal layers, 13 MB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@cache
def graph() -> OpGraph:
    torch.manual_seed(0)
    return trace(Layers(), {"x": torch.randn(SAMPLES, 32, 256)}, loss_reduction="mean")


def cluster(
    between: float = 1e9,
    memory_bytes: float = 1e9,
    speeds: Sequence[float] = (1.0, 1.0),
    each: int = 4,
    contention: float = 1.0,
) -> ClusterSpec:
    """Nodes of devices whose only costs are FLOPs and links; ``between`` nodes: bytes per second."""
    nodes = [
        {
            "name": f"n{number}",
            "count": each,
            "device": {
                "name": f"d{number}",
                "kind": "cpu",
                "memory": int(memory_bytes),
                "memory_bandwidth": "10TB/s",
                "flops": {"float32": 1e9 * speed},
                "launch_overhead": "0us",
            },
            "links": {"default": {"bandwidth": 1e10, "latency": "0us"}},
        }
        for number, speed in enumerate(speeds)
    ]
    network = {"bandwidth": between, "latency": "0us", "per": "device"}
    host = {"contention": contention}
    return ClusterSpec.from_dict({"name": "toys", "nodes": nodes, "network": network, "host_costs": host})


def best(machine: ClusterSpec) -> SolvedOption:
    costs = costs_of(graph(), machine)
    return survey(GroupSearch(graph(), costs, machine, Job(SAMPLES)), math.inf).solved[0]


def planned(machine: ClusterSpec, **further: float) -> Compiled:
    return compile_graph(graph(), machine, HybridRequest(Job(SAMPLES), **further))  # type: ignore[arg-type]


def test_slow_links_between_nodes_make_each_node_a_stage() -> None:
    assert best(cluster(between=1e10)).option.groups == 1
    slow = best(cluster(between=1e5)).option
    assert slow.groups == 2
    assert [run.size for run in slow.runs] == [4]


def test_a_slow_node_gets_fewer_layers() -> None:
    solved = best(cluster(between=1e8, speeds=(1.0, 3.0)))
    assert solved.option.groups == 2
    layers = np.diff([*solved.pipeline.starts, sum(map(len, solved.steps))]).tolist()
    of_node = {run.pool.starts[0]: count for run, count in zip(solved.option.runs, layers, strict=True)}
    assert of_node[0] < of_node[4]


def test_a_slow_node_behind_slow_links_is_left_out() -> None:
    option = best(cluster(between=1e5, speeds=(1.0, 3.0))).option
    assert [run.pool.starts[0] for run in option.runs] == [4]


def test_less_memory_is_never_faster_until_nothing_fits() -> None:
    needed = planned(cluster(each=2)).outcome.best.peak_bytes
    steps = []
    for share in (1.01, 0.8, 0.65):
        found = planned(cluster(memory_bytes=max(needed) * share, each=2)).outcome
        assert max(found.best.peak_bytes) <= max(needed) * share
        steps.append(found.certificate.bound_seconds)
    assert steps == sorted(steps)
    with pytest.raises(InfeasibleError) as raised:
        planned(cluster(memory_bytes=max(needed) * 0.15, each=2), time_limit_seconds=0.0)  # no ways out
    assert any("short" in reason for reason in raised.value.because)


def test_more_micro_batches_prefer_fewer_replicas() -> None:
    """Sums of gradients over slow links cost as much whatever the number; filling and draining is its share."""
    machine = cluster(between=3e6, speeds=(1.0,) * 4, each=1)
    replicas = []
    for count in (1, 4, 16, 32):
        search = GroupSearch(graph(), costs_of(graph(), machine), machine, Job(128), microbatches=count)
        (run,) = survey(search, math.inf).solved[0].option.runs
        assert run.replicas * run.groups == machine.world_size
        replicas.append(run.replicas)
    assert replicas == sorted(replicas, reverse=True)
    assert replicas[0] == 4 > replicas[-1]


def test_less_memory_brings_zero_then_recomputation() -> None:
    """ZeRO-1 is there from the beginning: it sends what a sum sends, and updates less. Nothing is sent beside computing.

    Stages would not help: a rank of ZeRO-3 that computes again holds less than one of a pipeline.
    """

    def on(memory_bytes: float) -> Simulated:
        machine = cluster(2.5e7, memory_bytes, speeds=(1.0,) * 4, each=1, contention=100.0)
        request = HybridRequest(Job(64), microbatches=4, schedule="1f1b")
        return compile_graph(graph(), machine, request).outcome.best

    most, first = max(on(1e9).peak_bytes), dict[str, float]()
    shares = [1.1, 1.0, 0.9, 0.8, 0.75, 0.7, 0.65, 0.6]
    for share in shares:
        candidate = on(most * share).candidate
        kept = [own.stored.values() for own in candidate.shardings.values()]
        seen = {
            "zero 1": any(own.sharded_state for own in candidate.shardings.values()),
            "zero 3": any(isinstance(axis, Shard) for own in kept for layout in own for axis in layout),
            "recomputation": any(candidate.recomputed_blocks),
        }
        for name, there in seen.items():
            if there:
                first.setdefault(name, share)
    assert list(first) == ["zero 1", "zero 3", "recomputation"]
    assert len(set(first.values())) == len(first), first


def test_a_search_that_is_cut_off_returns_the_best_so_far() -> None:
    found = planned(cluster(), time_limit_seconds=0.0)
    assert found.outcome.certificate.solver_status == "time limit"
    assert found.proof.instructions > 0
    whole = planned(cluster())
    assert whole.outcome.certificate.solver_status != "time limit"
    assert whole.outcome.best.step_seconds <= found.outcome.best.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("call", [0, 1])
def test_ctrl_c_takes_the_best_so_far_if_there_is_one(call: int) -> None:
    calls = itertools.count()

    def interrupted(*given: Any, **more: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return fastest(*given, **more)

    with (
        mock.patch("passes.search.hybrid.survey.fastest", interrupted),
        mock.patch("passes.search.place.known_recipes", return_value=[]),  # surveys of their own
    ):
        if call == 0:
            with pytest.raises(KeyboardInterrupt):
                planned(cluster())
            return
        found = planned(cluster()).outcome
    assert found.certificate.solver_status == "interrupted"
    assert found.best.fits
    assert next(calls) == call + 1


def test_the_certificate_holds() -> None:
    for machine in (cluster(each=2), cluster(between=1e5, each=2), cluster(speeds=(1.0, 2.0, 1.0), each=1)):
        certificate = planned(machine).outcome.certificate
        assert 0 < certificate.bound_seconds <= certificate.objective_seconds
        assert certificate.gap < 0.2


def test_no_option_is_solved_that_bounds_prove_slower_than_a_known_plan() -> None:
    """Not even where nothing of its own is found for a long time, as on a part of the cluster."""
    search = GroupSearch(graph(), costs_of(graph(), cluster()), cluster(), Job(SAMPLES))
    listed = search.options()
    bounds = [
        max(floor, search.first_bound(listed[n], math.inf))
        for floor, n in search.floors.by_floor(listed, 1.0)
    ]
    known = min(bounds) * (1 - 1e-9)
    assert min(search.floors.by_floor(listed, 1.0))[0] < known
    surveyed = survey(search.on(range(cluster().world_size)), math.inf, known_seconds=known)
    assert surveyed.bounds == ()
    assert surveyed.rest_seconds >= known


def test_what_is_sent_beside_computing_is_counted_as_the_step_does_it() -> None:
    """Six layers of ZeRO-3 in two micro-batches: seconds by surrogate and by simulation."""
    machine = cluster(1e8, speeds=(1.0,) * 4, each=1)
    costs, seconds = costs_of(graph(), machine), dict[float, float]()
    for contention in (1.0, 100.0):
        slow = cluster(1e8, speeds=(1.0,) * 4, each=1, contention=contention)
        fixed = FeatureRequest(Job(64), microbatches=2, pins={"*": "zero3"}, mesh=(4,))
        placed = place_features(graph(), costs, slow, fixed)
        seconds[contention] = placed.cost.seconds
        if contention == 1.0:
            candidate = sharded_candidate(graph(), placed.placement)
            step = realize(graph(), costs, machine, Job(64), candidate).simulation.step_seconds
            assert placed.cost.seconds == pytest.approx(step, rel=0.02)
    assert seconds[100.0] > seconds[1.0] * 1.005
