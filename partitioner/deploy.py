"""``plan.deploy(model)``: this rank's share of a plan, ready to train. Called on every rank under torchrun."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_models.errors import PlanError, RankFailureError, UsageError
from partitioner.api import ModelOrTrace, as_graph
from partitioner.optimizers import make_optimizer
from partitioner.plan import Plan
from partitioner.rebuild import plan_programs, plan_segmentation, plan_segments
from partitioner.workloads import Workload
from passes.batch import flatten_batch, forward_constants, forward_names
from passes.init_state import materialize
from passes.lower import lower
from runtime.execute import Executor
from runtime.launch import init_distributed
from runtime.microbatch import batch_size_of
from runtime.program import Program


class Deployment:
    """One rank of a running plan. ``parameters`` holds only what this rank owns, by the model's own names."""

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        state: Mapping[str, Tensor],
        leaf_names: tuple[str, ...],
        optimizer: torch.optim.Optimizer | None,
        loss_rank: int,
        constants_of: Callable[[Any], Mapping[str, object]] = lambda batch: {},
        constants: Mapping[str, object] | None = None,
    ) -> None:
        self.plan = plan
        self.executor = executor
        self.optimizer = optimizer
        self.parameters = {name: t for name, t in state.items() if isinstance(t, nn.Parameter)}
        self.buffers = {name: t for name, t in state.items() if not isinstance(t, nn.Parameter)}
        self._leaf_names = leaf_names
        self._loss_rank = loss_rank
        self._constants_of, self._constants = constants_of, dict(constants or {})

    def train_step(self, batch: Any) -> Tensor:
        """One optimizer step on ``batch`` (the whole batch, on every rank). Returns the loss, on every rank."""
        leaves = flatten_batch(batch, self._leaf_names)
        self._refuse_other_constants(batch)
        samples = batch_size_of(leaves, self.executor.batch_spec)
        if samples != self.plan.batch_size:
            raise PlanError(
                f"this batch does not fit the plan for {self.plan.model.name}",
                because=[f"it has {samples} samples, the plan is made for {self.plan.batch_size} a step"],
                suggestions=[
                    f"give batches of {self.plan.batch_size}",
                    f"plan again with batch_size={samples}",
                ],
            )
        loss = self.executor.train_step(leaves, self.plan.microbatches, self.optimizer)
        shared = torch.zeros((), dtype=torch.float64, device=self.executor.device)
        if loss is not None:
            shared.copy_(loss)
        if dist.get_world_size() > 1:
            try:
                dist.broadcast(shared, self._loss_rank)
            except RuntimeError as error:
                raise RankFailureError(
                    f"rank {self._loss_rank} failed or hangs: rank {dist.get_rank()} waited on it for the loss",
                    because=[str(error)],
                    suggestions=[f"read the log of rank {self._loss_rank}"],
                ) from error
        return shared

    def _refuse_other_constants(self, batch: Any) -> None:
        """Raise PlanError where a number (or word, or None) that forward gets is not the one that was traced."""
        if not self._constants:
            return
        given = self._constants_of(batch)
        changed = [
            f"{name} is {given[name]!r}, traced with {traced!r}"
            if name in given
            else f"{name} is a tensor or not given, traced with {traced!r}"
            for name, traced in self._constants.items()
            if name not in given or given[name] != traced
        ]
        if changed:
            raise PlanError(
                f"this batch does not fit the plan for {self.plan.model.name}",
                because=changed,
                suggestions=[
                    "make it a tensor, if it changes from step to step",
                    "plan again with this value",
                ],
            )

    def close(self) -> None:
        """Stop this rank's watchers; the process group stays for its owner."""
        self.executor.close()

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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
) -> Deployment:
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
    held = {name: kind for code in codes.values() for name, kind in code.held.items()}
    wanted = {name: kind for name, kind in held.items() if kind != "constant"}
    loaded = materialize(
        list(wanted), model=module, state_dict=state_dict, init_fn=init_fn, device=device, seed=seed
    )
    state: dict[str, Tensor] = {name: c.to(device) for name, c in graph.constants.items()}
    for name, kind in wanted.items():
        tensor = loaded[name]  # a copy of its own already
        is_parameter = kind == "parameter"
        state[name] = nn.Parameter(tensor, graph.parameters[name].requires_grad) if is_parameter else tensor
    parameters = [t for t in state.values() if isinstance(t, nn.Parameter) and t.requires_grad]
    if optimizer is None:
        made = make_optimizer(plan.optimizer_memory, parameters, learning_rate)
    else:
        made = optimizer(parameters, **dict(optimizer_kwargs or {})) if parameters else None
    executor = Executor(
        programs[rank],
        codes,
        segments,
        state,
        graph.batch,
        device=device,
        timeout_seconds=timeout_seconds,
        programs=programs,
        seed=seed,
    )
    loss_segment = next(s for s, stage in enumerate(plan.stages) if graph.loss in stage.ops)
    has_loss_fn = loss_fn is not None or (isinstance(model, Workload) and model.loss_fn is not None)
    constants_of = partial(forward_constants, module, has_loss_fn=has_loss_fn)
    example = (
        model.example_inputs if example_inputs is None and isinstance(model, Workload) else example_inputs
    )
    return Deployment(
        plan,
        executor,
        state,
        forward_names(module),
        made,
        plan.stages[loss_segment].devices[0],
        constants_of,
        constants_of(example),
    )


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
