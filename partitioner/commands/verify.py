"""``partitioner verify``: does the plan compute what the model computes?"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cost_models.errors import UsageError
from cost_models.units import counted
from partitioner.commands.options import (
    NOTHING_GIVEN,
    JsonFlag,
    PlannedModelOptions,
    QuietFlag,
    emit,
    progress,
)
from partitioner.plan import Plan
from partitioner.verify.train import verify_training
from partitioner.verify.verify import verify_plan


def verify(
    plan: Path,
    model: str,
    /,
    *,
    model_options: PlannedModelOptions = NOTHING_GIVEN,
    timeout: float = 300.0,
    train: Annotated[bool, Parameter(negative=())] = False,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> int:
    """Run a plan on local CPU processes in float64 and compare every number with the unpartitioned model.

    Parameters
    ----------
    plan
        The plan file.
    model
        The model it was made for, as given to `partitioner plan`.
    model_options.dtype
        Data type of a bundled or hf: model.
    timeout
        Seconds for the step on the workers; with --train, for each run of a few steps.
    train
        Deploy the plan and train a few steps instead, as a script would: loader, clipping, scheduler, save, resume, resume
        under another plan, the plan's precision; beside a plain loop over the model.
    """
    if not (math.isfinite(timeout) and timeout > 0):
        raise UsageError(
            "cannot verify with this option", [f"--timeout is {timeout:g}, expected more than 0 seconds"]
        )
    dims = model_options.dims()
    loaded = Plan.load(plan)
    with progress(f"loading {model}", quiet=quiet):
        workload = model_options.load(model)
    with progress(
        f"{'training' if train else 'verifying'} on {counted(loaded.world_size, 'local process')}",
        quiet=quiet,
    ):
        options = {"timeout_seconds": timeout, **dims}
        report = (
            verify_training(loaded, workload, source=partial(model_options.load, model), **options)
            if train
            else verify_plan(loaded, workload, **options)
        )
    emit(report, report.to_dict(), json)
    return 0 if report.passed else 7
