"""Launches as they come: idle devices, hosts in any order, one plan for all, refusals that everybody hears alike."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError
from partitioner import Plan, Workload, deploy, partition
from partitioner.deployment import facts as deployment_facts
from partitioner.deployment.facts import plan_digest
from partitioner.engine.engine import Engine
from runtime.ranks.launch import WorkerPool
from tests.distributed.test_deploy import STEPS, batch, expected, workload
from tests.support.edited import edited
from tests.support.matrix import thinned

PINS = {"embed": 0, "middle": 1, "head": 2}
OPTIONS: dict[str, Any] = {"optimizer": torch.optim.AdamW, "optimizer_kwargs": {"lr": 1e-2}}
WORKER = {"device": {"preset": "cpu-worker", "memory": "4GiB"}, "links": "Gloo-local"}
HOSTS = ClusterSpec.from_dict(
    {
        "nodes": [
            {"name": "a", "host": "alpha", "count": 2, **WORKER},
            {"name": "b", "host": "beta", "count": 2, **WORKER},
        ],
        "network": {"bandwidth": "10Gbps", "latency": "50us"},
    }
)


def moved(plan: Plan, devices: Mapping[int, int]) -> Plan:
    """The same plan with device ``d`` played by ``devices[d]``."""
    data = plan.model_dump(mode="json")
    for stage, old in zip(data["stages"], plan.stages, strict=True):
        stage["devices"] = [devices[d] for d in old.devices]
    for transfer in data["transfers"]:
        transfer["source"], transfer["target"] = devices[transfer["source"]], devices[transfer["target"]]
    for tied, before in zip(data["tied"], plan.tied, strict=True):
        tied["ranks"] = sorted(devices[d] for d in before.ranks)
    return Plan.from_json(json.dumps(data))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Three stages on devices 0, 2 and 3 of two hosts; device 1 is idle."""
    made = partition(
        workload(), HOSTS, batch_size=7, microbatches=3, schedule="1f1b", pins=PINS, strategy="layer"
    )
    used = made.used_devices
    return moved(made, dict(zip(used, (0, 2, 3), strict=True)))


Result = tuple[list[float], dict[str, Tensor], dict[str, tuple[int, ...]]]


def trained(engine: Engine) -> Result:
    losses = [float(engine.train_step(batch())) for _ in range(STEPS)]
    return losses, {n: p.detach() for n, p in engine.parameters.items()}, dict(engine.state.holders)


def train(plan_json: str, hosts: list[str] | None, **options: Any) -> Result:
    """``hosts``: the host that each rank believes to be on."""
    plan = Plan.from_json(plan_json)
    rank = dist.get_rank()
    names = ("laptop",) if hosts is None else (f"{hosts[rank]}.site",)
    local = "0" if hosts is None else str(hosts[:rank].count(hosts[rank]))
    with (
        mock.patch.object(deployment_facts, "host_names", return_value=names),
        mock.patch.dict(os.environ, {"LOCAL_RANK": local}),
        plan.deploy(workload(), timeout_seconds=20.0, **OPTIONS, **options) as engine,
    ):
        return trained(engine)


def refused(function: str, *arguments: Any) -> tuple[str, str]:
    """(kind, text) of the error that the function of this file raises on this rank."""
    try:
        globals()[function](*arguments)
    except PartitionerError as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def check_trained(results: list[Result]) -> None:
    losses, parameters = expected()
    held: set[str] = set()
    for rank_losses, rank_parameters, _ in results:
        assert rank_losses == pytest.approx(losses, rel=1e-12)
        held |= set(rank_parameters)
        for name, tensor in rank_parameters.items():
            assert torch.allclose(tensor, parameters[name], rtol=1e-10, atol=1e-12), name
    assert held == set(parameters)


def test_idle_devices_get_no_process(plan: Plan, pool: WorkerPool) -> None:
    assert plan.used_devices == (0, 2, 3)
    assert plan.world_size == 3
    report = plan.verify(workload(), pool=pool)
    assert report.passed
    anywhere = pool.run(train_anywhere, plan.model_dump_json(), world_size=3, timeout_seconds=60.0)
    check_trained(anywhere)
    assert anywhere[0][2]["embed.weight"] == (0, 2), "holders are ranks of the launch, not devices"


