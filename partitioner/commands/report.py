"""``partitioner report``: one HTML file with the pictures of a plan, or of two side by side."""

from __future__ import annotations

from pathlib import Path

from cost_models.errors import UsageError
from partitioner.commands.options import JsonFlag, OutputFile, QuietFlag, check_output, emit, progress
from partitioner.cost_graphs.plan import GraphPlan, is_graph_plan
from partitioner.pictures.data import report_data
from partitioner.pictures.page import render_page
from partitioner.plan import Plan
from partitioner.record.file import write_text


def report(
    plan: Path,
    other: Path | None = None,
    /,
    *,
    output: OutputFile = None,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> int:
    """Draw a plan: placement graph, devices, timeline, memory, traffic, what if. The file needs no network to be read.

    Parameters
    ----------
    plan
        The plan file.
    other
        Another plan file, shown beside the first with the differences marked.
    output
        The HTML file to write; the plan's name with .html if not given.
    """
    target = plan.with_suffix(".html") if output is None else output
    check_output(target)
    files = [plan] if other is None else [plan, other]
    if target.resolve() in [file.resolve() for file in files]:
        raise UsageError(
            f"cannot write the report to {target}",
            ["it is the plan file, which would be lost"],
            ["--output report.html"],
        )
    plans = [GraphPlan.load(file) if is_graph_plan(file) else Plan.load(file) for file in files]
    with progress("drawing", quiet=quiet):
        data = report_data(plans, [file.name for file in files])
        page = render_page(data)
    write_text(target, page)
    emit(f"wrote {target} ({len(page.encode()) / 1e6:.1f} MB)", data, json)
    return 0
