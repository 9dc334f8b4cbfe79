"""The passes of a compile as a table: how long each took, and what came out."""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.units import format_seconds, percent
from partitioner.report.text import columns, printable
from passes.timings import PassTime


def pass_table(times: Sequence[PassTime]) -> str:
    """Render the passes in the order in which they ran, with each one's share of the whole."""
    whole = sum(each.seconds for each in times)
    rows = [
        [each.name, format_seconds(each.seconds), percent(each.seconds / whole) if whole else "", each.result]
        for each in times
    ]
    rows.append(["all", format_seconds(whole), "", ""])
    return printable(columns(("pass", "time", "share", "result"), rows, left=("pass", "result")))
