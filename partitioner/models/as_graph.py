"""The training graph of whatever a model is given as: a module, a workload, or a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

from cost_models.errors import UsageError
from cost_models.precision import Precision
from cost_models.units import counted
from partitioner.models.workload import Workload, workload_of
from partitioner.unforeseen import versions_named
from passes.fidelity.check import check_fidelity, has_values
from passes.graph.graph import OpGraph
from passes.timings import run_pass
from passes.trace.export import LossFunction
from passes.trace.loss.reduction import LossReduction, refuse_other_reduction
from passes.trace.trace import trace as trace_graph
from passes.trace.wrappers import unwrapped

ModelOrTrace: TypeAlias = torch.nn.Module | OpGraph | Workload
Check: TypeAlias = Literal["on", "off"]
"""The choice whether a trace is compared with the model that it was made of (``passes.fidelity``)."""


def as_graph(
    model: ModelOrTrace,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    dynamic_dims: Mapping[str, list[int]] | None = None,
    precision: Precision | None = None,
    loss_reduction: LossReduction | None = None,
    opaque: Sequence[str] = (),
    name: str | None = None,
    check: Check = "on",
) -> OpGraph:
    """Return the training graph of ``model``, which is traced unless it is one already.

    ``check``: "on" compares the trace with the model itself, by two steps of it, where the model has values.
    """
    _refuse_other_words(check)
    if isinstance(model, OpGraph):
        refuse_other_reduction(model, loss_reduction)
        return model
    workload = workload_of(model, example_inputs, loss_fn)
    module: object = workload.model
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"cannot partition a {type(module).__name__}",
            because=["a torch.nn.Module, a Workload or the result of partitioner.trace() is expected"],
        )
    if workload.example_inputs is None:
        raise UsageError(
            f"cannot trace {type(module).__name__}",
            because=["no example inputs were given"],
            suggestions=["give `example_inputs=`: one batch, as you would call the model with"],
        )
    graph = run_pass(
        "trace",
        lambda graph: counted(len(graph), "op"),
        trace_graph,
        module,
        workload.example_inputs,
        loss_fn=workload.loss_fn,
        batch_dims=batch_dims,
        dynamic_dims=dynamic_dims,
        precision=precision,
        loss_reduction=loss_reduction,
        opaque=opaque,
        name=name or workload.name or None,
    )
    return _compared(graph, module, workload.example_inputs, workload.loss_fn, batch_dims, check)


@versions_named()
def trace(
    model: torch.nn.Module,
    example_inputs: object,
    *,
    loss_fn: LossFunction | None = None,
    training: bool = True,
    batch_dims: Mapping[str, int | None] | None = None,
    dynamic_dims: Mapping[str, Sequence[int]] | None = None,
    precision: Precision | None = None,
    loss_reduction: LossReduction | None = None,
    opaque: Sequence[str] = (),
    name: str | None = None,
    check: Check = "on",
) -> OpGraph:
    """Trace a model once, to compare several plans of it; :func:`passes.trace.trace.trace` explains the arguments.

    ``check``: "on" compares a training trace with the model itself, by two steps of it, where the model has values.
    """
    _refuse_other_words(check)
    graph = trace_graph(
        model,
        example_inputs,
        loss_fn=loss_fn,
        training=training,
        batch_dims=batch_dims,
        dynamic_dims=dynamic_dims,
        precision=precision,
        loss_reduction=loss_reduction,
        opaque=opaque,
        name=name,
    )
    return _compared(graph, model, example_inputs, loss_fn, batch_dims, check) if training else graph


def _compared(
    graph: OpGraph,
    model: torch.nn.Module,
    example_inputs: Any,
    loss_fn: LossFunction | None,
    batch_dims: Mapping[str, int | None] | None,
    check: Check,
) -> OpGraph:
    if check == "off":
        return graph
    return run_pass(
        "fidelity",
        lambda _: "as the model computes it" if has_values(model) else "no values to compare",
        check_fidelity,
        graph,
        unwrapped(model)[0],
        example_inputs,
        loss_fn,
        tuple(batch_dims or ()),
    )


def _refuse_other_words(check: str) -> None:
    if check not in ("on", "off"):
        raise UsageError(f"check={check!r} is not known", because=['it is "on" or "off"'])
