"""``partitioner show | diff | simulate``: commands on plan files; they need no model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cost_models.errors import UsageError
from partitioner.commands.options import (
    JsonFlag,
    QuietFlag,
    WholeNumber,
    check_output,
    emit,
    progress,
    rank_list,
)
from partitioner.cost_graphs.plan import GraphPlan, is_graph_plan
from partitioner.pictures.cost_graph_data import graph_plan_differences
from partitioner.plan import Plan
from partitioner.report.text import hanging, labelled, text_width
from runtime.simulate.simulation import Simulation
from runtime.simulate.timeline import render, render_within
from runtime.simulate.trace_events import chrome_trace, save_trace

NARROWEST, WIDEST = 10, 10_000
"""The least and the most columns of a timeline."""


def show(plan: Path, /, *, quiet: QuietFlag = False, json: JsonFlag = False) -> int:
    """Print a plan and its step as a timeline, as wide as the terminal (80 columns where there is none).

    Parameters
    ----------
    plan
        The plan file.
    """
    loaded = GraphPlan.load(plan) if is_graph_plan(plan) else Plan.load(plan)
    shown: object = loaded
    if isinstance(loaded, Plan) and not json:
        with progress("simulating", quiet=quiet):
            shown = _Shown(loaded, loaded.simulate())
    emit(shown, loaded.to_dict(), json)
    return 0


@dataclass(frozen=True)
class _Shown:
    """A plan's text and the timeline of its step."""

    plan: Plan
    step: Simulation

    def __str__(self) -> str:
        return f"{self.plan}\n\n{step_picture(self.step)}"


def diff(first: Path, second: Path, /, *, quiet: QuietFlag = False, json: JsonFlag = False) -> int:
    """Print what differs between two plans.

    Parameters
    ----------
    first
        The plan to compare from.
    second
        The plan to compare to.
    """
    with progress("comparing", quiet=quiet):
        if is_graph_plan(first) and is_graph_plan(second):
            text = "\n".join(graph_plan_differences(GraphPlan.load(first), GraphPlan.load(second)))
        else:
            text = Plan.load(first).diff(Plan.load(second))
    emit(_Differences(text), {"equal": not text, "differences": text.splitlines()}, json)
    return 0


@dataclass(frozen=True)
class _Differences:
    """The differences, a line each, wrapped."""

    text: str

    def __str__(self) -> str:
        return hanging(self.text) or "no difference"


def simulate(
    plan: Path,
    /,
    *,
    width: WholeNumber = 80,
    trace: Path | None = None,
    ranks: str | None = None,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> int:
    """Rebuild a plan's programs, prove them again, simulate one step and draw its timeline.

    Parameters
    ----------
    plan
        The plan file.
    width
        Columns of the timeline.
    trace
        Write the timeline as a Chrome trace to this file, for https://ui.perfetto.dev; packed if it ends in .gz.
    ranks
        With --trace: the ranks to show, such as 0,8 or 0-7, or all; if not given, of equal ranks the first.
    """
    if not NARROWEST <= width <= WIDEST:
        raise UsageError(
            f"cannot draw a timeline {width} columns wide", [f"expected {NARROWEST} to {WIDEST:,}"]
        )
    if ranks is not None and trace is None:
        raise UsageError(
            "cannot choose ranks", ["--ranks is for the trace, and none is written"], ["add --trace FILE"]
        )
    check_output(trace)
    loaded = Plan.load(plan)
    shown = rank_list(ranks, loaded.cluster.world_size)
    with progress("simulating", quiet=quiet):
        simulation = loaded.simulate()
    if trace is not None:
        save_trace(trace, chrome_trace(simulation, ranks=shown))
    data = {
        "step_seconds": simulation.step_seconds,
        "bubble_fraction": simulation.bubble_fraction,
        "peak_memory_bytes": {str(r): int(p) for r, p in enumerate(simulation.peak_bytes)},
        "communication_bytes": int(sum(simulation.pair_bytes.values())),
        "messages": simulation.message_count,
    }
    emit(render(simulation, width=width), data, json)
    return 0


MOST_ROWS = 16
"""The most rows, as of stages in the table above it."""
LEGEND = (
    "F forward, B backward (in halves: I inputs, W weights) of micro-batch 0, 1, …; + sum of gradients, S optimizer, "
    ". waiting"
)


def step_picture(step: Simulation) -> str:
    """Draw the step; ranks that look alike share a row."""
    return f"{render_within(step, text_width(), MOST_ROWS)}\n{labelled('legend', LEGEND)}"
