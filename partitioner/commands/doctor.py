"""``partitioner doctor``: what is on this machine, and what will not work on it."""

from __future__ import annotations

from partitioner.commands.options import JsonFlag, QuietFlag, emit, progress
from partitioner.doctor.findings import diagnose, gather


def doctor(*, quiet: QuietFlag = False, json: JsonFlag = False) -> int:
    """Say which versions, devices and backends there are, what will not work here, and what to do. 0 if planning works.

    Parameters
    ----------
    """
    with progress("looking at this machine", quiet=quiet):
        found = diagnose(gather())
    emit(found, found.to_dict(), json)
    return 0 if found.can_plan else 1
