"""``partitioner graph``: draw a model's ops, a plan's stages, or what one rank runs of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cost_models.errors import UsageError
from partitioner.commands.options import NOTHING_GIVEN, JsonFlag, ModelOptions, WholeNumber, emit, progress
from partitioner.explain.graph_of_plan import graph_of
from partitioner.explain.rank_graph import rank_graph
from partitioner.models.as_graph import as_graph
from partitioner.plan import Plan
from partitioner.report.dot import op_graph, stage_graph, to_dot, to_json


def graph(
    target: str,
    /,
    *,
    format: Literal["text", "dot", "json"] | None = None,
    plan: Path | None = None,
    rank: WholeNumber | None = None,
    model_options: ModelOptions = NOTHING_GIVEN,
    json: JsonFlag = False,
) -> int:
    """Draw the ops of a MODEL, the stages of a PLAN file with devices as clusters, or what one rank runs of a MODEL.

    Parameters
    ----------
    target
        A model as for `partitioner plan`, or a plan file (*.json).
    format
        dot (graphviz), json, or of a rank text; text of a rank and dot of all else if not given.
    plan
        With a model: the plan whose devices its ops are grouped by.
    rank
        With a model and a plan: what this rank runs, bridges to others marked.
    json
        The same as --format json.
    """
    if format == "text" and rank is None:
        raise UsageError(
            "cannot draw this as text",
            ["text is for what one rank runs"],
            ["give MODEL, --plan PLAN and --rank N"],
        )
    if target.endswith(".json") and not target.startswith("hf:"):
        of_model = {
            "--seq": model_options.seq,
            "--dtype": model_options.dtype,
            "--set": model_options.set_ or None,
        }
        given = {"--plan": plan, "--rank": rank, **of_model}
        extra = [flag for flag, value in given.items() if value is not None]
        if extra:
            raise UsageError(
                f"cannot draw the plan {target} with {', '.join(extra)}",
                ["these are for drawing a model"],
                [f"partitioner graph MODEL --plan {target}"],
            )
        dag = stage_graph(Plan.load(target))
        emit(to_dot(dag), to_json(dag), json or format == "json")
        return 0
    if rank is not None and plan is None:
        raise UsageError(
            f"cannot draw what rank {rank} runs", ["no plan was given"], ["give it: --plan PLAN"]
        )
    loaded = Plan.load(plan) if plan is not None else None
    with progress(f"tracing {target}"):
        workload = model_options.load(target)
        traced = as_graph(workload, check="off") if loaded is None else graph_of(loaded, workload, "draw", {})
    if loaded is not None and rank is not None:
        own = rank_graph(loaded, traced, rank, {})
        text = str(own) if format in (None, "text") else to_dot(own.networkx())
        emit(text, to_json(own.networkx()), json or format == "json")
        return 0
    dag = op_graph(traced, loaded)
    emit(to_dot(dag), to_json(dag), json or format == "json")
    return 0
