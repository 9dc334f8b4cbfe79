"""Two sharded stages on groups of their own, run side by side: nothing goes from one to the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cost_models.cluster import ClusterSpec
from partitioner import Plan, Workload, partition
from passes.graph.graph import OpGraph
from runtime.ranks.launch import WorkerPool
from tests.support.edited import edited
from tests.support.matrix import thinned
from tests.support.towers import Towers, batch, loss_fn, tower_of, traced

GROUPS = ((3, 1), (0, 2))
"""The devices of the tower with the loss, and of the other one."""


def workload() -> Workload:
    torch.manual_seed(0)
    return Workload(Towers().double(), batch(4), loss_fn, "towers")


def side_by_side(graph: OpGraph, patterns: str) -> Plan:
    """A plan of one stage on two devices as one of two stages, each of a tower, on two devices."""
    given = {"strategy": "feature", "mesh": (2,), "pins": {"*": patterns}, "batch_size": 8, "microbatches": 2}
    plan = partition(graph, ClusterSpec.local(2), **{"strategy": "layer", **given})
    (stage,) = plan.stages
    assert stage.sharding is not None
    towers, stages = tower_of(graph), []
    for index, devices in enumerate(GROUPS):
        ops = tuple(op for op in stage.ops if towers[op] == index)
        sums = tuple(s for s in stage.sharding.sums if s.parameters[0].startswith(("left", "right")[index]))
        sharding = stage.sharding.model_copy(
            update={
                "choices": {op: ways for op, ways in stage.sharding.choices.items() if op in ops},
                "collectives": (),
                "sums": sums,
            }
        )
        fields = {"devices": devices, "ops": ops, "sharding": sharding, "has_backward": index == 0}
        stages.append(stage.model_copy(update=fields))
    four = {str(rank): 1 for rank in range(4)}
    made = edited(
        plan,
        strategy="hybrid",
        cluster=ClusterSpec.local(4),
        stages=tuple(stages),
        state_bytes=four,
        state_parts={},
        optimizer_seconds=four,
        update_bytes={},
        risk=None,
        prediction=plan.prediction.model_copy(update={"peak_memory_bytes": four}),
    )
    return Plan.from_json(made.model_dump_json())


@pytest.mark.parametrize("patterns", thinned(["data", "zero3", "column_row"], ["zero3", "column_row"]))
def test_two_groups_train_as_one_device(pool: WorkerPool, patterns: str) -> None:
    made = workload()
    graph = traced(made.model)
    plan = side_by_side(graph, patterns)
    report = plan.verify(made, pool=pool)
    report.raise_if_different()
    assert report.mesh == ()
    assert report.compared["parameter"] >= len(graph.parameters)
    text = str(plan.graph(graph, rank=2))
    assert text.startswith("rank 2 of 4 · Towers · mesh 2 · b: ")
    assert "stage 1" in text
    assert "left" not in text


def evaluate(plan_json: str) -> list[Any]:
    """In a worker: evaluations of several sizes, one of which no mesh divides, after a step of training."""
    made, found = workload(), []
    with Plan.from_json(plan_json).deploy(made, timeout_seconds=30.0, check_memory=False) as engine:
        engine.train_step(samples(8))
        before = {name: leaf.detach().clone() for name, leaf in engine.state.leaves.items()}
        for count in SIZES:
            output = engine.eval_step(samples(count), gather="all")
            assert output.outputs is not None
            found.append((output.loss, output.metrics["right"], dict(output.outputs)))
        assert all(torch.equal(leaf, before[name]) for name, leaf in engine.state.leaves.items())
        return [engine.state_dict(), *found]


SIZES = (8, 5, 19)


def samples(count: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(count)
    return batch(count)


@pytest.mark.parametrize("patterns", thinned(["data", "zero3", "column_row"], ["data", "column_row"]))
def test_two_groups_evaluate_as_one_device(pool: WorkerPool, patterns: str) -> None:
    """Each rank has the outputs of its own group, and gets those of the other."""
    plan = side_by_side(traced(workload().model), patterns)
    results = pool.run(evaluate, plan.model_dump_json(), world_size=4, timeout_seconds=120.0)
    reference = workload().model.eval()
    reference.load_state_dict(results[0][0])
    for number, count in enumerate(SIZES, 1):
        data = samples(count)
        with torch.no_grad():
            output = reference(data["x"])
            loss, metrics = loss_fn(output, data)
        for result in results:
            found_loss, metric, outputs = result[number]
            torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(metric, metrics["right"], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(outputs, output, rtol=1e-12, atol=1e-12)
