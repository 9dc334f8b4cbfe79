"""Plans at a risk of not fitting, as a user meets them: safe where something is, else they say so first of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from cost_models.room import room_share
from cost_models.units import parse_bytes
from partitioner import Plan, partition
from partitioner.record.rebuild import simulate_plan
from passes.graph.graph import OpGraph
from passes.trace.trace import trace

LAYERS = 6
LEANEST = 6_951_968
"""Bytes that the leanest pipeline of two devices takes that computes nothing again."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.sin(torch.tanh(self.up(x))))
        return result


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    return trace(model, torch.randn(2, 32), loss_fn=lambda output, batch: output.square().mean())


def planned(graph: OpGraph, memory_bytes: int, **options: Any) -> Plan:
    wanted = {"batch_size": 4096, "microbatches": 4, "strategy": "layer", "schedule": "1f1b", **options}
    return partition(graph, ClusterSpec.local(2, memory=memory_bytes), **wanted)


@pytest.fixture(scope="module")
def filling(graph: OpGraph) -> int:
    """The memory that a plan without recomputation fills to the last byte."""
    roomy = planned(graph, 1 << 30, risk=0.5, recompute="none")
    return max(roomy.prediction.peak_memory_bytes.values())


def test_a_plan_keeps_within_its_risk_where_it_can(graph: OpGraph, filling: int) -> None:
    """Predictions that fill the memory need no recomputation; those within a risk of 5% do."""
    full, safe = planned(graph, filling, risk=0.5), planned(graph, filling)
    assert not any(stage.recomputed_blocks for stage in full.stages)
    assert full.intervals.chance_of_not_fitting > 0.3
    assert any(stage.recomputed_blocks for stage in safe.stages)
    assert safe.intervals.chance_of_not_fitting <= 0.05
    assert safe.risk is not None
    assert safe.risk.allowed == 0.05
    assert safe.risk.chance == safe.intervals.chance_of_not_fitting
    assert set(safe.room_bytes) == {int(room_share("cpu", 0.05) * filling)}
    assert max(safe.prediction.peak_memory_bytes.values()) <= min(safe.room_bytes)
    assert not safe.risk.ways
    assert "not safe" not in str(safe)
    assert all(other.chance_of_not_fitting is not None for other in safe.alternatives)


def test_where_nothing_is_safe_the_plan_says_so_first_and_what_would_be(graph: OpGraph) -> None:
    """The leanest plan without recomputation fills the memory."""
    with pytest.raises(InfeasibleError):
        planned(graph, LEANEST - 1, risk=0.5, recompute="none")
    full, unsafe = (planned(graph, LEANEST, risk=risk, recompute="none") for risk in (0.5, 0.05))
    assert unsafe.prediction == full.prediction
    assert unsafe.risk is not None
    assert unsafe.risk.allowed == 0.05 < unsafe.risk.chance
    assert unsafe.is_too_risky
    assert not full.is_too_risky
    assert any("recompute" in way for way in unsafe.risk.ways)
    assert str(unsafe).startswith("not safe    ")
    assert "chance of not fitting, 5% allowed; nothing safer was found" in " ".join(str(unsafe).split())
    assert Plan.from_json(unsafe.to_json()) == unsafe


def test_where_nothing_fits_at_all_the_ways_out_make_it_safe(graph: OpGraph, filling: int) -> None:
    memory, refused = [], []
    for risk in (0.5, 0.05):
        with pytest.raises(InfeasibleError) as error:
            planned(graph, filling // 8, risk=risk, strategy="hybrid")
        refused.append(error.value.because)
        (way,) = (way for way in error.value.suggestions if way.startswith("devices with "))
        memory.append(parse_bytes(way.removeprefix("devices with ").partition(" of ")[0]))
    assert refused[0] == refused[1]
    assert memory[1] == pytest.approx(memory[0] / room_share("cpu", 0.05), rel=0.02)


@pytest.mark.parametrize("strategy", ["layer", "feature", "hybrid", "free"])
def test_every_strategy_keeps_within_the_risk(graph: OpGraph, filling: int, strategy: str) -> None:
    plan = planned(graph, filling, strategy=strategy, schedule="auto", microbatches="auto", risk=0.1)
    assert plan.intervals.chance_of_not_fitting <= 0.1
    assert simulate_plan(plan).step_seconds == plan.prediction.step_seconds
