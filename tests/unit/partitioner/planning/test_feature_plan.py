"""Feature-wise and automatic plans through ``partition``: what they predict, say and compare, and any cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from partitioner import Plan, partition
from partitioner.planning.options import PlanOptions
from passes.trace.trace import trace
from runtime.program.program import ReduceGradients
from tests.distributed.sharded_models import Gpt, Mlp, gpt_batch

CLUSTERS = Path(__file__).parents[4] / "docs" / "clusters"
GRAPH = trace(Mlp(), {name: torch.randn(4, 8) for name in ("x", "y")})


def same(plan: Plan) -> None:
    """The file predicts what the plan does."""
    loaded = Plan.from_json(plan.model_dump_json())
    simulation = loaded.simulate()
    assert loaded == plan
    assert str(loaded) == str(plan)
    assert simulation.step_seconds == plan.prediction.step_seconds
    assert int(sum(simulation.pair_bytes.values())) == plan.prediction.communication_bytes


def test_a_zero_plan_counts_what_is_summed_and_what_is_gathered() -> None:
    plan = partition(
        GRAPH,
        ClusterSpec.parse("A100-40GB:2"),
        batch_size=16,
        strategy="feature",
        pins={"*": "zero1", "x": "S0"},
    )
    same(plan)
    (stage,) = plan.stages
    assert stage.sharding is not None
    assert stage.sharding.state
    split = sum(item.size_bytes for item in stage.sharding.gathers)
    summed = {item.scattered: sum(item.size_bytes) for item in stage.sharding.sums}
    assert split == summed[True], "float32 gradients and parameters"
    inside = sum(item.sent_bytes for item in stage.sharding.collectives)
    # Two ranks: (p-1)/p n to scatter, as much to gather, twice that to all-reduce; by each of them.
    by_each = inside + split / 2 + summed[True] / 2 + summed.get(False, 0)
    assert plan.prediction.communication_bytes == int(2 * by_each)
    reductions = {
        i
        for spans in plan.simulate().timeline
        for i in (s.instruction for s in spans)
        if isinstance(i, ReduceGradients)
    }
    count = len(stage.sharding.collectives) + len(reductions) + len(stage.sharding.gathers)
    assert plan.prediction.collectives == count
    assert "state       gradients and optimizer state of" in str(plan)
    assert f"in {count} collectives a step" in str(plan)


def test_sums_over_a_second_axis_are_of_what_the_first_left() -> None:
    pins = {"*": "data", "ids": "S0 S0", "labels": "S0 S0", "*.up.weight": "R/S0 R/R"}
    graph = trace(Gpt(), gpt_batch(4))
    cluster = ClusterSpec.parse("A100-40GB:4")
    plan = partition(graph, cluster, batch_size=16, strategy="feature", mesh=(2, 2), pins=pins)
    same(plan)
    (stage,) = plan.stages
    assert stage.sharding is not None
    weights = {"h.0.up.weight", "h.1.up.weight"}
    whole = 16 * 32 * 4
    found = [
        (item.scattered, item.axes, size)
        for item in stage.sharding.sums
        for name, size in zip(item.parameters, item.size_bytes, strict=True)
        if name in weights
    ]
    assert found == [(True, ("outer",), whole)] * 2 + [(False, ("inner",), whole // 2)] * 2
    assert [(g.axis, g.size_bytes) for g in stage.sharding.gathers] == [("outer", 2 * whole)]


@pytest.mark.parametrize("devices", [1, 3, 7])
def test_any_number_of_devices(devices: int) -> None:
    cluster = ClusterSpec.parse(f"A100-40GB:{devices}")
    plan = partition(GRAPH, cluster, batch_size=2 * devices, strategy="feature", mesh=(devices,))
    same(plan)
    assert plan.world_size == devices
    assert ("nothing to split" in str(plan)) == (devices == 1)


def test_a_batch_that_devices_cannot_share_is_noted_with_those_that_they_can() -> None:
    graph, cluster = trace(Gpt(), gpt_batch(4)), ClusterSpec.parse("cpu-worker:7")
    plan = partition(graph, cluster, batch_size=576, strategy="feature")
    assert len(plan.used_devices) == 6
    assert plan.notes[-1] == (
        "6 devices of 7 in use: 576 samples make no 7 equal parts, a batch of 574 or 581 does"
    )
    whole = partition(graph, cluster, batch_size=574, strategy="feature")
    assert len(whole.used_devices) == 7
    assert not any("equal parts" in note for note in whole.notes)


def test_unequal_devices_are_planned_by_the_slowest_and_that_is_said() -> None:
    cluster = ClusterSpec.load(CLUSTERS / "two-unlike-nodes.yaml")
    plan = partition(GRAPH, cluster, batch_size=12, strategy="feature", mesh=(6,))
    same(plan)
    assert "pace        all devices have equal parts, so the slowest of" in str(plan)


def test_devices_that_slow_a_sharding_down_are_left_out() -> None:
    cluster = ClusterSpec.load(CLUSTERS / "two-unlike-nodes.yaml")
    plan = partition(GRAPH, cluster, batch_size=12, strategy="feature")
    same(plan)
    whole = partition(GRAPH, cluster, batch_size=12, strategy="feature", mesh=(6,))
    assert len(plan.used_devices) < 6
    assert plan.prediction.step_seconds < whole.prediction.step_seconds


class Towers(torch.nn.Module):
    """Two stacks that need not wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = torch.nn.ModuleList(
            torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3))) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.towers
        return (first(x) + second(x)).square().mean()  # type: ignore[no-any-return]


