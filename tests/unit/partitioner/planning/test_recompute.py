"""Recompute as a user meets it: none, full, auto under memory, a model that asks for it, the plan that says so."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, PlanError, UsageError
from partitioner import Plan, partition
from partitioner.record.rebuild import plan_code
from passes.graph.graph import OpGraph
from passes.lower.lower import lower
from passes.trace.trace import trace

LAYERS = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.sin(torch.tanh(self.up(x))))
        return result


class Net(nn.Module):
    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def squares(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return trace(Net(), torch.randn(2, 32), loss_fn=squares)


def planned(graph: OpGraph, memory: str | None = None, **options: Any) -> Plan:
    wanted = {"batch_size": 8192, "microbatches": 4, "schedule": "1f1b", **options}
    return partition(graph, ClusterSpec.local(2, memory=memory), **{"strategy": "layer", **wanted})


def recomputed(plan: Plan) -> list[str]:
    return [name for stage in plan.stages for name in stage.recomputed_blocks]


def test_what_fits_is_planned_as_without(graph: OpGraph) -> None:
    auto, none = planned(graph), planned(graph, recompute="none")
    assert auto.recompute == "auto"
    assert recomputed(auto) == []
    assert [stage.model_dump() for stage in auto.stages] == [stage.model_dump() for stage in none.stages]
    assert auto.prediction == none.prediction
    assert "recompute" not in str(auto).split("search")[0]
    assert "activation recomputation" not in auto.not_considered


def test_full_keeps_what_blocks_read(graph: OpGraph) -> None:
    none, full = planned(graph, recompute="none"), planned(graph, recompute="full")
    assert set(recomputed(full)) == {f"layers.{i}" for i in range(LAYERS)}
    peaks = [max(plan.prediction.peak_memory_bytes.values()) for plan in (none, full)]
    assert peaks[1] < 0.6 * peaks[0]
    assert full.prediction.step_seconds > none.prediction.step_seconds
    assert all(stage.transient_bytes > 0 for stage in full.stages)
    assert "6 blocks in 2 of 2 stages run forward again in backward: layers.0-5" in " ".join(
        str(full).split()
    )
    assert "recompute: none, 0 blocks -> full, 6 blocks" in none.diff(full)
    code = lower(graph, plan_code(full, graph).segmentation)
    assert [len(code[stage].recomputed) for stage in range(2)] == [
        len(s.recomputed_blocks) for s in full.stages
    ]


def test_auto_computes_again_as_few_blocks_as_fit(graph: OpGraph) -> None:
    none, full = planned(graph, recompute="none"), planned(graph, recompute="full")
    most, least = (max(plan.prediction.peak_memory_bytes.values()) for plan in (none, full))
    counts = []
    for share in (0.9, 0.6, 0.3):
        memory = int(least + share * (most - least))
        plan = planned(graph, str(memory))
        counts.append(len(recomputed(plan)))
        assert max(plan.prediction.peak_memory_bytes.values()) <= memory
        assert (
            none.prediction.step_seconds
            <= plan.prediction.step_seconds
            <= 1.001 * full.prediction.step_seconds
        )
        assert "computes all its blocks again" in plan.certificate.space
    assert 1 <= counts[0] <= counts[1] <= counts[2]
    assert counts[0] < LAYERS


def test_none_that_does_not_fit_is_told_what_recompute_would_do(graph: OpGraph) -> None:
    none, full = planned(graph, recompute="none"), planned(graph, recompute="full")
    most, least = (max(plan.prediction.peak_memory_bytes.values()) for plan in (none, full))
    memory = str(least + (most - least) // 4)
    with pytest.raises(InfeasibleError) as caught:
        planned(graph, memory, recompute="none")
    assert any(way.startswith("recompute ") and "of 2 stages" in way for way in caught.value.suggestions)
    assert recomputed(planned(graph, memory))
    with pytest.raises(InfeasibleError) as caught:
        planned(graph, str(least // 4))
    assert not any(way.startswith("recompute ") for way in caught.value.suggestions)


def test_a_model_that_checkpoints_means_full_unless_told_otherwise() -> None:
    model = Net()
    model.gradient_checkpointing = True
    graph = trace(model, torch.randn(2, 32), loss_fn=squares)
    plan = planned(graph)
    assert plan.recompute == "full"
    assert len(recomputed(plan)) == LAYERS
    assert any("gradient checkpointing is enabled" in note and "again" in note for note in plan.notes)
    told = planned(graph, recompute="none")
    assert recomputed(told) == []
    assert any("recompute 'none' was asked for" in note for note in told.notes)


def test_unknown_words_are_refused(graph: OpGraph) -> None:
    with pytest.raises(UsageError) as caught:
        planned(graph, recompute="some")
    assert "recompute 'some' is not one of: none, gathers, selective, full, auto" in caught.value.because


def test_it_survives_the_file(graph: OpGraph) -> None:
    plan = planned(graph, recompute="full", schedule="zb-h1")
    again = Plan.from_json(plan.model_dump_json())
    assert again == plan
    simulated = again.simulate()
    assert simulated.step_seconds == plan.prediction.step_seconds
    assert {str(r): p for r, p in enumerate(simulated.peak_bytes)} == plan.prediction.peak_memory_bytes


def test_a_plan_with_blocks_that_the_model_does_not_have_is_refused(graph: OpGraph) -> None:
    data = json.loads(planned(graph, recompute="full").model_dump_json())
    data["stages"][0]["recomputed_blocks"] = ["layers.77"]
    with pytest.raises(PlanError, match="blocks that"):
        plan_code(Plan.from_json(json.dumps(data)), replace(graph))


# --------------------------------------------------------------------------------------------------
# Feature-wise: all blocks or none


def sharded(graph: OpGraph, memory: str | None = None, **options: Any) -> Plan:
    wanted = {"batch_size": 8192, "microbatches": 4, "strategy": "feature", "mesh": (2,), **options}
    return partition(graph, ClusterSpec.local(2, memory=memory), **{"strategy": "layer", **wanted})


def test_a_sharding_that_fits_is_planned_as_without(graph: OpGraph) -> None:
    default, auto, none = sharded(graph), sharded(graph, recompute="auto"), sharded(graph, recompute="none")
    assert (default.recompute, auto.recompute, none.recompute) == ("none", "auto", "none")
    assert recomputed(auto) == []
    assert [s.model_dump() for s in auto.stages] == [s.model_dump() for s in none.stages]
    assert [s.model_dump() for s in default.stages] == [s.model_dump() for s in none.stages]
    assert "computed again" not in auto.certificate.space
    assert any(said.startswith("recomputing some blocks only") for said in auto.not_considered)


def test_a_sharding_with_all_blocks_again(graph: OpGraph) -> None:
    none, full = sharded(graph, recompute="none"), sharded(graph, recompute="full")
    assert recomputed(full) == [f"layers.{i}" for i in range(LAYERS)]
    peaks = [max(plan.prediction.peak_memory_bytes.values()) for plan in (none, full)]
    assert peaks[1] < 0.6 * peaks[0]
    assert full.prediction.step_seconds > 1.1 * none.prediction.step_seconds
    assert "all blocks computed again in backward" in full.certificate.space
    assert "6 blocks in 1 of 1 stage run forward again in backward: layers.0-5" in " ".join(str(full).split())
    assert full.explain("layers.0.up.weight").ways  # the search's own count of what is recomputed
    loaded = Plan.from_json(full.model_dump_json())
    assert loaded == full
    assert loaded.simulate().step_seconds == full.simulate().step_seconds == full.prediction.step_seconds
    (code,) = plan_code(loaded, graph).lowered().values()
    assert len(code.recomputed) == LAYERS


def test_a_sharding_computes_blocks_again_only_where_nothing_fits_otherwise(graph: OpGraph) -> None:
    none, full = sharded(graph, recompute="none"), sharded(graph, recompute="full")
    most, least = (max(plan.prediction.peak_memory_bytes.values()) for plan in (none, full))
    plan = sharded(graph, str((most + least) // 2))
    assert plan.recompute == "auto"
    assert recomputed(plan) == recomputed(full)
    assert plan.prediction.step_seconds == full.prediction.step_seconds
    with pytest.raises(InfeasibleError) as caught:
        sharded(graph, str((most + least) // 2), recompute="none")
    assert any(way.startswith("recompute ") for way in caught.value.suggestions)
    with pytest.raises(InfeasibleError) as caught:
        sharded(graph, "1MiB")
    assert any("activations of 6 blocks" in reason for reason in caught.value.because)
    assert not any(way.startswith("recompute ") for way in caught.value.suggestions)


def test_a_sharded_model_that_checkpoints_means_full_too() -> None:
    model = Net()
    model.gradient_checkpointing = True
    plan = sharded(trace(model, torch.randn(2, 32), loss_fn=squares))
    assert plan.recompute == "full"
    assert len(recomputed(plan)) == LAYERS


def test_gathers_are_repeated_where_that_is_enough() -> None:
    """ZeRO-3 with small micro-batches: what is gathered for them is most of what is kept."""
    graph = trace(
        nn.Sequential(*(nn.Linear(512, 512) for _ in range(LAYERS))), torch.randn(2, 512), loss_fn=squares
    )
    zero3 = {"strategy": "feature", "pins": {"*": "zero3"}, "mesh": (2,), "batch_size": 8, "microbatches": 4}
    zero3["schedule"] = "auto"
    none, gathers = (planned(graph, recompute=mode, **zero3) for mode in ("none", "gathers"))
    assert recomputed(gathers) == ["gathers"]
    peaks = [max(plan.prediction.peak_memory_bytes.values()) for plan in (none, gathers)]
    assert peaks[1] < peaks[0]
    again = gathers.prediction.collectives - none.prediction.collectives
    assert again == 4 * 2 * (LAYERS - 1), "weight and bias; the first layer's input needs no gradient"
    assert "parameters in 1 of 1 stage are gathered again in backward" in " ".join(str(gathers).split())
    assert "recompute: none, 0 blocks -> gathers, gathered again in 1 stage" in none.diff(gathers)
    assert Plan.from_json(gathers.model_dump_json()) == gathers
    found = planned(graph, str(peaks[1]), **zero3)
    assert recomputed(found) == ["gathers"], "auto"
    assert found.recompute == "auto"


def test_pipelines_of_single_devices_gather_nothing(graph: OpGraph) -> None:
    with pytest.raises(UsageError, match="nothing is gathered"):
        planned(graph, recompute="gathers", strategy="layer")
    assert recomputed(planned(graph, recompute="gathers", strategy="auto")) == []


@pytest.mark.parametrize("strategy", ["hybrid", "feature"])
def test_a_model_without_scores_runs_no_attention_again(graph: OpGraph, strategy: str) -> None:
    plan = planned(graph, recompute="selective", strategy=strategy, schedule="auto")
    assert recomputed(plan) == []
    assert "recompute nothing: no attention here keeps scores" in " ".join(str(plan).split())
