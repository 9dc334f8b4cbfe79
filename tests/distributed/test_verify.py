"""``verify`` on real processes: every model once, the shapes of graph that pipelines get wrong, and planted faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from benchmarks.verify_matrix import SMOKE, Case, load, verify_case
from cost_models.cluster import ClusterSpec
from partitioner import Plan, VerificationError, Workload, partition
from passes.lower.placed_graph import PlacedGraph
from runtime.ranks.launch import WorkerPool
from runtime.segment.code import SegmentCode
from tests.support.matrix import thinned

SHOWN = [case for case in SMOKE if case.model in ("gpt2", "resnet50", "vgg16")]
"""Schedules that small models do not show below. ``test_verify_feature`` has two more models."""


@pytest.mark.parametrize(
    "case", thinned(SMOKE, SHOWN), ids=lambda case: f"{case.model}-{case.ranks}-{case.schedule}"
)
def test_a_real_model_computes_what_it_computed(case: Case, pool: WorkerPool) -> None:
    workload, graph = load(case.model)
    report = verify_case(case, workload, graph, pool)
    report.raise_if_different()
    assert report.compared["gradient"] > 10


class Branches(nn.Module):
    """Stages 0 -> 1, 0 -> 2, (1, 2) -> 3: an output with two consumer stages and edges that skip a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.left(hidden)) * torch.tanh(self.right(hidden)))


class Tied(nn.Module):
    """The first and the last stage share a parameter, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embed(x))))


class LateInput(nn.Module):
    """A second input, first used by the last stage; a dictionary between stages; a mask and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen, self.c = (nn.Linear(6, 6) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
        made = {"hidden": torch.tanh(self.a(x)), "mask": x > 0}
        self.seen += 1
        hidden = self.frozen(self.b(made["hidden"]))
        return torch.where(made["mask"], self.c(hidden * late), hidden)


def squared(output: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (output**2).mean()


def crossed(output: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), batch[0].flatten())


def planned(workload: Workload, pins: Mapping[str, int], ranks: int, schedule: str) -> Plan:
    cluster = ClusterSpec.local(ranks)
    return partition(
        workload, cluster, batch_size=7, microbatches=3, schedule=schedule, pins=pins, strategy="layer"
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_parallel_branches_skips_and_two_consumers(schedule: str, pool: WorkerPool) -> None:
    torch.manual_seed(0)
    workload = Workload(Branches(), (torch.randn(4, 6),), squared)
    pins = {"first": 0, "tanh": 0, "left": 1, "tanh_1": 1, "right": 2, "tanh_2": 2, "mul": 3, "last": 3}
    plan = planned(workload, pins, 4, schedule)
    assert [stage.devices for stage in plan.stages] == [(0,), (1,), (2,), (3,)]
    assert {(t.source, t.target) for t in plan.transfers} == {(0, 1), (0, 2), (1, 3), (2, 3)}
    plan.verify(workload, pool=pool).raise_if_different()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_parameter_tied_between_stages(schedule: str, pool: WorkerPool) -> None:
    torch.manual_seed(0)
    workload = Workload(Tied(), (torch.randint(0, 11, (4, 5)),), crossed)
    plan = planned(workload, {"embed": 0, "middle": 1, "head": 2}, 3, schedule)
    assert [(tied.name, tied.ranks) for tied in plan.tied] == [("embed.weight", (0, 2))]
    plan.verify(workload, pool=pool).raise_if_different()


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_inputs_first_used_late_masks_frozen_layers_and_buffers(schedule: str, pool: WorkerPool) -> None:
    torch.manual_seed(0)
    workload = Workload(LateInput(), (torch.randn(4, 6), torch.randn(4, 6)), squared)
    plan = planned(workload, {"a": 0, "b": 1, "c": 2}, 3, schedule)
    report = plan.verify(workload, pool=pool)
    report.raise_if_different()
    assert report.compared["buffer"] == 1


def test_the_first_op_that_differs_is_named(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    workload = Workload(Branches(), (torch.randn(4, 6),), squared)
    plan = planned(workload, {"first": 0, "last": 1}, 2, "1f1b")

    lowered = PlacedGraph.lowered

    def tampered(placed: PlacedGraph) -> dict[int, SegmentCode]:
        codes = lowered(placed)
        module = fx.GraphModule(nn.Module(), codes[1].module.graph)
        (multiplied,) = [n for n in module.graph.nodes if "mul" in n.name]
        multiplied.target = torch.ops.aten.add.Tensor
        module.recompile()
        return {**codes, 1: replace(codes[1], module=module)}

    monkeypatch.setattr(PlacedGraph, "lowered", tampered)
    report = plan.verify(workload, pool=pool)
    assert not report.passed
    assert report.first_difference is not None
    assert report.first_difference.startswith("mul (stage 1 on rank 1, micro-batch 0; module (root)")
    with pytest.raises(VerificationError, match="first op that differs: mul"):
        report.raise_if_different()


def test_a_fault_in_backward_only_is_said_to_be_one(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    workload = Workload(Tied(), (torch.randint(0, 11, (4, 5)),), crossed)
    plan = planned(workload, {"embed": 0, "head": 1}, 2, "1f1b")
    forgotten = plan.model_copy(update={"tied": ()})
    for guard in ("check", "refuse_wrong_stages"):  # these would refuse it
        monkeypatch.setattr(f"partitioner.record.rebuild.{guard}", lambda *_, **__: None)
    report = forgotten.verify(workload, pool=pool)
    assert {d.name for d in report.differences} == {"embed.weight"}
    assert report.first_difference is not None
    assert "the difference is in backward" in report.first_difference
