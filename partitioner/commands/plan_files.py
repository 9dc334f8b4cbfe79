"""``partitioner show | diff | simulate``: commands on plan files; they need no model."""

from __future__ import annotations

import json as json_module
from pathlib import Path

from cost_models.errors import UsageError
from partitioner.commands.options import JsonFlag, WholeNumber, check_output, emit, progress
from partitioner.cost_graphs.plan import GraphPlan, is_graph_plan
from partitioner.plan import Plan
from runtime.simulate.timeline import chrome_trace, render

NARROWEST, WIDEST = 10, 10_000
"""The least and the most columns of a timeline."""


def show(plan: Path, /, *, json: JsonFlag = False) -> int:
    """Print a plan.

    Parameters
    ----------
    plan
        The plan file.
    json
        Print one JSON object: the plan.
    """
    loaded = GraphPlan.load(plan) if is_graph_plan(plan) else Plan.load(plan)
    emit(str(loaded), loaded.to_dict(), json)
    return 0


def diff(first: Path, second: Path, /, *, json: JsonFlag = False) -> int:
    """Print what differs between two plans.

    Parameters
    ----------
    first
        The plan to compare from.
    second
        The plan to compare to.
    json
        Print one JSON object.
    """
    text = Plan.load(first).diff(Plan.load(second))
    emit(text or "no difference", {"equal": not text, "differences": text.splitlines()}, json)
    return 0


def simulate(
    plan: Path, /, *, width: WholeNumber = 80, trace: Path | None = None, json: JsonFlag = False
) -> int:
    """Rebuild a plan's programs, prove them again, simulate one step and draw its timeline.

    Parameters
    ----------
    plan
        The plan file.
    width
        Columns of the timeline.
    trace
        Write the timeline as a Chrome trace (for Perfetto) to this file.
    json
        Print one JSON object.
    """
    if not NARROWEST <= width <= WIDEST:
        raise UsageError(
            f"cannot draw a timeline {width} columns wide", [f"expected {NARROWEST} to {WIDEST:,}"]
        )
    check_output(trace)
    loaded = Plan.load(plan)
    with progress("simulating"):
        simulation = loaded.simulate()
    if trace is not None:
        trace.write_text(json_module.dumps(chrome_trace(simulation)))
    data = {
        "step_seconds": simulation.step_seconds,
        "bubble_fraction": simulation.bubble_fraction,
        "peak_memory_bytes": {str(r): int(p) for r, p in enumerate(simulation.peak_bytes)},
        "communication_bytes": int(sum(simulation.pair_bytes.values())),
        "messages": simulation.message_count,
    }
    emit(render(simulation, width=width), data, json)
    return 0
