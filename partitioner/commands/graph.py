"""``partitioner graph``: draw a model's ops or a plan's stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from partitioner.api import as_graph
from partitioner.commands.options import progress, settings
from partitioner.plan import Plan
from partitioner.rebuild import refuse_other_model
from partitioner.report.dot import op_graph, stage_graph, to_dot, to_json
from partitioner.workloads import load_workload


def graph(
    target: str,
    /,
    *,
    format: Literal["dot", "json"] = "dot",
    plan: Path | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    set_: Annotated[tuple[str, ...], Parameter(name="--set", negative=())] = (),
) -> int:
    """Draw the ops of a MODEL, or the stages of a PLAN file with devices as clusters.

    Parameters
    ----------
    target
        A model as for `partitioner plan`, or a plan file (*.json).
    format
        dot (graphviz) or json.
    plan
        With a model: the plan whose devices its ops are grouped by.
    seq
        Sequence length of a bundled or hf: model.
    dtype
        Data type of a bundled or hf: model.
    set_
        key=value for the factory's arguments; may be repeated.
    """
    if target.endswith(".json") and not target.startswith("hf:"):
        dag = stage_graph(Plan.load(target))
    else:
        loaded = Plan.load(plan) if plan is not None else None
        with progress(f"tracing {target}"):
            traced = as_graph(load_workload(target, settings=settings(set_), seq=seq, dtype=dtype))
        if loaded is not None:
            refuse_other_model(loaded, traced)
        dag = op_graph(traced, loaded)
    print(to_dot(dag) if format == "dot" else json.dumps(to_json(dag), indent=1))
    return 0
