"""``partitioner compare``: the profile of a real run laid over the prediction of its plan."""

from __future__ import annotations

from pathlib import Path

from partitioner.commands.options import JsonFlag, OutputFile, QuietFlag, check_output, emit, progress
from partitioner.plan import Plan
from partitioner.report.compare import compare as lay_over
from partitioner.report.comparison import render_comparison
from partitioner.report.profile_file import read_profile


def compare(
    plan: Path,
    trace: Path,
    /,
    *,
    output: OutputFile = None,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> int:
    """Say where a real run took other times than predicted, what that says of the rates, and whether the plan stands.

    Parameters
    ----------
    plan
        The plan file.
    trace
        The profile of a run of it: what `engine.profile(batches).save(FILE)` wrote.
    output
        Write the plan's cluster at the corrected rates to this file, to plan with it again.
    """
    check_output(output)
    loaded, measured = Plan.load(plan), read_profile(trace)
    with progress("comparing", quiet=quiet):
        found = lay_over(loaded, measured)
    if output is not None:
        found.cluster.save(output)
    emit(render_comparison(found), found.to_dict(), json)
    return 0
