"""``plan.deploy(model)``: this rank's share of a plan, ready to train. Called on every rank under torchrun."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_models.errors import PlanError, UsageError
from partitioner.api import ModelOrTrace, as_graph
from partitioner.deployment.state import holders_of, rank_state
from partitioner.engine import Engine
from partitioner.engine_batch import BatchReader
from partitioner.optimizers import make_optimizer
from partitioner.plan import Plan
from partitioner.rebuild import plan_programs, plan_segmentation, plan_segments
from partitioner.workloads import Workload
from passes.init_state import materialize
from passes.lower import lower
from runtime.execute import Executor
from runtime.launch import init_distributed
from runtime.program import Program


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
    state_dict: Mapping[str, Tensor] | None = None,
    init_fn: Callable[[nn.Module], None] | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    timeout_seconds: float = 30.0,
) -> Engine:
    """Build this rank's executor. Collective: every rank of the plan calls it.

    ``batch_dims``, ``dynamic_dims``: as :func:`partition` was given them; other open sizes make another model.
    Each rank materializes only its own parameters: from the real ``model``, from ``state_dict``, or from a meta model
    with ``init_fn``. ``optimizer``: a torch.optim class; the plan's own kind if not given. ``seed``: of dropout and of
    what ``init_fn`` draws. ``timeout_seconds``: how long a rank waits for another before it ends with an error that
    names it.
    """
    module = model.model if isinstance(model, Workload) else model
    if not isinstance(module, nn.Module):
        raise UsageError(
            "cannot deploy a trace", because=["weights are needed"], suggestions=["give the model itself"]
        )
    graph = as_graph(
        model,
        example_inputs=example_inputs,
        loss_fn=loss_fn,
        batch_dims=batch_dims,
        dynamic_dims=dynamic_dims,
    )
    segmentation = plan_segmentation(plan, graph)
    device = torch.device(device) if device is not None else _own_device(plan)
    init_distributed(device, timeout_seconds)
    rank = dist.get_rank()
    refuse_other_world(plan, dist.get_world_size())
    programs, segments = plan_programs(plan), plan_segments(plan)
    refuse_different_plans(plan, programs)
    mine = frozenset(segment.index for segment in segments.segments if rank in segment.ranks)
    codes = lower(graph, segmentation, device=str(device), only=mine)
    holders = holders_of(graph, segmentation)
    wanted = [name for name, ranks in holders.items() if rank in ranks]
    values = materialize(
        wanted, model=module, state_dict=state_dict, init_fn=init_fn, device=device, seed=seed
    )
    state = rank_state(graph, rank, holders, values, device)
    parameters = [p for p in state.parameters.values() if p.requires_grad]
    if optimizer is None:
        made = make_optimizer(plan.optimizer_memory, parameters, learning_rate)
    else:
        made = optimizer(parameters, **dict(optimizer_kwargs or {})) if parameters else None
    executor = Executor(
        programs[rank],
        codes,
        segments,
        state.leaves,
        graph.batch,
        device=device,
        timeout_seconds=timeout_seconds,
        programs=programs,
        seed=seed,
    )
    loss_segment = next(s for s, stage in enumerate(plan.stages) if graph.loss in stage.ops)
    has_loss_fn = loss_fn is not None or (isinstance(model, Workload) and model.loss_fn is not None)
    example = (
        model.example_inputs if example_inputs is None and isinstance(model, Workload) else example_inputs
    )
    reader = BatchReader(plan.model.name, module, example, has_loss_fn=has_loss_fn)
    return Engine(plan, executor, state, reader, made, plan.stages[loss_segment].devices[0])


def refuse_other_world(plan: Plan, world_size: int) -> None:
    """Raise PlanError when the processes that run are not those that were planned."""
    if world_size != plan.world_size:
        raise PlanError(
            f"the plan for {plan.model.name} does not fit this launch",
            because=[f"it is made for {plan.world_size} ranks, {world_size} are running"],
            suggestions=[f"start {plan.world_size} processes: {plan.launch_command().splitlines()[0]}"],
        )


def refuse_different_plans(plan: Plan, programs: Sequence[Program]) -> None:
    """Raise PlanError unless every rank brings the same plan. Collective.

    Ranks that each plan for themselves may differ where a time limit cut their searches short; they would wait for
    messages that nobody sends.
    """
    content = [
        plan.batch_size,
        [(stage.devices, stage.ops) for stage in plan.stages],
        list(map(str, programs)),
    ]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise PlanError(
            f"the ranks bring different plans for {plan.model.name}",
            because=[f"the plan of rank {rank} is not that of rank 0" for rank in others],
            suggestions=["plan once, save the plan, and load it on every rank"],
        )


def _own_device(plan: Plan) -> torch.device:
    kind = plan.cluster.devices[0].kind
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise PlanError(
                f"the plan for {plan.model.name} needs GPUs",
                because=["its cluster has CUDA devices and this process sees none"],
                suggestions=["run it on the planned machines, or plan for local:N CPU workers"],
            )
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")