def train_anywhere(plan_json: str) -> Result:
    return train(plan_json, None, check_hosts=False)


@pytest.mark.parametrize("hosts", [["beta", "alpha", "beta"], ["beta", "beta", "alpha"]])
def test_ranks_play_the_devices_of_their_hosts(hosts: list[str], plan: Plan, pool: WorkerPool) -> None:
    results = pool.run(train, plan.model_dump_json(), hosts, world_size=3, timeout_seconds=60.0)
    check_trained(results)
    first = hosts.index("alpha")
    middle, last = (rank for rank in range(3) if rank != first)
    assert set(results[first][1]) == {"embed.weight"}
    assert set(results[middle][1]) == {"middle.weight", "middle.bias"}
    assert "norm.weight" in results[last][1]
    assert results[0][2]["embed.weight"] == tuple(sorted((first, last)))


def test_other_hosts_are_refused_with_the_same_words_everywhere(plan: Plan, pool: WorkerPool) -> None:
    text = plan.model_dump_json()
    said = pool.run(refused, "train", text, ["alpha"] * 3, world_size=3, timeout_seconds=60.0)
    assert len(set(said)) == 1
    kind, message = said[0]
    assert kind == "PlanError"
    assert "host alpha: the plan has 1 rank there, 3 are running (global rank 0, 1, 2)" in message
    assert "host beta: the plan has 2 ranks there, none is running" in message


def differing(plan_json: str) -> None:
    """Rank 1 has another torch, rank 2 another plan; nobody has the memory."""
    plan, rank = Plan.from_json(plan_json), dist.get_rank()
    if rank == 2:
        plan = plan.model_copy(update={"schedule": "gpipe"})
    with (
        mock.patch.object(deployment_facts, "free_memory_bytes", return_value=1000),
        mock.patch.object(torch, "__version__", "1.0" if rank == 1 else "2.0"),
    ):
        plan.deploy(workload(), timeout_seconds=20.0, check_hosts=False)


def test_all_differences_of_all_ranks_are_told_to_all(plan: Plan, pool: WorkerPool) -> None:
    said = pool.run(refused, "differing", plan.model_dump_json(), world_size=3, timeout_seconds=60.0)
    assert len(set(said)) == 1
    for line in (
        "rank 1 has torch 1.0, rank 0 has 2.0",
        "the plan of rank 2 is not that of rank 0",
        "ranks 0, 1, 2 together need ",
    ):
        assert line in said[0][1]
    more = pool.run(refused, "train", plan.model_dump_json(), None, world_size=4, timeout_seconds=60.0)
    assert "it is made for 3 ranks, 4 are running" in more[3][1]


def fail_on_rank_1(plan_json: str) -> None:
    if dist.get_rank() == 1:
        with mock.patch("partitioner.deployment.share.values_of", side_effect=OSError("disk on fire")):
            Plan.from_json(plan_json).deploy(workload(), check_hosts=False)
    Plan.from_json(plan_json).deploy(workload(), check_hosts=False)


def test_a_rank_that_cannot_build_its_share_ends_the_others(plan: Plan, pool: WorkerPool) -> None:
    outcomes = pool.run_each(fail_on_rank_1, plan.model_dump_json(), world_size=3, timeout_seconds=60.0)
    assert [ok for ok, _ in outcomes] == [False] * 3
    assert "rank 1 cannot take part" in outcomes[0][1]
    assert "OSError: disk on fire" in outcomes[2][1]
    assert "disk on fire" in outcomes[1][1]


# ----------------------------------------------------------------------------------------------------------
# Without a plan


def plan_and_train(pins: Mapping[str, int]) -> tuple[Result, str]:
    with deploy(
        workload(),
        ClusterSpec.local(3),
        batch_size=7,
        microbatches=3,
        schedule="zb-h1",
        pins=pins,
        timeout_seconds=20.0,
        **OPTIONS,
    ) as engine:
        return trained(engine), engine.plan.model_dump_json()


def test_rank_0_plans_for_everybody(pool: WorkerPool) -> None:
    results = pool.run(plan_and_train, PINS, world_size=3, timeout_seconds=100.0)
    check_trained([result for result, _ in results])
    assert len({text for _, text in results}) == 1
    assert Plan.from_json(results[0][1]).schedule == "zb-h1"


