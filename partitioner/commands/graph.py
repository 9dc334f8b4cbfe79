"""``partitioner graph``: draw a model's ops or a plan's stages."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cost_models.errors import UsageError
from partitioner.api import as_graph
from partitioner.commands.options import JsonFlag, Settings, Whole, emit, progress, settings
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
    seq: Whole | None = None,
    dtype: str | None = None,
    set_: Settings = (),
    json: JsonFlag = False,
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
        Data type of a bundled or hf: model, such as bfloat16.
    set_
        key=value for the factory's arguments; may be repeated.
    json
        The same as --format json.
    """
    if target.endswith(".json") and not target.startswith("hf:"):
        given = {"--plan": plan, "--seq": seq, "--dtype": dtype, "--set": set_ or None}
        extra = [flag for flag, value in given.items() if value is not None]
        if extra:
            raise UsageError(
                f"cannot draw the plan {target} with {', '.join(extra)}",
                ["these are for drawing a model"],
                [f"partitioner graph MODEL --plan {target}"],
            )
        dag = stage_graph(Plan.load(target))
    else:
        loaded = Plan.load(plan) if plan is not None else None
        with progress(f"tracing {target}"):
            traced = as_graph(load_workload(target, settings=settings(set_), seq=seq, dtype=dtype))
        if loaded is not None:
            refuse_other_model(loaded, traced)
        dag = op_graph(traced, loaded)
    emit(to_dot(dag), to_json(dag), json or format == "json")
    return 0
