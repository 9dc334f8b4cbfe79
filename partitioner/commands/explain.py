"""``partitioner explain``: all that an op, parameter or input of a plan could have been, and what each would cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from partitioner.commands import options
from partitioner.commands.options import Dims, JsonFlag, Settings, Whole, emit, progress, settings
from partitioner.explain.explain import explain_plan
from partitioner.explain.graph_of_plan import graph_of
from partitioner.models.load import load_workload
from partitioner.plan import Plan


def explain(
    plan: Path,
    name: str,
    /,
    *,
    model: str | None = None,
    seq: Whole | None = None,
    dtype: str | None = None,
    set_: Settings = (),
    batch_dims: Dims = (),
    dynamic_dims: Dims = (),
    json: JsonFlag = False,
) -> int:
    """Say which other layouts or devices an op, parameter or input could have, what each costs, and why it has its own.

    Parameters
    ----------
    plan
        The plan file.
    name
        An op as `partitioner graph MODEL` shows it, a parameter of the model, or an input.
    model
        The plan's model, as for `partitioner plan`. Feature-wise plans need it; others for parameters, modules and other
        devices.
    seq
        Sequence length of a bundled or hf: model.
    dtype
        Data type of a bundled or hf: model, such as bfloat16.
    set_
        key=value for the factory's arguments; may be repeated.
    batch_dims
        As given to `partitioner plan`.
    dynamic_dims
        As given to `partitioner plan`.
    json
        Print one JSON object.
    """
    dims: dict[str, Any] = {
        "batch_dims": options.batch_dims(batch_dims),
        "dynamic_dims": options.dynamic_dims(dynamic_dims),
    }
    loaded = Plan.load(plan)
    graph = None
    if model is not None:
        with progress(f"tracing {model}"):
            workload = load_workload(model, settings=settings(set_), seq=seq, dtype=dtype)
            graph = graph_of(loaded, workload, f"explain {name}", dims)
    with progress(f"explaining {name}"):
        found = explain_plan(loaded, name, graph, {})
    emit(str(found), found.to_dict(), json)
    return 0
