"""The model's graph for a plan: the one that the plan was made with in this process, or a new trace of a given model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cost_models.errors import UsageError
from partitioner.models.as_graph import ModelOrTrace, as_graph
from partitioner.record.rebuild import refuse_other_model

if TYPE_CHECKING:
    from partitioner.record.data import PlanData
    from passes.graph.graph import OpGraph


def graph_of(plan: PlanData, model: ModelOrTrace | None, purpose: str, options: dict[str, Any]) -> OpGraph:
    """Find the model's graph. Raises PlanError if the model is not the plan's, UsageError if none is known.

    ``options``: example_inputs, loss_fn, batch_dims and dynamic_dims of :func:`partition`.
    """
    memory = plan._made_with
    if model is None:
        if memory.graph is None:
            raise UsageError(
                f"cannot {purpose} without the model",
                ["a plan from a file does not hold the model's graph"],
                ["give `model=` and `example_inputs=`, or a Workload (`--model` on the command line)"],
            )
        return memory.graph
    options = memory.completed(model, options)
    graph: OpGraph = options.pop("graph", None) or as_graph(
        model,
        **options,
        precision=plan.precision,
        loss_reduction=plan.loss_reduction,
        opaque=plan.opaque,
        name=plan.model.name,
        check="off",  # only shown
    )
    refuse_other_model(plan, graph)
    return graph
