"""``partitioner run``: train with a plan, under torchrun or on local workers that it starts itself."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from cost_models.errors import UsageError
from partitioner.commands.options import emit, progress, settings
from partitioner.grow_batch import grow_batch
from partitioner.plan import Plan
from partitioner.workloads import load_workload
from runtime.launch import spawn_local


def run(
    plan: Path,
    model: str,
    /,
    *,
    steps: int,
    local: Annotated[bool, Parameter(negative=())] = False,
    learning_rate: float = 1e-3,
    seed: int = 0,
    timeout: float = 30.0,
    seq: int | None = None,
    dtype: str | None = None,
    set_: Annotated[tuple[str, ...], Parameter(name="--set", negative=())] = (),
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Train for some steps on the model's example batch, grown to the plan's batch size.

    Parameters
    ----------
    plan
        The plan file.
    model
        The model it was made for, as given to `partitioner plan`.
    steps
        Optimizer steps.
    local
        Start Gloo workers on this machine; without it, start this command under torchrun.
    learning_rate
        Of the plan's optimizer.
    seed
        Of dropout and of initial weights.
    timeout
        Seconds a rank waits for another before it ends with an error that names it.
    seq
        Sequence length of a bundled or hf: model.
    dtype
        Data type of a bundled or hf: model.
    set_
        key=value for the factory's arguments; may be repeated.
    json
        Print one JSON object.
    """
    loaded = Plan.load(plan)
    if steps < 1:
        raise UsageError(f"cannot run {steps} steps", because=["expected 1 or more"])
    arguments = (
        loaded.model_dump_json(),
        model,
        steps,
        learning_rate,
        seed,
        timeout,
        seq,
        dtype,
        settings(set_),
    )
    if local:
        with progress(f"running {steps} steps on {loaded.world_size} local processes"):
            result = spawn_local(loaded.world_size, train, *arguments, timeout_seconds=3600.0)[0]
    elif "RANK" not in os.environ:
        raise UsageError(
            "cannot run the plan in one process",
            because=[f"it needs {loaded.world_size}"],
            suggestions=[loaded.launch_command(model, str(plan), steps).splitlines()[-1], "or add --local"],
        )
    else:
        result = train(*arguments)
        if int(os.environ["RANK"]) != 0:
            return 0
    lines = [
        f"step {index}: loss {loss:.6f}, {seconds * 1e3:.1f} ms"
        for index, (loss, seconds) in enumerate(zip(result["losses"], result["step_seconds"], strict=True))
    ]
    predicted = loaded.prediction.step_seconds
    measured = result["median_step_seconds"]
    lines.append(
        f"predicted step {predicted * 1e3:.1f} ms, measured {measured * 1e3:.1f} ms ({predicted / measured:.2f}x)"
    )
    emit("\n".join(lines), {**result, "predicted_step_seconds": predicted}, json)
    return 0


def train(
    plan_json: str,
    model: str,
    steps: int,
    learning_rate: float,
    seed: int,
    timeout_seconds: float,
    seq: int | None,
    dtype: str | None,
    set_: dict[str, str],
) -> dict[str, Any]:
    """One rank of the run: losses and seconds per step. The first step warms up and does not count."""
    plan = Plan.from_json(plan_json)
    workload = load_workload(model, settings=set_, seq=seq, dtype=dtype)
    losses, seconds = [], []
    with plan.deploy(
        workload, learning_rate=learning_rate, seed=seed, timeout_seconds=timeout_seconds
    ) as deployment:
        dims = deployment.executor.batch_spec.batch_dims
        batch = grow_batch(workload.example_inputs, dims, workload.model, plan.batch_size)
        for _ in range(steps):
            started = time.perf_counter()
            losses.append(float(deployment.train_step(batch)))
            seconds.append(time.perf_counter() - started)
    counted = sorted(seconds[1:] or seconds)
    return {"losses": losses, "step_seconds": seconds, "median_step_seconds": counted[len(counted) // 2]}