def test_auto_is_hybrid_then_free_and_says_in_two_sentences_why() -> None:
    graph = trace(Towers(), (torch.randn(2, 512),), loss_fn=lambda loss, _: loss)
    plan = partition(
        graph, ClusterSpec.parse("A100-40GB:2"), batch_size=64, microbatches=1, time_limit_seconds=3
    )
    other = plan.alternatives[0]
    assert {plan.strategy, other.strategy.split(",")[0]} == {"hybrid", "free"}
    assert other.strategy.endswith(", the best found")
    assert other.step_seconds is not None
    assert other.step_seconds >= plan.prediction.step_seconds
    assert other.reason.endswith("slower")
    first, second = plan.notes[:2]
    assert first.endswith(".")
    assert "the best pipeline of single devices" in first or "no pipeline of single devices" in first
    assert "free" in second
    assert "tensor parallelism" not in str(plan)


def test_auto_answers_once_the_plan_is_proved_good_enough() -> None:
    layers = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    graph = trace(layers, torch.randn(4, 1024), loss_fn=lambda output, _: output.square().mean())
    plan = partition(graph, ClusterSpec.parse("A100-40GB:2"), batch_size=256)
    assert plan.strategy == "hybrid"
    assert plan.certificate.gap <= 0.01
    assert plan.notes[1] == (
        "Placements op by op were not looked for: this one is proved to be within 1.0% of the best pipelines and "
        "shardings."
    )
    assert not [other for other in plan.alternatives if other.strategy.startswith("free")]


@pytest.mark.parametrize(
    ("options", "strategies"),
    [
        ({}, ("hybrid", "free")),
        ({"schedule": "1f1b"}, ("hybrid",)),
        ({"fix": "data=2"}, ("hybrid",)),
        ({"objective": "latency"}, ("free",)),
        ({"max_stages": 1}, ("layer",)),
        ({"pins": {"*": 0}}, ("layer",)),
        ({"pins": {"*": 0}, "splits": {}}, ("free",)),
        ({"pins": {"*": "data"}}, ("feature",)),
        ({"pins": {"*": "data"}, "fix": "data=2"}, ("hybrid",)),
        ({"mesh": (2,)}, ("feature",)),
        ({"mesh": (2,), "max_stages": 1}, ()),
        ({"strategy": "layer"}, ("layer",)),
    ],
    ids=str,
)
def test_auto_plans_by_the_strategies_that_know_what_is_given(
    options: dict[str, Any], strategies: tuple[str, ...]
) -> None:
    assert PlanOptions(**options).searched == strategies


def test_auto_has_twenty_seconds_and_one_percent_a_strategy_alone_sixty() -> None:
    def limits(**options: Any) -> set[tuple[float | None, float]]:
        requests = PlanOptions(**options).requests(GRAPH, GRAPH.precision)
        return {(request.time_limit_seconds, request.gap) for request in requests}

    assert limits() == {(20.0, 0.01)}
    assert limits(time_limit_seconds=3.0) == {(3.0, 0.01)}
    assert limits(strategy="hybrid") == limits(pins={"*": 0}) == {(60.0, 0.0)}


def test_what_other_meshes_would_cost_is_told() -> None:
    plan = partition(GRAPH, ClusterSpec.local(4), batch_size=8, strategy="feature")
    meshes = {
        entry.strategy: entry.reason for entry in plan.alternatives if entry.strategy.startswith("mesh")
    }
    assert meshes
    assert all(reason.endswith(("% slower", "by the search's count")) for reason in meshes.values())
    assert any(reason.endswith("by the search's count") for reason in meshes.values()), (
        "not all were simulated"
    )


def test_a_mesh_that_is_no_shape_is_refused_in_words() -> None:
    with pytest.raises(UsageError, match=r"the mesh is 4, expected sizes such as \(2, 4\)"):
        partition(torch.nn.Identity(), ClusterSpec.local(4), strategy="feature", mesh=4)  # type: ignore[arg-type]
