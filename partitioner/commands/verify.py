"""``partitioner verify``: does the plan compute what the model computes?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from cost_models.errors import UsageError
from cost_models.units import counted
from partitioner.commands import options
from partitioner.commands.options import Dims, JsonFlag, Settings, Whole, emit, progress, settings
from partitioner.models.load import load_workload
from partitioner.plan import Plan
from partitioner.verify.verify import verify_plan


def verify(
    plan: Path,
    model: str,
    /,
    *,
    seq: Whole | None = None,
    dtype: str | None = None,
    set_: Settings = (),
    batch_dims: Dims = (),
    dynamic_dims: Dims = (),
    timeout: float = 300.0,
    json: JsonFlag = False,
) -> int:
    """Run a plan on local CPU processes in float64 and compare every number with the unpartitioned model.

    Parameters
    ----------
    plan
        The plan file.
    model
        The model it was made for, as given to `partitioner plan`.
    seq
        Sequence length of a bundled or hf: model.
    dtype
        Data type of a bundled or hf: model.
    set_
        key=value for the factory's arguments; may be repeated.
    batch_dims
        As given to `partitioner plan`.
    dynamic_dims
        As given to `partitioner plan`.
    timeout
        Seconds for the step on the workers.
    json
        Print one JSON object.
    """
    if not (math.isfinite(timeout) and timeout > 0):
        raise UsageError(
            "cannot verify with this option", [f"--timeout is {timeout:g}, expected more than 0 seconds"]
        )
    dims: dict[str, Any] = {
        "batch_dims": options.batch_dims(batch_dims),
        "dynamic_dims": options.dynamic_dims(dynamic_dims),
    }
    loaded = Plan.load(plan)
    with progress(f"loading {model}"):
        workload = load_workload(model, settings=settings(set_), seq=seq, dtype=dtype)
    with progress(f"verifying on {counted(loaded.world_size, 'local process')}"):
        report = verify_plan(loaded, workload, timeout_seconds=timeout, **dims)
    emit(str(report), report.to_dict(), json)
    return 0 if report.passed else 7
