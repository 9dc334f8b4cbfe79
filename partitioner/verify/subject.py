"""The subject of a verification: the user's model with weights, its trace, what is compared otherwise than it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from cost_models.errors import UsageError
from partitioner.engine.optimizer import TAKE_SPARSE
from partitioner.models.as_graph import ModelOrTrace, as_graph
from partitioner.models.workload import Workload, workload_of
from partitioner.record.data import PlanData
from passes.graph.graph import OpGraph
from passes.graph.nodes import argument
from passes.trace.wrappers import unwrapped


def workload_to_verify(
    model: ModelOrTrace, example_inputs: Any, loss_fn: Callable[..., Any] | None
) -> Workload:
    """Put together what is verified. Raises UsageError without example inputs, or for a model on the meta device."""
    if not isinstance(model, nn.Module | Workload):
        raise UsageError(
            f"cannot verify against a {type(model).__name__}",
            because=["the reference is the unpartitioned module itself"],
            suggestions=["give the torch.nn.Module or the Workload that was planned"],
        )
    if example_inputs is None and isinstance(model, nn.Module):
        raise UsageError(
            "cannot verify without example inputs", suggestions=["give `example_inputs=`: one batch"]
        )
    workload = workload_of(model, example_inputs, loss_fn)
    module = unwrapped(workload.model)[0]
    meta = [name for name, tensor in module.state_dict().items() if tensor.is_meta]
    if meta:
        raise UsageError(
            "cannot verify a model without weights",
            because=[f"{len(meta)} tensors are on the meta device, such as {meta[0]}"],
            suggestions=["verify a small variant with real weights (for bundled models: --set size=tiny)"],
        )
    return replace(workload, model=module)


def trace_of(plan: PlanData, workload: Workload, options: Mapping[str, Any]) -> OpGraph:
    """Trace the model as it was for the plan. ``options``: batch_dims and dynamic_dims that :func:`partition` was given."""
    return as_graph(
        workload,
        precision=plan.precision,
        loss_reduction=plan.loss_reduction,
        opaque=plan.opaque,
        name=plan.model.name,
        **options,
    )


def mesh_of_all(plan: PlanData) -> tuple[int, ...]:
    """Return the sizes of the mesh of the only stage; () if there are others, or if it has one device."""
    shapes = [() if s.sharding is None else tuple(s.sharding.axes.values()) for s in plan.stages]
    return shapes[0] if len(shapes) == 1 else ()


def notes_on(plan: PlanData, graph: OpGraph, dropped: int, *, double: bool = True) -> Iterator[str]:
    """Yield the notes of the trace, and what is changed for the comparison.

    ``dropped``: ops whose dropout is off; ``double``: float64 is compared.
    """
    yield from graph.notes
    if dropped:
        yield f"dropout switched off in {dropped} ops: two random draws cannot be compared"
    if double and any("grouped_mm" in str(op.target) for op in graph.ops):
        yield "experts are multiplied one after another in float64, of which torch has no grouped product"
    sparse = [op for op in graph.ops if argument(op, "sparse") is True]
    if sparse and plan.optimizer_memory not in TAKE_SPARSE:
        yield (
            f"sparse gradients ({sparse[0].name}) are made dense for {plan.optimizer_memory}, which takes no others: "
            "torch.optim.SparseAdam in your own loop computes something else"
        )
