"""``plan.deploy(model)``: this rank's share of a plan, ready to train. Called on every rank under torchrun.

meet         every rank says what it is; rank 0 compares that with the plan: who plays which device, or a refusal
join         the process group, unless there is one
build        this rank's share: programs, code, tensors, optimizer; a rank that cannot ends the others
compile      its segments, where asked for
run          the executor over it, in an ``Engine``
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.errors import UsageError
from partitioner.batches.part_batch import agreed_place, data_place
from partitioner.deployment.agree import agree_on_ranks
from partitioner.deployment.share import Recipe, build_share, refuse_unlike_copies
from partitioner.engine.callbacks import Callback
from partitioner.engine.engine import Engine
from partitioner.engine.optimizer import refuse_optimizer_options
from partitioner.evaluation.placed import Deployed
from partitioner.models.as_graph import Check, ModelOrTrace
from partitioner.models.workload import Workload, workload_of
from partitioner.record.data import PlanData
from passes.graph.graph import OpGraph
from passes.trace.wrappers import unwrapped
from runtime.execute.execute import Executor
from runtime.ranks.launch import init_distributed
from runtime.ranks.meeting import Meeting
from runtime.segment.compiled import CompileOptions, compile_options

logger = logging.getLogger("partitioner")

LEARNING_RATE = 1e-3
BUILD_SECONDS = 1800.0
COMPILE_SECONDS = 3600.0
"""The times that ranks wait for the slowest one: to read its weights, and to compile."""


def deploy_plan(
    plan: PlanData,
    model: ModelOrTrace,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    dynamic_dims: Mapping[str, list[int]] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    optimizer_kwargs: Mapping[str, Any] | None = None,
    learning_rate: float | None = None,
    weights: str | Path | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    init_fn: Callable[[nn.Module], None] | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    timeout_seconds: float = 30.0,
    compile: bool | CompileOptions = False,
    check_memory: bool = True,
    check_hosts: bool = True,
    check_batches: int = 2,
    check: Check = "on",
    callbacks: Iterable[Callback] = (),
    graph: OpGraph | None = None,
) -> Engine:
    """Build this rank's executor. Collective: every rank of the plan calls it. ``model`` itself is never changed.

    The model that the plan was made for
        ``model``: the module or Workload, real or on the meta device. ``example_inputs``, ``loss_fn``, ``batch_dims``,
        ``dynamic_dims``: those that :func:`partition` was given; other open sizes make another model. ``graph``: the
        model's training trace where it is at hand; else it is traced here, and compared with a real model on rank 0
        unless ``check`` is "off" (see :func:`partition`).
    Weights
        Each rank materializes only its own parameters: from ``weights``, a safetensors file, a directory of them or a
        checkpoint, of which it reads its own bytes only; from ``state_dict``; from the real ``model``; or from a meta
        model with ``init_fn(module)``. ``seed``: decides what ``init_fn`` and dropout draw.
    Training
        ``optimizer``: a torch.optim class, with ``optimizer_kwargs``; the plan's own kind with ``learning_rate`` (1e-3)
        if not given.
    Running
        ``compile``: True, or options of ``torch.compile``, compiles each segment before this returns.
    Launch
        ``device``: GPU number LOCAL_RANK if the plan has GPUs, else the CPU, if not given. ``timeout_seconds``: the time
        that a rank waits for another before it ends with an error that names it. ``check_memory``: refuse where less
        memory is free than the plan predicts. ``check_hosts``: if the cluster's nodes name their hosts, the
        processes there play these nodes' devices; without it rank r plays the r-th used device, wherever it runs.
    Watching
        ``check_batches``: the number of first batches that are compared between ranks. ``callbacks``: those that are told
        of steps (``partitioner.engine.callbacks``), such as a ``CsvLogger``.

    Raises PlanError on every rank, with every difference between the plan and the processes that run.
    """
    refuse_optimizer_options(optimizer, optimizer_kwargs or {}, learning_rate)
    workload, options = deployed_workload(model, example_inputs, loss_fn), compile_options(compile)
    recipe = Recipe(
        workload,
        batch_dims=batch_dims,
        dynamic_dims=dynamic_dims,
        optimizer=optimizer,
        optimizer_kwargs=dict(optimizer_kwargs or {}),
        learning_rate=LEARNING_RATE if learning_rate is None else learning_rate,
        weights=weights,
        state_dict=state_dict,
        init_fn=init_fn,
        seed=seed,
        check=check,
    )
    meeting = Meeting.join()
    log_on_first_rank(meeting.rank)
    own_device, ranks = agree_on_ranks(
        meeting, plan, workload.model, device, check_memory=check_memory, check_hosts=check_hosts
    )
    init_distributed(own_device, timeout_seconds, meeting=meeting)
    with meeting.all_or_none("build", BUILD_SECONDS):
        share = build_share(plan, recipe, ranks, meeting.rank, own_device, graph)
    refuse_unlike_copies(meeting, share.state, seed)
    executor = Executor(
        share.own, device=own_device, timeout_seconds=timeout_seconds, seed=seed, compile=options
    )
    if options is not None:
        with meeting.all_or_none("compile", COMPILE_SECONDS):
            executor.warm_up(share.graph.example_shapes, plan.microbatch_sizes)
    place = agreed_place(data_place(plan, share.graph, executor), bool(executor.leaf_names), meeting)
    deployed = Deployed(
        plan, workload, dynamic_dims, share.graph, share.run, ranks, executor, share.state, place
    )
    return Engine(deployed, share.optimizer, share.keys, check_batches=check_batches, callbacks=callbacks)


def deployed_workload(
    model: ModelOrTrace, example_inputs: Any, loss_fn: Callable[..., Any] | None
) -> Workload:
    """Put together what is deployed: the module without a compiler's wrapper, and what was given or the workload brings."""
    workload = workload_of(model, example_inputs, loss_fn)
    module: object = workload.model
    if not isinstance(module, nn.Module):
        raise UsageError(
            "cannot deploy a trace", because=["weights are needed"], suggestions=["give the model itself"]
        )
    module, note = unwrapped(module)
    if note is not None:
        logger.info("%s", note)
    return replace(workload, model=module)


def _warnings_only(record: logging.LogRecord) -> bool:
    """Drop what is below WARNING: rank 0 says it for all."""
    return record.levelno >= logging.WARNING


def log_on_first_rank(rank: int) -> None:
    """Let this process, which is ``rank``, log below WARNING only if it is the first, from now on."""
    logger.removeFilter(_warnings_only)
    if rank != 0:
        logger.addFilter(_warnings_only)
