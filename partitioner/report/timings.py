"""The passes of a compile as a table: how long each took, and what came out."""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.units import counted, format_seconds, percent
from partitioner.report.text import columns, printable
from passes.timings import PassTime


def pass_table(times: Sequence[PassTime]) -> str:
    """Render the passes in the order in which they ran, each with its phases, and with their shares of the whole."""
    whole = sum(each.seconds for each in times)
    rows = []
    for each in times:
        rows.append([each.name, format_seconds(each.seconds), _share(each.seconds, whole), each.result])
        for phase in each.phases:
            seconds, share = format_seconds(phase.seconds), _share(phase.seconds, whole)
            rows.append([f"  {phase.name}", seconds, share, counted(phase.calls, "time")])
    rows.append(["all", format_seconds(whole), "", ""])
    return printable(columns(("pass", "time", "share", "result"), rows, left=("pass", "result")))


def _share(seconds: float, whole: float) -> str:
    return percent(seconds / whole) if whole else ""
