"""``partition(model, cluster) -> Plan``: the public entry, from a model to a saved, proved, explained plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from cost_models.precision import Precision
from partitioner.models.as_graph import ModelOrTrace, as_graph
from partitioner.models.made_with import MadeWith
from partitioner.plan import Plan
from partitioner.planning.options import PlanOptions
from passes.search.free.request import Objective
from passes.search.layer.options import RecomputeMode
from passes.trace.loss.reduction import LossReduction
from passes.trace.precision import check_precision
from runtime.collector import collector_paused


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
    pins: Mapping[str, int] | Mapping[str, str] | None = None,
    mesh: Sequence[int] | None = None,
    objective: Objective | None = None,
    splits: Mapping[str, Sequence[int]] | None = None,
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
    ``microbatches``: the number of pieces that the batch is cut into (this *is* gradient accumulation), or "auto".
    ``schedule``: "auto" or one of gpipe 1f1b interleaved zb-h1 zb-h2 zb-v list list-split.
    ``optimizer_memory``: whose state is budgeted: none sgd momentum adam adamw amsgrad.
    ``precision``: a :class:`Precision`, the model's own data types if not given. A trace keeps what it was traced in.
    ``loss_reduction``: how micro-batches' losses become the batch's: "mean" (weighted by samples), "sum", or "token_mean"
    (by the whole batch's valid labels); what the loss itself asks for if not given.
    ``strategy``: "layer" (every op on one device, every device one run of the model), "feature" (every op on all devices,
    tensors sharded), "free" (any op, or any block of an op's neurons, on any device), or "auto": all are planned, the
    fastest plan that fits is taken.
    ``objective``: free: "throughput" (of micro-batches, the default), or "latency": of one batch, in one piece unless
    ``microbatches`` says otherwise.
    ``splits``: free: {glob over what can be split, or an op's name: sizes of its blocks}, such as {"mlp": (60, 40)} or, for
    dimension 2 of an op's output, {"conv2d:2": (7, 7)}; {} for none; chosen for the devices if not given.
    ``pins``: layer: {glob over module paths or op names: stage}; free: the same with devices; feature: {glob over
    parameters, inputs, ops or module paths: layout}, such as {"*.up_proj.weight": "S0"}, one placement (R, S0, S1, …, P)
    per axis of the mesh, or a pattern: {"*": "zero3"} or {"*": "data column_row"}; all of data zero1 zero3 column_row
    sequence vocabulary.
    ``mesh``: feature: the shape of the mesh of devices, such as (8, 4), outermost axis first; searched if not given.
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
    options = PlanOptions(
        batch_size=batch_size,
        optimizer_memory=optimizer_memory,
        strategy=strategy,
        schedule=schedule,
        microbatches=microbatches,
        pins=pins,
        mesh=mesh,
        objective=objective,
        splits=splits,
        recompute=recompute,
        min_stages=min_stages,
        max_stages=max_stages,
        time_limit_seconds=time_limit_seconds,
    )
    options.check()
    options.check_mesh(cluster)
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
    requests = options.requests(graph, precision)
    from partitioner.planning.best import best_plan

    with collector_paused():  # describing reads a million small objects that compiling made
        plan = best_plan(Plan, graph, cluster, requests)
    plan._made_with = MadeWith.of(model, example_inputs, loss_fn, batch_dims, dynamic_dims, graph)
    return plan
