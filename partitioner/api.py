"""``partition(model, cluster) -> Plan``: the public entry, from a model to a saved, proved, explained plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, TypeGuard, get_args

import torch

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from cost_models.memory import OPTIMIZERS
from cost_models.precision import Precision
from partitioner.made_with import MadeWith
from partitioner.plan import Plan
from partitioner.workloads import Workload
from passes.check_precision import check_precision
from passes.compile import compile_graph
from passes.graph import OpGraph
from passes.layer_options import RecomputeMode
from passes.loss_reduction import LossReduction, refuse_other_reduction
from passes.place_layers import LayerRequest
from passes.trace import trace
from runtime.collector import collector_paused
from runtime.schedules import SCHEDULES

ModelOrTrace: TypeAlias = torch.nn.Module | OpGraph | Workload

STRATEGIES = ("layer",)
RECOMPUTE_MODES: tuple[RecomputeMode, ...] = get_args(RecomputeMode)
MOST_SAMPLES = 1 << 30
MOST_MICROBATCHES = 1 << 16
"""Beyond these a number is a typing error: programs list every micro-batch."""


def partition(
    model: ModelOrTrace,
    cluster: ClusterSpec,
    *,
    example_inputs: Any = None,
    batch_size: int | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer_memory: str = "adamw",
    precision: Precision | None = None,
    loss_reduction: LossReduction | None = None,
    strategy: str = "layer",
    schedule: str = "auto",
    microbatches: int | Literal["auto"] = "auto",
    pins: Mapping[str, int] | None = None,
    recompute: RecomputeMode | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    dynamic_dims: Mapping[str, list[int]] | None = None,
    min_stages: int | None = None,
    max_stages: int | None = None,
    time_limit_seconds: float = 60.0,
    name: str | None = None,
) -> Plan:
    """Plan how ``model`` trains on ``cluster``.

    ``model``: a module, a :class:`Workload`, or the result of :func:`trace` (trace once to compare several plans).
    ``example_inputs``: one batch as the model is called with (a tensor, tuple or mapping); its values do not matter.
    ``batch_size``: samples per optimizer step; the example's own batch size if not given.
    ``microbatches``: how many pieces the batch is cut into (this *is* gradient accumulation), or "auto".
    ``schedule``: "auto" or one of gpipe 1f1b interleaved zb-h1 zb-h2 zb-v list.
    ``optimizer_memory``: whose state is budgeted: none sgd momentum adam adamw amsgrad.
    ``precision``: a :class:`Precision`, the model's own data types if not given. A trace keeps what it was traced in.
    ``loss_reduction``: how micro-batches' losses become the batch's: "mean" (weighted by samples), "sum", or "token_mean"
    (by the whole batch's valid labels); what the loss itself asks for if not given.
    ``pins``: {glob over module paths or op names: stage}.
    ``min_stages``, ``max_stages``: use so many devices or more, each with a stage at least; so many stages or fewer.
    ``recompute``: whether backward computes the activations of blocks (layers) again: "none", "full" (every block), or
    "auto" (where memory asks for it). By default auto, but full for a model with gradient checkpointing enabled.

    Raises ClusterError, ModelError, UsageError, or InfeasibleError with the computed ways out.
    """
    if not isinstance(cluster, ClusterSpec):
        raise UsageError(
            f"cannot plan for a cluster of type {type(cluster).__name__}",
            because=["a ClusterSpec is expected"],
            suggestions=[
                'ClusterSpec.load("cluster.yaml"), ClusterSpec.preset("dgx-h100", nodes=8)'
                " or ClusterSpec.local(2)"
            ],
        )
    check_options(
        strategy=strategy,
        schedule=schedule,
        optimizer_memory=optimizer_memory,
        batch_size=batch_size,
        microbatches=microbatches,
        min_stages=min_stages,
        max_stages=max_stages,
        time_limit_seconds=time_limit_seconds,
        pins=pins,
        recompute=recompute,
    )
    graph = as_graph(
        model,
        example_inputs=example_inputs,
        loss_fn=loss_fn,
        batch_dims=batch_dims,
        dynamic_dims=dynamic_dims,
        precision=precision,
        loss_reduction=loss_reduction,
        name=name,
    )
    if graph.loss is None:
        raise UsageError(
            f"cannot plan training of {graph.model_name}",
            because=["the trace has no loss"],
            suggestions=["give `loss_fn=`, or a model that returns its loss"],
        )
    precision = graph.precision if precision is None else Precision.checked(precision)
    check_precision(graph, precision, optimizer_memory)
    request = LayerRequest(
        batch_size=graph.example_batch_size if batch_size is None else batch_size,
        microbatches=microbatches,
        schedule=schedule,
        optimizer=optimizer_memory,
        precision=precision,
        pins=dict(pins or {}),
        min_stages=min_stages,
        max_stages=max_stages,
        recompute=recompute or ("full" if graph.checkpointing else "auto"),
        time_limit_seconds=time_limit_seconds,
    )
    check_microbatches(request.batch_size, microbatches)
    from partitioner.describe import describe

    with collector_paused():  # describing reads a million small objects that compiling made
        plan = describe(graph, cluster, request, compile_graph(graph, cluster, request))
    plan._made_with = MadeWith.of(model, example_inputs, loss_fn, batch_dims, dynamic_dims, graph)
    return plan


def as_graph(
    model: ModelOrTrace,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    dynamic_dims: Mapping[str, list[int]] | None = None,
    precision: Precision | None = None,
    loss_reduction: LossReduction | None = None,
    name: str | None = None,
) -> OpGraph:
    """The training graph of ``model``; traces unless it is one already."""
    if isinstance(model, OpGraph):
        refuse_other_reduction(model, loss_reduction)
        return model
    if isinstance(model, Workload):
        example_inputs = model.example_inputs if example_inputs is None else example_inputs
        loss_fn = model.loss_fn if loss_fn is None else loss_fn
        name = name or model.name or None
        model = model.model
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"cannot partition a {type(model).__name__}",
            because=["a torch.nn.Module, a Workload or the result of partitioner.trace() is expected"],
        )
    if example_inputs is None:
        raise UsageError(
            f"cannot trace {type(model).__name__}",
            because=["no example inputs were given"],
            suggestions=["give `example_inputs=`: one batch, as you would call the model with"],
        )
    return trace(
        model,
        example_inputs,
        loss_fn=loss_fn,
        batch_dims=batch_dims,
        dynamic_dims=dynamic_dims,
        precision=precision,
        loss_reduction=loss_reduction,
        name=name,
    )


def check_options(
    *,
    strategy: str,
    schedule: str,
    optimizer_memory: str,
    batch_size: int | None,
    microbatches: int | Literal["auto"],
    min_stages: int | None,
    max_stages: int | None,
    time_limit_seconds: float,
    pins: Mapping[str, int] | None = None,
    recompute: str | None = None,
) -> None:
    """Refuse unknown words and numbers that mean nothing, all at once."""
    problems = []
    if strategy not in STRATEGIES:
        problems.append(f"strategy {strategy!r} is not one of: {', '.join(STRATEGIES)}")
    if schedule != "auto" and schedule not in SCHEDULES:
        problems.append(f"schedule {schedule!r} is not one of: auto, {', '.join(SCHEDULES)}")
    if optimizer_memory not in OPTIMIZERS:
        problems.append(f"optimizer memory {optimizer_memory!r} is not one of: {', '.join(OPTIMIZERS)}")
    if batch_size is not None and not _is_count(batch_size, MOST_SAMPLES):
        problems.append(f"the batch size is {batch_size!r}, expected 1 to {MOST_SAMPLES:,} samples")
    if microbatches != "auto" and not _is_count(microbatches, MOST_MICROBATCHES):
        problems.append(
            f"the number of micro-batches is {microbatches!r}, expected auto or 1 to {MOST_MICROBATCHES:,}"
        )
    for option, count in (("min_stages", min_stages), ("max_stages", max_stages)):
        if count is not None and not _is_count(count, MOST_SAMPLES):
            problems.append(f"{option} is {count!r}, expected 1 or more")
    if (
        _is_count(min_stages, MOST_SAMPLES)
        and _is_count(max_stages, MOST_SAMPLES)
        and min_stages > max_stages
    ):
        problems.append(f"min_stages is {min_stages}, more than max_stages, {max_stages}")
    if not (isinstance(time_limit_seconds, int | float) and 0 < time_limit_seconds < math.inf):
        problems.append(f"the time limit is {time_limit_seconds!r}, expected more than 0 seconds")
    if recompute is not None and recompute not in RECOMPUTE_MODES:
        problems.append(f"recompute {recompute!r} is not one of: {', '.join(RECOMPUTE_MODES)}")
    problems += [
        f"pin {glob!r}: the stage {stage!r} is not a number"
        for glob, stage in (pins or {}).items()
        if not isinstance(stage, int) or isinstance(stage, bool)
    ]
    if problems:
        raise UsageError("cannot plan with these options", because=problems)
    if batch_size is not None:
        check_microbatches(batch_size, microbatches)


def check_microbatches(batch_size: int, microbatches: int | Literal["auto"]) -> None:
    """Refuse a number of micro-batches that the batch cannot be cut into."""
    if microbatches != "auto" and microbatches > batch_size:
        raise UsageError(
            f"cannot cut a batch of {batch_size} into {microbatches} micro-batches",
            because=["every micro-batch needs a sample"],
            suggestions=[f"use at most {batch_size} micro-batches, or a larger batch size"],
        )


def _is_count(value: object, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
