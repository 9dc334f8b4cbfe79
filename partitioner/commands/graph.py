"""``partitioner graph``: draw a model, a plan's placement graph or stages, or what one rank runs of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cost_models.errors import UsageError
from partitioner.commands.options import (
    NOTHING_GIVEN,
    Flag,
    JsonFlag,
    ModelOptions,
    QuietFlag,
    WholeNumber,
    emit,
    progress,
)
from partitioner.cost_graphs.plan import GraphPlan, is_graph_plan
from partitioner.explain.graph_of_plan import graph_of
from partitioner.explain.rank_graph import rank_graph
from partitioner.models.as_graph import as_graph
from partitioner.pictures.cost_graph_data import cost_graph_drawing
from partitioner.pictures.dot import to_dot
from partitioner.pictures.drawing import Drawing, drawing_json
from partitioner.pictures.graph_svg import to_svg
from partitioner.pictures.plan_drawing import model_drawing, plan_drawing, rank_drawing, stage_drawing
from partitioner.plan import Plan
from partitioner.record.describe_outline import describe_outline


def graph(
    target: str,
    /,
    *,
    format: Literal["text", "dot", "svg", "json"] | None = None,
    plan: Path | None = None,
    rank: WholeNumber | None = None,
    stages: Flag = False,
    all: Flag = False,
    model_options: ModelOptions = NOTHING_GIVEN,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> int:
    """Draw a MODEL or a PLAN file: modules nested, equal ones folded, stages in colours, bridges with their bytes.

    Parameters
    ----------
    target
        A model as for `partitioner plan`, or a plan file (*.json), which needs no model.
    format
        dot (Graphviz), svg (needs nothing else), json, or of a rank text; text of a rank and dot of all else if not given.
    plan
        With a model: the plan whose stages its ops are coloured by.
    rank
        With a model and a plan: what this rank runs, bridges to others marked.
    stages
        Of a plan: one box per stage.
    all
        Every op, nothing folded; without it a drawing has at most 300 boxes.
    """
    if format == "text" and rank is None:
        raise UsageError(
            "cannot draw this as text",
            ["text is for what one rank runs"],
            ["give MODEL, --plan PLAN and --rank N"],
        )
    form = "json" if json else format or ("dot" if rank is None else "text")
    if target.endswith(".json") and not target.startswith("hf:"):
        _refuse_options_of_models(target, plan, rank, model_options)
        _emit(_plan_drawing(target, stages, all), form)
        return 0
    if rank is not None and plan is None:
        raise UsageError(
            f"cannot draw what rank {rank} runs", ["no plan was given"], ["give it: --plan PLAN"]
        )
    if stages and (plan is None or rank is not None):
        raise UsageError(
            f"cannot draw the stages of {target}", ["a plan has stages"], ["partitioner graph PLAN --stages"]
        )
    loaded = Plan.load(plan) if plan is not None else None
    with progress(f"tracing {target}", quiet=quiet):
        workload = model_options.load(target)
        traced = as_graph(workload, check="off") if loaded is None else graph_of(loaded, workload, "draw", {})
    if loaded is not None and rank is not None:
        own = rank_graph(loaded, traced, rank, {})
        emit(own, {}, False) if form == "text" else _emit(rank_drawing(own.networkx(), whole=all), form)
    elif loaded is not None and stages:
        _emit(stage_drawing(loaded, whole=all), form)
    elif loaded is not None:
        outline = loaded.outline or describe_outline(traced, -(-loaded.batch_size // loaded.microbatches))
        _emit(plan_drawing(loaded, outline, whole=all), form)
    else:
        outline = describe_outline(traced, traced.example_batch_size)
        _emit(model_drawing(outline, traced.model_name, whole=all), form)
    return 0


def _refuse_options_of_models(
    target: str, plan: Path | None, rank: int | None, model_options: ModelOptions
) -> None:
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


def _plan_drawing(target: str, stages: bool, whole: bool) -> Drawing:
    if is_graph_plan(target):
        if stages:
            raise UsageError(f"cannot draw the stages of {target}", ["a plan of a cost graph has none"])
        return cost_graph_drawing(GraphPlan.load(target), whole=whole)
    loaded = Plan.load(target)
    return stage_drawing(loaded, whole=whole) if stages else plan_drawing(loaded, whole=whole)


def _emit(drawing: Drawing, form: str) -> None:
    text = "" if form == "json" else to_svg(drawing) if form == "svg" else to_dot(drawing)
    emit(text.rstrip("\n"), drawing_json(drawing) if form == "json" else {}, form == "json")
