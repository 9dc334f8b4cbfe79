"""``partitioner calibrate``: measure this machine's CPU workers, or a GPU, so that predictions mean something."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter

from cost_models import host
from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from cost_models.files import calibration_path
from cost_models.measure.calibration import Calibration, merged
from cost_models.measure.cases import NUMBERS, NumberFormat, OpCase, PlannedOp, cases_of, device_cases
from cost_models.measure.fit import fit
from cost_models.measure.run import calibrate_device, calibrate_workers
from cost_models.measure.shown import render_calibration, render_rates
from cost_models.variants import calibrated, calibrated_model
from partitioner.commands.options import JsonFlag, QuietFlag, WholeNumber, check_output, emit, progress
from partitioner.plan import Plan
from passes.costs.cases import count_case
from passes.progress import report_phase
from runtime.measure.collectives import measure_collectives

MOST_SECONDS = 3600.0


def calibrate(
    *,
    workers: WholeNumber | None = None,
    device: str = "cpu",
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    for_: Annotated[Path | None, Parameter(name="--for")] = None,
    short: Annotated[bool, Parameter(negative=())] = False,
    seconds: float | None = None,
    merge: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative=())] = (),
    cluster: str | None = None,
    cluster_output: Path | None = None,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> int:
    """Measure this machine: its CPU workers, with which `local:N` then plans, or with `--device cuda` a GPU.

    Workers take some seconds, a GPU some minutes, and what was measured of a GPU is kept if that is interrupted: the same
    command goes on. Run it while nothing else does.

    Parameters
    ----------
    workers
        CPU processes that measure at the same time; 2 if not given, or 1 on one core.
    device
        cpu, cuda or cuda:N.
    output
        Where to write it, instead of the user's cache ($PARTITIONER_CALIBRATION, or ~/.cache/partitioner).
    for_
        GPU: measure the ops of this plan file, at their own sizes, instead of the common ones.
    short
        GPU: measure a third of the ops.
    seconds
        GPU: stop after so many; the same command goes on.
    merge
        Put these GPU calibrations together instead of measuring.
    cluster
        GPU: a cluster as for `partitioner plan`, to be given the measured rates.
    cluster_output
        GPU: the file to write that cluster to.
    quiet
        Say nothing on stderr but errors.
    json
        Print the calibration as one JSON object.
    """
    _refuse_mixed(workers, device, output, for_, short, seconds, merge, cluster, cluster_output)
    check_output(cluster_output)
    target = None if cluster is None else ClusterSpec.parse(cluster)
    of_workers = device == "cpu" and not merge
    cases = [] if merge or of_workers else _cases(for_, short, target)
    if output is None:
        output = calibration_path() if of_workers else _gpu_path(device)
    if merge:
        calibration = merged([Calibration.load(file, "cuda") for file in merge])
        calibration.save(output)
    elif of_workers:
        with progress("calibrating", quiet=quiet):
            count = min(2, host.core_count()) if workers is None else workers
            calibration = calibrate_workers(count, count_case, measure_collectives)
        calibration.save(output)
    else:
        with progress(f"calibrating {device}", quiet=quiet):
            limit = math.inf if seconds is None else seconds
            gpu = torch.device(device)
            calibration = calibrate_device(output, cases, count_case, gpu, seconds=limit, tell=report_phase)
    text = [render_calibration(calibration), f"written to {output}"]
    if target is not None and cluster_output is not None:
        names = {case.name for case in cases} if for_ is not None else None
        model = calibrated_model(target, calibration)
        like = next(device for device in target.devices if device.model == model)
        calibrated(target, calibration, names).save(cluster_output)
        text += [render_rates(fit(calibration, like, names), model), f"cluster written to {cluster_output}"]
    emit("\n".join(text), {**calibration.model_dump(mode="json"), "path": str(output)}, json)
    return 0


def _cases(plan: Path | None, short: bool, cluster: ClusterSpec | None) -> list[OpCase]:
    """List what to measure: the common ops, or those of a plan. Types that the cluster's devices lack are left out."""
    numbers = NUMBERS if cluster is None else tuple(n for n in NUMBERS if _is_supported(n, cluster))
    if plan is None:
        return device_cases(numbers, short=short)
    loaded = Plan.load(plan)
    if loaded.outline is None:
        raise UsageError(
            f"cannot list the ops of {plan}",
            ["it is of an earlier version and has no outline"],
            ["plan anew"],
        )
    ops = [PlannedOp(kind.op, kind.shape, kind.dtype, kind.forward_flops) for kind in loaded.outline.kinds]
    cases = cases_of(ops, numbers)
    if not cases:
        raise UsageError(
            f"cannot calibrate for {plan}",
            ["none of its ops is of a kind that is measured"],
            ["leave out --for: the common ops are measured then"],
        )
    return cases


def _is_supported(number: NumberFormat, cluster: ClusterSpec) -> bool:
    return all(number in device.flops_per_second for device in cluster.devices if device.kind == "cuda")


def _gpu_path(device: str) -> Path:
    """Return the file of a GPU's calibration in the user's cache: one for each kind of card."""
    if not torch.cuda.is_available():  # of a merge elsewhere, nobody knows of which card the caller thinks
        raise UsageError(
            "cannot choose a file for a GPU's calibration", ["there is no GPU here"], ["-o FILE"]
        )
    card = torch.cuda.get_device_name(torch.device(device if device != "cpu" else "cuda"))
    return calibration_path().parent / f"gpu-{re.sub(r'[^A-Za-z0-9]+', '-', card).strip('-').lower()}.json"


def _refuse_mixed(
    workers: int | None,
    device: str,
    output: Path | None,
    plan: Path | None,
    short: bool,
    seconds: float | None,
    merge: tuple[Path, ...],
    cluster: str | None,
    cluster_output: Path | None,
) -> None:
    """Refuse options that do not go together, all at once, and a GPU that is not there."""
    problems: list[str] = []
    suggestions: list[str] = []
    given: dict[str, Any] = {
        "--for": plan,
        "--short": short,
        "--seconds": seconds,
        "--cluster": cluster,
        "--cluster-output": cluster_output,
    }
    if re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", device) is None:
        problems.append(f"--device is {device!r}, expected cpu, cuda or cuda:N")
    elif device == "cpu" and not merge:
        problems += [f"{name} is for GPUs" for name, value in given.items() if value]
        suggestions += ["add --device cuda"] * bool(problems)
    elif workers is not None:
        problems.append("--workers is for CPU workers")
    if merge and len(merge) < 2:
        problems.append("--merge takes two files or more")
    if merge and (plan is not None or short or seconds is not None):
        problems.append("--merge measures nothing, so --for, --short and --seconds mean nothing")
    if plan is not None and short:
        problems.append("--short is of the common ops, --for measures a plan's")
    if (cluster is None) != (cluster_output is None):
        problems.append("--cluster and --cluster-output go together")
    if seconds is not None and not 0 < seconds <= MOST_SECONDS:
        problems.append(f"--seconds is {seconds:g}, expected more than 0 and at most {MOST_SECONDS:g}")
    if not problems and device != "cpu" and not merge:
        count = torch.cuda.device_count()
        if int(device.partition(":")[2] or 0) >= count:
            problems.append(f"there is no {device} here: torch {torch.__version__} sees {count} CUDA devices")
            suggestions.append(
                "run it on the machine with the GPU; `partitioner doctor` says what torch sees"
            )
    if problems:
        raise UsageError("cannot calibrate with these options", problems, suggestions)
