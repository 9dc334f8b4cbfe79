"""``partition(model, cluster) -> Plan``: the public entry, from a model to a saved, proved, explained plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from cost_models.cluster import ClusterSpec
from passes.place_layers import LayerRequest

from cost_models.errors import UsageError
from cost_models.memory import OPTIMIZERS
from partitioner.plan import Plan
from partitioner.workloads import Workload
from passes.compile import compile_graph
from passes.graph import OpGraph
from passes.trace import trace
from runtime.schedules import SCHEDULES

ModelOrTrace: TypeAlias = torch.nn.Module | OpGraph | Workload

STRATEGIES = ("layer",)


def partition(
    model: ModelOrTrace,
    cluster: ClusterSpec,
    *,
    example_inputs: Any = None,
    batch_size: int | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer_memory: str = "adamw",
    master: bool = False,
    strategy: str = "layer",
    schedule: str = "auto",
    microbatches: int | Literal["auto"] = "auto",
    pins: Mapping[str, int] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    dynamic_dims: Mapping[str, list[int]] | None = None,
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
    ``optimizer_memory``: whose state is budgeted: none sgd momentum adam adamw. ``master``: 32-bit copies as well.
    ``pins``: {glob over module paths or op names: stage}.

    Raises ClusterError, ModelError, UsageError, or InfeasibleError with the computed ways out.
    """
    check_choices(strategy=strategy, schedule=schedule, optimizer_memory=optimizer_memory)
    graph = as_graph(
        model,
        example_inputs=example_inputs,
        loss_fn=loss_fn,
        batch_dims=batch_dims,
        dynamic_dims=dynamic_dims,
        name=name,
    )
    if graph.loss is None:
        raise UsageError(
            f"cannot plan training of {graph.model_name}",
            because=["the trace has no loss"],
            suggestions=["give `loss_fn=`, or a model that returns its loss"],
        )
    request = LayerRequest(
        batch_size=_batch_size(batch_size, graph),
        microbatches=microbatches,
        schedule=schedule,
        optimizer=optimizer_memory,
        master=master,
        pins=dict(pins or {}),
        max_stages=max_stages,
        time_limit_seconds=time_limit_seconds,
    )
    check_microbatches(request.batch_size, microbatches)
    from partitioner.describe import describe

    return describe(graph, cluster, request, compile_graph(graph, cluster, request))


def as_graph(
    model: ModelOrTrace,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    dynamic_dims: Mapping[str, list[int]] | None = None,
    name: str | None = None,
) -> OpGraph:
    """The training graph of ``model``; traces unless it is one already."""
    if isinstance(model, OpGraph):
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
        model, example_inputs, loss_fn=loss_fn, batch_dims=batch_dims, dynamic_dims=dynamic_dims, name=name
    )


def check_choices(*, strategy: str, schedule: str, optimizer_memory: str) -> None:
    """Refuse unknown words, all at once."""
    problems = []
    if strategy not in STRATEGIES:
        problems.append(f"strategy {strategy!r} is not one of: {', '.join(STRATEGIES)}")
    if schedule != "auto" and schedule not in SCHEDULES:
        problems.append(f"schedule {schedule!r} is not one of: auto, {', '.join(SCHEDULES)}")
    if optimizer_memory not in OPTIMIZERS:
        problems.append(f"optimizer memory {optimizer_memory!r} is not one of: {', '.join(OPTIMIZERS)}")
    if problems:
        raise UsageError("cannot plan with these options", because=problems)


def check_microbatches(batch_size: int, microbatches: int | Literal["auto"]) -> None:
    """Refuse a number of micro-batches that the batch cannot be cut into."""
    if microbatches == "auto":
        return
    if not isinstance(microbatches, int) or microbatches < 1:
        raise UsageError(
            f"cannot cut the batch into {microbatches!r} micro-batches",
            because=["expected 1 or more, or auto"],
        )
    if microbatches > batch_size:
        raise UsageError(
            f"cannot cut a batch of {batch_size} into {microbatches} micro-batches",
            because=["every micro-batch needs a sample"],
            suggestions=[f"use at most {batch_size} micro-batches, or a larger batch size"],
        )


def _batch_size(batch_size: int | None, graph: OpGraph) -> int:
    if batch_size is None:
        return graph.example_batch_size
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(
            f"cannot plan for a batch size of {batch_size!r}", because=["expected 1 sample or more"]
        )
    return batch_size
