"""``partitioner explain``: all that an op, parameter or input of a plan could have been, and what each would cost."""

from __future__ import annotations

from pathlib import Path

from partitioner.commands.options import (
    NOTHING_GIVEN,
    JsonFlag,
    PlannedModelOptions,
    QuietFlag,
    emit,
    progress,
)
from partitioner.explain.explain import explain_plan
from partitioner.explain.graph_of_plan import graph_of
from partitioner.plan import Plan


def explain(
    plan: Path,
    name: str,
    /,
    *,
    model: str | None = None,
    model_options: PlannedModelOptions = NOTHING_GIVEN,
    quiet: QuietFlag = False,
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
        The plan's model, as for `partitioner plan`. Feature-wise plans need it; others to say what other
        layouts and devices would cost.
    """
    dims = model_options.dims()
    loaded = Plan.load(plan)
    graph = None
    if model is not None:
        with progress(f"tracing {model}", quiet=quiet):
            workload = model_options.load(model)
            graph = graph_of(loaded, workload, f"explain {name}", dims)
    with progress(f"explaining {name}", quiet=quiet):
        found = explain_plan(loaded, name, graph, {})
    emit(found, found.to_dict(), json)
    return 0
