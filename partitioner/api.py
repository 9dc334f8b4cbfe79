"""``partition(model, cluster) -> Plan``: the public entry, from a model to a saved, proved, explained plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from cost_models.precision import Precision
from partitioner.models.as_graph import Check, ModelOrTrace, as_graph
from partitioner.models.workload import MadeWith
from partitioner.plan import Plan
from partitioner.planning.option_table import with_python_help
from partitioner.planning.options import RISK, PlanOptions
from partitioner.unforeseen import versions_named
from passes.graph.graph import OpGraph
from passes.search.free.request import Objective
from passes.search.words import RecomputeMode
from passes.trace.loss.reduction import LossReduction
from runtime.collector import collector_paused


@versions_named()
@with_python_help
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
    strategy: str = "auto",
    schedule: str = "auto",
    microbatches: int | Literal["auto"] = "auto",
    micro_couplings: bool = False,
    pins: Mapping[str, int] | Mapping[str, str] | None = None,
    mesh: Sequence[int] | None = None,
    objective: Objective | None = None,
    splits: Mapping[str, Sequence[int]] | None = None,
    recompute: RecomputeMode | None = None,
    fix: str | Mapping[str, object] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    dynamic_dims: Mapping[str, list[int]] | None = None,
    opaque: Sequence[str] = (),
    min_stages: int | None = None,
    max_stages: int | None = None,
    risk: float = RISK,
    time_limit_seconds: float | None = None,
    name: str | None = None,
    check: Check = "on",
) -> Plan:
    """Plan how ``model`` trains on ``cluster``.

    ``model``: a module, a :class:`Workload`, or the result of :func:`trace` (trace once to compare several plans).
    ``example_inputs``: one batch as the model is called with (a tensor, tuple or mapping); its values do not matter.
    ``loss_fn``: (output, batch) -> loss; without it the model must return its loss itself.
    ``name``: the model's name in the plan.

    The options are those of ``partitioner.planning.option_table``, listed below.

    Raises ClusterError, ModelError, UsageError, or InfeasibleError with the computed ways out.
    """
    given = locals()
    if not isinstance(cluster, ClusterSpec):
        raise UsageError(
            f"cannot plan for a cluster of type {type(cluster).__name__}",
            because=["a ClusterSpec is expected"],
            suggestions=[
                'ClusterSpec.load("cluster.yaml"), ClusterSpec.preset("dgx-h100", nodes=8)'
                " or ClusterSpec.local(2)"
            ],
        )
    options = PlanOptions(**{field.name: given[field.name] for field in fields(PlanOptions)})
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
        opaque=opaque,
        name=name,
        check=check,
    )
    plan = plan_traced(graph, cluster, options, precision)
    plan._made_with = MadeWith.of(model, example_inputs, loss_fn, batch_dims, dynamic_dims, graph)
    return plan


def plan_traced(
    graph: OpGraph, cluster: ClusterSpec, options: PlanOptions, precision: Precision | None
) -> Plan:
    """Plan the training of a traced model. ``options``: checked already; ``precision``: the trace's if not given."""
    from partitioner.planning.best import best_plan

    with collector_paused():  # describing reads a million small objects that compiling made
        return best_plan(Plan, graph, cluster, options.requests(graph, precision))
