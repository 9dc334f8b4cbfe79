"""What a precision means for one model: refusals before anything is planned, and remarks on what is planned."""

from __future__ import annotations

import torch

from cost_models.errors import UsageError
from cost_models.precision import NAMES, Precision
from passes.graph.graph import OpGraph

__all__ = ["check_precision", "dominant_dtype", "precision_notes"]

DIVIDES_BY_EPSILON = ("adam", "adamw")
"""Optimizers whose 1e-8 is 0 in float16: a zero gradient makes 0 / 0."""


def check_precision(graph: OpGraph, precision: Precision, optimizer: str) -> None:
    """Raise UsageError where ``graph`` cannot be trained in ``precision``."""
    refuse_other_trace(graph, precision)
    if precision.loss_scale is None and computes_gradients_in_float16(graph):
        raise UsageError(
            f"cannot train {graph.model_name} in float16 without a loss scale",
            because=["its gradients pass through float16, where what is below 6e-8 becomes 0"],
            suggestions=[
                'Precision(..., loss_scale="dynamic")',
                "compute in bfloat16, which has the range of float32",
            ],
        )
    owners = {graph.types_of(name, precision).owner for name in graph.trained}
    if optimizer in DIVIDES_BY_EPSILON and torch.float16 in owners:
        raise UsageError(
            f"cannot train {graph.model_name} with {optimizer} on float16 parameters",
            because=["its epsilon of 1e-8 is 0 in float16: parameters without a gradient become NaN"],
            suggestions=["Precision(..., master=torch.float32)", "another optimizer"],
        )


def refuse_other_trace(graph: OpGraph, precision: Precision) -> None:
    """Raise UsageError when ``graph`` was traced with other data types than ``precision`` computes in."""
    other = [
        f"{name} is traced in {traced}, would compute in {wanted}"
        for name, spec in graph.parameters.items()
        if (traced := graph.precision.of(spec.dtype, keeps_dtype=spec.keeps_dtype).leaf)
        != (wanted := precision.of(spec.dtype, keeps_dtype=spec.keeps_dtype).leaf)
    ]
    if graph.precision.casts_to != precision.casts_to:
        other.append(f"inputs are cast for {graph.precision}, not for {precision}")
    if other:
        raise UsageError(
            f"the trace of {graph.model_name} is in another precision",
            because=[*other[:2], *([f"{len(other) - 2} more"] if len(other) > 2 else [])],
            suggestions=["trace(..., precision=) with the same compute and parameters"],
        )


def computes_gradients_in_float16(graph: OpGraph) -> bool:
    """Whether any gradient of the backward is a float16 tensor, be it through autocast's casts."""
    values = (graph.nodes[name].meta.get("val") for name in graph.needs_grad)
    tensors = (item for value in values for item in (value if isinstance(value, list | tuple) else (value,)))
    return any(isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float16 for tensor in tensors)


def dominant_dtype(graph: OpGraph) -> torch.dtype | None:
    """The floating-point type of most of the model's parameters, by elements."""
    counts: dict[torch.dtype, int] = {}
    for spec in graph.parameters.values():
        if spec.dtype.is_floating_point:
            counts[spec.dtype] = counts.get(spec.dtype, 0) + spec.elements
    return max(counts, key=lambda dtype: counts[dtype], default=None)


def precision_notes(graph: OpGraph, precision: Precision) -> tuple[str, ...]:
    """What a user must know: 16-bit parameters that train without master copies."""
    lossy = {
        dtype: sum(
            graph.parameters[name].elements
            for name in graph.trained
            if graph.types_of(name, precision).owner == dtype
        )
        for dtype in (torch.bfloat16, torch.float16)
    }
    return tuple(
        f"{count:,} parameters are updated in {NAMES[dtype]} without master copies: changes below "
        f"{torch.finfo(dtype).eps / 4:.2g} of a weight are lost (Precision(master=torch.float32) keeps them)"
        for dtype, count in lossy.items()
        if count
    )
