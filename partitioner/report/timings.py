"""The passes of a compile as a table: how long each took, the memory that the process came to, and what came out."""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.units import format_bytes, format_seconds, percent
from partitioner.report.text import columns, printable
from passes.timings import PassTime


def pass_table(times: Sequence[PassTime]) -> str:
    """Render the passes in the order in which they ran, with each one's share of the whole.

    ``processor``: the process's own seconds, without those for which it waited; ``peak``: the most memory until then.
    """
    whole = sum(each.seconds for each in times)
    rows = [
        [
            each.name,
            format_seconds(each.seconds),
            percent(each.seconds / whole) if whole else "",
            format_seconds(each.processor_seconds),
            format_bytes(each.peak_bytes) if each.peak_bytes else "",
            each.result,
        ]
        for each in times
    ]
    busy = sum(each.processor_seconds for each in times)
    peak = max((each.peak_bytes for each in times), default=0)
    rows.append(
        ["all", format_seconds(whole), "", format_seconds(busy), format_bytes(peak) if peak else "", ""]
    )
    heads = ("pass", "time", "share", "processor", "peak", "result")
    return printable(columns(heads, rows, left=("pass", "result")))
