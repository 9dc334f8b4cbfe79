"""The calibration of this machine's CPU workers: kept as JSON, used by ``ClusterSpec.local``.

A file of another machine, another torch, another format, or one that cannot be read is left aside with a warning; planning
then rests on defaults and says so.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError

from cost_models.errors import UsageError
from cost_models.files import CALIBRATION, calibration_path
from cost_models.measure.calibration import Calibration, Machine, field_problems
from cost_models.measure.fit import worker_rates

logger = logging.getLogger("partitioner")


class StoredCalibration(NamedTuple):
    """A valid calibration of this machine, and its file."""

    calibration: Calibration
    path: Path


def stored_calibration() -> StoredCalibration | None:
    """Load this machine's calibration, if there is a valid one; a file that is not is left aside with a warning."""
    if os.environ.get(CALIBRATION) == "none":
        return None
    path = calibration_path()
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        return None
    calibration = _read(path, stamp)
    return None if calibration is None else StoredCalibration(calibration, path)


@lru_cache(maxsize=8)
def _read(path: Path, _: int) -> Calibration | None:
    try:
        calibration = Calibration.load(path, "cpu")
        problems = calibration.machine.differences(Machine.this(torch.device("cpu")))
        worker_rates(calibration)
    except UsageError as error:
        problems = list(error.because)
    except ValidationError as error:
        problems = field_problems(error)
    except (ValueError, KeyError) as error:  # of numbers that are there, but cannot be
        problems = [str(error)]
    else:
        if not problems:
            return calibration
        problems.insert(0, "it is of another machine or other software")
    reason = "; ".join(problems)
    logger.warning("ignoring the calibration %s: %s; run `partitioner calibrate` again", path, reason)
    return None
