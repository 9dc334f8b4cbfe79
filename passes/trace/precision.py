"""A precision for one model: refusals where it cannot be trained so, and remarks where it can.

Some ops fail when they run, not when they are traced: torch's shape functions let their data types differ. A precision
casts parameters and inputs. Where code adds a float32 buffer, or a float32 tensor of its own making, the result is
float32 again. A product of that and a bfloat16 weight is cast as autocast would (``passes.trace.export``); a norm
whose weight is bfloat16 has no kernel for it. Tracing is where a user can still be told the line.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from cost_models.errors import ModelError, UsageError
from cost_models.precision import NAMES, Precision
from passes.graph.graph import OpGraph
from passes.graph.nodes import op_name, tensors_of, where

__all__ = ["check_precision", "dominant_dtype", "precision_notes", "refuse_mixed_types"]

DIVIDES_BY_EPSILON = ("adam", "adamw")
"""Optimizers whose 1e-8 is 0 in float16: a zero gradient makes 0 / 0."""
SAME_TYPE = frozenset(
    {"linear", "matmul", "mm", "mv", "bmm", "addmm", "addmv", "addbmm", "baddbmm", "index_put", "index_add"}
    | {"index_copy", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "binary_cross_entropy"}
)
"""Ops whose floating-point operands must have one type."""
NOT_NARROWER = frozenset(
    {"layer_norm", "group_norm", "instance_norm", "native_layer_norm", "native_group_norm"}
)
"""Ops whose parameters may be wider than their input, not narrower."""
MOST_SHOWN = 3


def check_precision(graph: OpGraph, precision: Precision, optimizer: str) -> None:
    """Raise UsageError where ``graph`` cannot be trained in ``precision``."""
    refuse_other_trace(graph, precision)
    halves = _float16_gradients(graph) if precision.loss_scale is None else []
    if halves:
        raise UsageError(
            f"cannot train {graph.model_name} in float16 without a loss scale",
            because=[
                "gradients pass through float16, where what is below 6e-8 becomes 0, in "
                + where(min(halves, key=lambda node: node.op == "placeholder"))
            ],
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


def _float16_gradients(graph: OpGraph) -> list[fx.Node]:
    """List the parameters and ops whose gradients are float16 tensors, be it through autocast's casts; in graph order."""
    return [
        node
        for name, node in graph.nodes.items()
        if name in graph.needs_grad and any(t.dtype == torch.float16 for t in tensors_of(node))
    ]


def dominant_dtype(graph: OpGraph) -> torch.dtype | None:
    """Return the floating-point type of most of the model's parameters, by elements."""
    counts: dict[torch.dtype, int] = {}
    for spec in graph.parameters.values():
        if spec.dtype.is_floating_point:
            counts[spec.dtype] = counts.get(spec.dtype, 0) + spec.elements
    return max(counts, key=lambda dtype: counts[dtype], default=None)


def precision_notes(graph: OpGraph, precision: Precision) -> tuple[str, ...]:
    """Remark on what a user must know: 16-bit parameters that train without master copies."""
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


def refuse_mixed_types(graph: OpGraph) -> None:
    """Raise ModelError with the lines of ops whose operands have types that no kernel takes together."""
    found = list(_mixed(graph))
    if not found:
        return
    more = [f"{len(found) - MOST_SHOWN} more"] if len(found) > MOST_SHOWN else []
    raise ModelError(
        f"{graph.model_name} cannot run in this precision ({graph.precision})",
        [
            *found[:MOST_SHOWN],
            *more,
            "parameters, inputs and what products multiply are cast; buffers and what forward makes are not",
        ],
        [
            "cast where they meet: buffer.to(x.dtype)",
            "trace (or partition) under torch.autocast instead of precision=Precision(compute=...)",
        ],
    )


def _mixed(graph: OpGraph) -> Iterator[str]:
    for node in graph.ops:
        name = op_name(node)
        if name.rstrip("_") not in SAME_TYPE | NOT_NARROWER:
            continue
        types = _types(node)
        wrong = len(set(types)) > 1
        if name in NOT_NARROWER:
            wrong = any(dtype.itemsize < types[0].itemsize for dtype in types[1:])
        if wrong:
            path, source = node.meta.get("module_path", ""), node.meta.get("source", "")
            where = " ".join(
                filter(None, (f"in module {path!r}" if path else "", f"({source})" if source else ""))
            )
            yield f"{name} {where}: {' and '.join(dict.fromkeys(str(dtype) for dtype in types))}"


def _types(node: fx.Node) -> list[torch.dtype]:
    """List the data types of the floating-point tensors that an op reads, in the order of its arguments."""
    values = (source.meta.get("val") for source in node.all_input_nodes)
    return [v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
