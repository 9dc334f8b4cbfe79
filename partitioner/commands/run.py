"""``partitioner run``: train with a plan, under torchrun or on local workers that it starts itself."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter

from cost_models.errors import ModelError, PartitionerError, PlanError, UsageError
from cost_models.units import counted, format_seconds
from partitioner.commands.options import (
    NOTHING_GIVEN,
    JsonFlag,
    ModelOptions,
    PlannedModelOptions,
    QuietFlag,
    WholeNumber,
    emit,
    progress,
    settings,
)
from partitioner.deployment.facts import UNRUN_SUGGESTIONS, unrun_problem
from partitioner.plan import Plan
from partitioner.report.intervals import step_text
from partitioner.verify.grow_batch import grow_batch
from runtime.ranks.launch import spawn_local

MOST_STEPS = 1_000_000
MOST_SECONDS = 24 * 3600.0


def run(
    plan: Path,
    model: str,
    /,
    *,
    steps: WholeNumber,
    local: Annotated[bool, Parameter(negative=())] = False,
    learning_rate: float = 1e-3,
    seed: WholeNumber = 0,
    timeout: float = 30.0,
    model_options: PlannedModelOptions = NOTHING_GIVEN,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
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
    model_options.dtype
        Data type of a bundled or hf: model.
    """
    _check(steps, learning_rate, timeout)
    deploying: dict[str, Any] = {
        "learning_rate": learning_rate,
        "seed": seed,
        "timeout_seconds": timeout,
        **model_options.dims(),
    }
    if local:  # these workers are on this machine, whatever the plan's hosts and devices are called
        deploying |= {"device": "cpu", "check_hosts": False}
    loaded = Plan.load(plan)
    settings(model_options.set_)  # refused before any rank starts
    if not local and (unrun := unrun_problem(loaded)) is not None:
        raise PlanError(f"cannot run the plan for {loaded.model.name}", [unrun], UNRUN_SUGGESTIONS)
    arguments = loaded.model_dump_json(), model, model_options, steps, deploying
    if local:
        with progress(
            f"running {counted(steps, 'step')} on {counted(loaded.world_size, 'local process')}", quiet=quiet
        ):
            result = _run_locally(loaded.world_size, arguments)
    elif os.environ.get("WORLD_SIZE") != str(loaded.world_size):
        launch = loaded.launch_command(model, str(plan), steps).splitlines()
        running = os.environ.get("WORLD_SIZE")
        where = "outside torchrun" if running is None else f"in {counted(int(running), 'process')}"
        raise UsageError(
            f"cannot run the plan {where}",
            because=[f"it needs {counted(loaded.world_size, 'process')}, and --local was not given"],
            suggestions=["add --local, to run on CPU workers of this machine", *launch],
        )
    else:
        with progress(f"running {counted(steps, 'step')}", quiet=quiet):
            result = train(*arguments)
        if int(os.environ["RANK"]) != 0:
            return 0
    predicted = loaded.prediction.step_seconds
    interval = loaded.intervals.step_seconds
    data = {**result, "predicted_step_seconds": predicted, "predicted_step_seconds_interval": interval}
    emit(_text(result, predicted, step_text(loaded)), data, json)
    return 0


def _check(steps: int, learning_rate: float, timeout: float) -> None:
    """Refuse numbers that mean nothing, all at once."""
    problems = []
    if not 1 <= steps <= MOST_STEPS:
        problems.append(f"--steps is {steps}, expected 1 to {MOST_STEPS:,}")
    if not (math.isfinite(learning_rate) and learning_rate >= 0):
        problems.append(f"--learning-rate is {learning_rate:g}, expected 0 or more")
    if not (math.isfinite(timeout) and timeout > 0):
        problems.append(f"--timeout is {timeout:g}, expected more than 0 seconds")
    if problems:
        raise UsageError("cannot run with these options", problems)


def _run_locally(world_size: int, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Run on local workers, and return what rank 0 measured.

    An error that every rank raises alike (another model, a bad file) is raised as it is.
    """
    results = spawn_local(world_size, _train_or_refusal, *arguments, timeout_seconds=MOST_SECONDS)
    refusals = [result for result in results if isinstance(result, PartitionerError)]
    if refusals:
        raise refusals[0]
    measured: dict[str, Any] = results[0]
    return measured


def _train_or_refusal(*arguments: Any) -> dict[str, Any] | PartitionerError:
    try:
        return train(*arguments)
    except (UsageError, ModelError) as error:
        return error


def _text(result: dict[str, Any], predicted_seconds: float, predicted: str) -> str:
    pairs = enumerate(zip(result["losses"], result["step_seconds"], strict=True))
    lines = [
        f"step {index:>4}   loss {loss:.6f}   {format_seconds(seconds)}" for index, (loss, seconds) in pairs
    ]
    measured = result["median_step_seconds"]
    lines.append(
        f"measured {format_seconds(measured)} a step (median without the first), "
        f"predicted {predicted}: {predicted_seconds / measured:.2f}x"
    )
    return "\n".join(lines)


def train(
    plan_json: str, model: str, model_options: ModelOptions, steps: int, deploying: dict[str, Any]
) -> dict[str, Any]:
    """Train as one rank of the run: losses and seconds per step. The first step warms up and does not count.

    ``deploying``: options of ``Plan.deploy``.
    """
    plan = Plan.from_json(plan_json)
    # A factory that does not seed itself makes the same weights on every rank.
    torch.manual_seed(deploying["seed"])
    workload = model_options.load(model)
    losses, seconds = [], []
    with plan.deploy(workload, **deploying) as deployment:
        dims = deployment.executor.batch_spec.batch_dims
        batch = grow_batch(workload.example_inputs, dims, workload.model, plan.batch_size)
        for _ in range(steps):
            started = time.perf_counter()
            losses.append(float(deployment.train_step(batch)))
            seconds.append(time.perf_counter() - started)
    counted = sorted(seconds[1:] or seconds)
    return {"losses": losses, "step_seconds": seconds, "median_step_seconds": counted[len(counted) // 2]}
