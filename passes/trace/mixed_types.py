"""Ops that fail when they run, not when they are traced: torch's shape functions let their data types differ.

A precision casts parameters and inputs. Where code adds a float32 buffer, or a float32 tensor of its own making, the
result is float32 again, and a matrix product of that and a bfloat16 weight has no kernel. Tracing is where a user can
still be told the line.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from cost_models.errors import ModelError
from passes.graph.graph import OpGraph

__all__ = ["refuse_mixed_types"]

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
            "parameters and inputs are cast; buffers and what forward makes are not",
        ],
        [
            "cast where they meet: buffer.to(x.dtype)",
            "trace (or partition) under torch.autocast instead of precision=Precision(compute=...)",
        ],
    )


def _mixed(graph: OpGraph) -> Iterator[str]:
    for node in graph.ops:
        name = str(getattr(node.target, "_schema", None) and node.target._schema.name).rpartition("::")[2]  # type: ignore[union-attr]
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
    """Of the floating-point tensors that an op reads, in the order of its arguments."""
    values = (source.meta.get("val") for source in node.all_input_nodes)
    return [v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
