"""``partitioner calibrate``: measure this machine's CPU workers, so that local predictions mean something."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cost_models import host
from cost_models.calibration import cache_path
from cost_models.calibration import calibrate as measure
from partitioner.commands.options import JsonFlag, QuietFlag, WholeNumber, emit, progress
from passes.costs.cases import count_case


def calibrate(
    *,
    workers: WholeNumber | None = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> int:
    """Measure compute, memory, and messages between CPU workers on this machine; `local:N` then plans with it.

    Takes some seconds. Run it while nothing else does.

    Parameters
    ----------
    workers
        Processes that measure at the same time; 2 if not given, or 1 on one core.
    output
        Where to write it, instead of the user's cache ($PARTITIONER_CALIBRATION, or ~/.cache/partitioner).
    quiet
        Say nothing on stderr but errors.
    json
        Print the calibration as one JSON object.
    """
    with progress("calibrating", quiet=quiet):
        found = measure(min(2, host.core_count()) if workers is None else workers, count_case)
    path = cache_path() if output is None else output
    found.save(path)
    emit(f"{found}\nwritten to {path}", {**found.to_dict(), "path": str(path)}, json)
    return 0
