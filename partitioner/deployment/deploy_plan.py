"""``plan.deploy(model)``: this rank's share of a plan, ready to train. Called on every rank under torchrun.

meet         every rank says what it is; rank 0 compares that with the plan: who plays which device, or a refusal
join         the process group, unless there is one
build        this rank's share: programs, code, tensors, optimizer; a rank that cannot ends the others
run          the executor over it, in an ``Engine``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.errors import UsageError
from partitioner.api import ModelOrTrace
from partitioner.deployment.compare import ranks_or_differences, refusal
from partitioner.deployment.facts import RankFacts, choose_device, own_facts
from partitioner.deployment.share import Recipe, build_share
from partitioner.engine import Engine
from partitioner.engine_batch import BatchReader
from partitioner.plan import Plan
from partitioner.workloads import Workload
from passes.graph import OpGraph
from runtime.execute import Executor
from runtime.launch import init_distributed
from runtime.meeting import Meeting
from runtime.relabel import RankMap


def deploy_plan(
    plan: Plan,
    model: ModelOrTrace,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    dynamic_dims: Mapping[str, list[int]] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    optimizer_kwargs: Mapping[str, Any] | None = None,
    learning_rate: float = 1e-3,
    weights: str | Path | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    init_fn: Callable[[nn.Module], None] | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    timeout_seconds: float = 30.0,
    check_memory: bool = True,
    check_hosts: bool = True,
    graph: OpGraph | None = None,
) -> Engine:
    """Build this rank's executor. Collective: every rank of the plan calls it. ``model`` itself is never changed.

    What the plan was made for
        ``model``: the module or Workload, real or on the meta device. ``example_inputs``, ``loss_fn``, ``batch_dims``,
        ``dynamic_dims``: as :func:`partition` was given them; other open sizes make another model. ``graph``: the
        model's training trace where it is at hand; else it is traced here.
    Weights
        Each rank materializes only its own parameters: from ``weights``, a safetensors file, a directory of them or a
        checkpoint, of which it reads its own bytes only; from ``state_dict``; from the real ``model``; or from a meta
        model with ``init_fn(module)``. ``seed``: of what ``init_fn`` draws, and of dropout.
    Training
        ``optimizer``: a torch.optim class, with ``optimizer_kwargs``; the plan's own kind with ``learning_rate`` if not
        given.
    Launch
        ``device``: GPU number LOCAL_RANK where the plan has GPUs, else the CPU, if not given. ``timeout_seconds``: how
        long a rank waits for another before it ends with an error that names it. ``check_memory``: refuse where less
        memory is free than the plan predicts. ``check_hosts``: where the cluster's nodes name their hosts, the
        processes there play these nodes' devices; without it rank r plays the r-th used device, wherever it runs.

    Raises PlanError on every rank, with every difference between the plan and the processes that run.
    """
    module = model.model if isinstance(model, Workload) else model
    if not isinstance(module, nn.Module):
        raise UsageError(
            "cannot deploy a trace", because=["weights are needed"], suggestions=["give the model itself"]
        )
    meeting = Meeting.join()
    own_device, ranks = agree_on_ranks(
        meeting, plan, module, device, check_memory=check_memory, check_hosts=check_hosts
    )
    init_distributed(own_device, timeout_seconds, meeting=meeting)
    recipe = Recipe(
        Workload(module, *_inputs(model, example_inputs, loss_fn), plan.model.name),
        batch_dims=batch_dims,
        dynamic_dims=dynamic_dims,
        optimizer=optimizer,
        optimizer_kwargs=dict(optimizer_kwargs or {}),
        learning_rate=learning_rate,
        weights=weights,
        state_dict=state_dict,
        init_fn=init_fn,
        seed=seed,
    )
    with meeting.all_or_none("build"):
        share = build_share(plan, recipe, ranks, meeting.rank, own_device, graph)
    executor = Executor(
        share.programs[meeting.rank],
        share.codes,
        share.segments,
        share.state.leaves,
        share.graph.batch,
        device=own_device,
        timeout_seconds=timeout_seconds,
        programs=share.programs,
        replan=share.replan,
        seed=seed,
    )
    workload = recipe.workload
    reader = BatchReader(
        plan.model.name, module, workload.example_inputs, has_loss_fn=workload.loss_fn is not None
    )
    return Engine(plan, executor, share.state, reader, share.optimizer, share.graph, share.keys)


def agree_on_ranks(
    meeting: Meeting,
    plan: Plan,
    model: nn.Module,
    device: str | torch.device | None,
    *,
    check_memory: bool,
    check_hosts: bool,
) -> tuple[torch.device, RankMap]:
    """This rank's device, and who plays which device of the plan. Collective; the same PlanError on every rank."""
    own_device, problem = choose_device(plan, device)
    mine = own_facts(plan, model, own_device, problem, chosen=device is not None)

    def judge(said: list[Any]) -> dict[str, Any]:
        facts = [RankFacts.from_dict(one) for one in said]
        ranks, problems, suggestions = ranks_or_differences(
            plan, facts, check_hosts=check_hosts, check_memory=check_memory
        )
        devices = None if ranks is None else ranks.device_of_rank
        return {"devices": devices, "problems": problems, "suggestions": suggestions}

    verdict = meeting.decide("launch", mine.to_dict(), judge)
    if verdict["devices"] is None or own_device is None:
        raise refusal(plan, verdict["problems"], verdict["suggestions"])
    return own_device, RankMap(tuple(verdict["devices"]))


def _inputs(
    model: ModelOrTrace, example_inputs: Any, loss_fn: Callable[..., Any] | None
) -> tuple[Any, Callable[..., Any] | None]:
    """What was given, else what the workload brings."""
    if isinstance(model, Workload):
        return (model.example_inputs if example_inputs is None else example_inputs), loss_fn or model.loss_fn
    return example_inputs, loss_fn