def test_what_cannot_be_planned_is_refused_everywhere_alike(pool: WorkerPool) -> None:
    said = pool.run(refused, "plan_and_train", {"nowhere": 0}, world_size=3, timeout_seconds=60.0)
    assert len(set(said)) == 1
    assert "nowhere" in said[0][1]


def plan_a_tiny_model(options: Mapping[str, Any]) -> tuple[Result, str]:
    """One that two ranks make slower."""
    cluster = ClusterSpec.local(2)
    layers = {"strategy": "layer", "timeout_seconds": 20.0, **OPTIONS, **options}
    with deploy(workload(), cluster, batch_size=7, **layers) as engine:
        return trained(engine), engine.plan.certificate.space


def test_ranks_that_a_plan_leaves_idle_are_used_where_that_is_asked_for(pool: WorkerPool) -> None:
    said = pool.run(refused, "plan_a_tiny_model", {}, world_size=2, timeout_seconds=60.0)
    assert len(set(said)) == 1
    assert "the search left 1 of 2 devices idle: no faster plan was found" in said[0][1]
    assert "torchrun --standalone --nproc-per-node 1 YOUR_SCRIPT" in said[0][1]
    assert "min_stages=2" in said[0][1]
    results = pool.run(plan_a_tiny_model, {"min_stages": 2}, world_size=2, timeout_seconds=100.0)
    check_trained([result for result, _ in results])
    assert "2 devices or more" in results[0][1]
    said = pool.run(refused, "plan_a_tiny_model", {"min_stages": 3}, world_size=2, timeout_seconds=60.0)
    assert said[0] == said[1]
    assert said[0][0] == "InfeasibleError"


def own_plan() -> str:
    return plan_digest(partition(workload(), ClusterSpec.local(2), batch_size=7, strategy="layer"))


def test_processes_that_each_plan_find_equal_plans(pool: WorkerPool) -> None:
    assert len(set(pool.run(own_plan, world_size=3, timeout_seconds=60.0))) == 1


# ----------------------------------------------------------------------------------------------------------
# The user's model, and compiled segments


def states(model: nn.Module) -> list[Any]:
    """Everything of a model that a deployment might touch."""
    tensors = [
        (n, id(t), t.requires_grad, str(t.device), t.grad is None)
        for n, t in model.state_dict(keep_vars=True).items()
    ]
    hooks = [
        len(table)
        for module in model.modules()
        for table in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    ]
    flags = [(module.training, sorted(vars(module))) for module in model.modules()]
    contents = [tensor.detach().clone().tolist() for tensor in model.state_dict().values()]
    return [tensors, hooks, flags, contents]


def train_watched(plan_json: str, compile: Any) -> tuple[Result, bool]:
    made = workload()
    made.model.eval()
    made.model.get_parameter("norm.bias").requires_grad_(True)
    before = states(made.model)
    plan = Plan.from_json(plan_json)
    options = {**OPTIONS, "check_hosts": False, "compile": compile}
    with plan.deploy(made, timeout_seconds=20.0, **options) as engine:
        result = trained(engine)
    return result, states(made.model) == before


@pytest.mark.parametrize("schedule", thinned(["1f1b", "zb-h1"], ["zb-h1"]))
def test_compiled_segments_train_alike_and_the_model_is_not_touched(
    schedule: str, plan: Plan, pool: WorkerPool
) -> None:
    text = edited(plan, schedule=schedule).model_dump_json()
    results = pool.run(train_watched, text, {"backend": "aot_eager"}, world_size=3, timeout_seconds=200.0)
    check_trained([result for result, _ in results])
    assert [untouched for _, untouched in results] == [True] * 3


def compiled_workload() -> Workload:
    made = workload()
    model: Any = torch.compile(made.model)
    return Workload(model, made.example_inputs, made.loss_fn, "net")


def train_compiled_model(plan_json: str) -> Result:
    plan = Plan.from_json(plan_json)
    with plan.deploy(compiled_workload(), timeout_seconds=20.0, check_hosts=False, **OPTIONS) as engine:
        return trained(engine)


def test_a_compiled_model_is_deployed_and_verified_without_its_wrapper(plan: Plan, pool: WorkerPool) -> None:
    check_trained(pool.run(train_compiled_model, plan.model_dump_json(), world_size=3, timeout_seconds=60.0))
    assert plan.verify(compiled_workload(), pool=pool).passed
