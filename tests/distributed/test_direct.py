"""Gradients that go back in parts of sums, on two and two real processes: added by those who made the value, in float64."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from benchmarks.plan_tasks import plan_task
from cost_models.cluster import ClusterSpec
from partitioner import Plan, Workload, partition
from partitioner.models.as_graph import as_graph
from partitioner.record.rebuild import simulate_plan
from partitioner.verify.verify import verify_plan
from passes.graph.graph import OpGraph
from runtime.execute.pieces import MovedPieces
from runtime.ranks.launch import WorkerPool
from tests.distributed.free_tasks import count_sent
from tests.distributed.planted import nothing, plant
from tests.support.matrix import thinned

WIDTH = 24
CASES = [
    ("1f1b", (2, 2), 1, "none"),
    ("gpipe", (1, 3), 1, "none"),
    ("zb-h1", (2, 2), 1, "none"),
    ("interleaved", (2, 2), 2, "none"),
    ("1f1b", (2, 2), 1, "full"),
]
"""Schedule, ranks of the groups, stages of each, recomputation."""


class Layers(nn.Module):
    """x [b, 3, 24] -> [b, 3, 24]; each part of a layer reads all that the one before makes."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def workload(stages: int) -> Workload:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = torch.randn(4, 3, WIDTH)
        return Workload(Layers(stages), x, lambda y, x: (y - x).square().mean(), "layers")


def plan_of(graph: OpGraph, schedule: str, groups: tuple[int, ...], rounds: int, recompute: str) -> Plan:
    """A layer per stage, by columns."""
    linear = [node.name for node in graph.ops if "linear" in str(node.target)]
    fix = {"groups": groups, "interleave": rounds, "borders": tuple(linear[1:]), "recompute": recompute}
    return partition(
        graph,
        ClusterSpec.local(4),
        strategy="hybrid",
        fix=fix,
        pins={"layers.*.weight": "S0"} if max(groups) > 1 else {},
        schedule=schedule,
        microbatches=4,
        batch_size=24,
        optimizer_memory="sgd",
    )


def parts_sent(plan: Plan) -> int:
    """Count the stages that send parts of a gradient back."""
    return sum(
        "~" in text for stage in plan.stages if stage.sharding for text in stage.sharding.values.values()
    )


@pytest.mark.parametrize(("schedule", "groups", "rounds", "recompute"), thinned(CASES, [CASES[1], CASES[3]]))
def test_gradients_in_parts_are_those_of_the_model(
    schedule: str, groups: tuple[int, ...], rounds: int, recompute: str, pool: WorkerPool
) -> None:
    work = workload(len(groups) * rounds)
    graph = as_graph(work)
    plan = plan_of(graph, schedule, groups, rounds, recompute)
    assert parts_sent(plan) == len(plan.stages) - 1
    report = verify_plan(Plan.from_json(plan.model_dump_json()), work, pool=pool, graph=graph)
    report.raise_if_different()
    assert report.compared["gradient"] == 2 * len(plan.stages)


@pytest.mark.parametrize("groups", [(2, 2), (1, 3), (1, 1, 1, 1)])
def test_process_groups_are_given_what_was_simulated(groups: tuple[int, ...], pool: WorkerPool) -> None:
    """Of the plan's whole batch: each rank gives each of the next group what it makes, and gets as much of a gradient."""
    work = workload(len(groups))
    batch = work.example_inputs.repeat(6, 1, 1)
    full = Workload(work.model, batch, work.loss_fn, work.name)
    plan = plan_of(as_graph(work), "1f1b", groups, 1, "none")
    sent = Counter[tuple[int, int]]()
    task = plan_task(plan, full, as_graph(work))
    for part in pool.run(count_sent, task, world_size=plan.world_size, timeout_seconds=60):
        sent.update(part)
    wanted = {
        ends: batch.numel() * batch.element_size() // len(before)
        for before, after in itertools.pairwise(stage.devices for stage in plan.stages)
        for a, b in itertools.product(before, after)
        for ends in ((a, b), (b, a))
    }
    assert sent == simulate_plan(plan).message_bytes == wanted


def the_first_part_alone() -> Any:
    """Ranks forget to add what comes after the first part."""
    return mock.patch.object(MovedPieces, "add", lambda self, keeper: self._addends.pop(keeper, None))


@pytest.mark.parametrize("fault", [nothing, the_first_part_alone])
def test_a_part_that_is_not_added_is_seen(fault: Callable[[], Any], mended: WorkerPool) -> None:
    work = workload(2)
    graph = as_graph(work)
    plan = plan_of(graph, "1f1b", (2, 2), 1, "none")
    mended.run(plant, fault)
    report = verify_plan(plan, work, pool=mended, graph=graph)
    assert report.passed == (fault is nothing)
    if fault is not nothing:
        assert {difference.kind for difference in report.differences} >= {"gradient"}
