"""The timeline of a plan's step, as wide as other texts, with its legend."""

from __future__ import annotations

from partitioner.report.text import labelled, text_width
from runtime.simulate.simulation import Simulation
from runtime.simulate.timeline import render_within

MOST_ROWS = 16
"""The most rows, as of stages in the table above it."""
LEGEND = (
    "F forward, B backward (in halves: I inputs, W weights) of micro-batch 0, 1, …; + sum of gradients, S optimizer, "
    ". waiting"
)


def step_picture(step: Simulation) -> str:
    """Draw the step; ranks that look alike share a row."""
    return f"{render_within(step, text_width(), MOST_ROWS)}\n{labelled('legend', LEGEND)}"
