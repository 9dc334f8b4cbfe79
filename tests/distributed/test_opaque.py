"""Opaque parts train as they do without a plan: in a pipeline, sharded, and freely placed, in float64 to 1e-9."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from cost_models.cluster import ClusterSpec
from partitioner import Plan, partition
from runtime.ranks.launch import WorkerPool
from tests.distributed import opaque_models as models

WAYS: Mapping[str, Mapping[str, Any]] = {
    "layer": {"strategy": "layer", "min_stages": 2, "max_stages": 2},
    "feature": {"strategy": "feature"},
    "free": {"strategy": "free", "pins": {"first": 0, "part": 1, "last": 2}},
}
DEVICES = {"layer": 2, "feature": 2, "free": 3}


def planned(name: str, way: str, **more: Any) -> Plan:
    case = models.CASES[name]
    options = dict(WAYS[way])
    if way == "free" and not list(case.part().parameters()):
        options["pins"] = {"first": 0, "last": 2}
    if way == "layer":
        options["microbatches"] = 1 if case.coupled else 2
    if way == "free" and case.coupled:
        options["microbatches"] = 1
    return partition(
        case.model(),
        ClusterSpec.local(DEVICES[way]),
        example_inputs=case.batch(),
        loss_fn=case.loss,
        batch_size=models.SAMPLES,
        optimizer_memory="momentum",
        **options,
        **more,
    )


def train(plan_json: str, name: str) -> tuple[list[float], dict[str, Tensor]]:
    """In a worker: the same steps by the plan."""
    case = models.CASES[name]
    plan = Plan.from_json(plan_json)
    losses = []
    with plan.deploy(
        case.model(),
        example_inputs=case.batch(),
        loss_fn=case.loss,
        optimizer=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.1, "momentum": 0.9},
    ) as engine:
        for seed in range(models.STEPS):
            losses.append(engine.train_step(case.batch(seed)).item())
        return losses, engine.state_dict()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", models.CASES)
def test_training_equals_the_plain_loop(name: str, way: str, pool: WorkerPool) -> None:
    plan = planned(name, way)
    assert any("opaque op" in note for note in plan.notes)
    expected_losses, expected = models.trained(name)
    results = pool.run(train, plan.model_dump_json(), name, world_size=DEVICES[way], timeout_seconds=120.0)
    for losses, state in results:
        assert losses == pytest.approx(expected_losses, rel=1e-9, abs=1e-12)
        for key, value in state.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)
    assert any(state.keys() == expected.keys() for _, state in results)
