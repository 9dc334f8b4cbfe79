"""The passes of a compile as a table: how long each took, the memory that the process came to, and what came out."""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.shown import printable
from cost_models.units import counted, format_bytes, format_seconds, percent
from partitioner.report.text import columns
from passes.timings import PassTime


def pass_table(times: Sequence[PassTime]) -> str:
    """Render the passes in the order in which they ran, each with its phases, and with their shares of the whole.

    ``processor``: the process's own seconds, without those for which it waited; ``peak``: the most memory until then.
    """
    whole = sum(each.seconds for each in times)
    rows = []
    for each in times:
        peak = format_bytes(each.peak_bytes) if each.peak_bytes else ""
        busy = format_seconds(each.processor_seconds)
        rows.append(
            [each.name, format_seconds(each.seconds), _share(each.seconds, whole), busy, peak, each.result]
        )
        for phase in each.phases:
            seconds, share = format_seconds(phase.seconds), _share(phase.seconds, whole)
            rows.append([f"  {phase.name}", seconds, share, "", "", counted(phase.calls, "time")])
    busy = format_seconds(sum(each.processor_seconds for each in times))
    most = max((each.peak_bytes for each in times), default=0)
    rows.append(["all", format_seconds(whole), "", busy, format_bytes(most) if most else "", ""])
    heads = ("pass", "time", "share", "processor", "peak", "result")
    return printable(columns(heads, rows, left=("pass", "result")))


def _share(seconds: float, whole: float) -> str:
    return percent(seconds / whole) if whole else ""
