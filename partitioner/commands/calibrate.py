"""``partitioner calibrate``: measure this machine's CPU workers, or a GPU, so that predictions mean something."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter

from cost_models import host
from cost_models.calibration import cache_path
from cost_models.calibration import calibrate as measure
from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from cost_models.gpu.cases import NUMBERS, DeviceCase, Number, PlannedOp, cases_of, device_cases
from cost_models.gpu.fit import calibrated, calibrated_model, fit
from cost_models.gpu.profile import GpuProfile, merged
from cost_models.gpu.run import calibrate_device
from cost_models.gpu.shown import render_profile, render_rates
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
    if device == "cpu" and not merge:
        with progress("calibrating", quiet=quiet):
            found = measure(
                min(2, host.core_count()) if workers is None else workers, count_case, measure_collectives
            )
        path = cache_path() if output is None else output
        found.save(path)
        emit(f"{found}\nwritten to {path}", {**found.to_dict(), "path": str(path)}, json)
        return 0
    check_output(cluster_output)
    target = None if cluster is None else ClusterSpec.parse(cluster)
    cases = [] if merge else _cases(for_, short, target)
    path = _gpu_path(device) if output is None else output
    if merge:
        profile = merged([GpuProfile.load(file) for file in merge])
        profile.save(path)
    else:
        with progress(f"calibrating {device}", quiet=quiet):
            limit = math.inf if seconds is None else seconds
            gpu = torch.device(device)
            profile = calibrate_device(path, cases, count_case, gpu, seconds=limit, tell=report_phase)
    text, data = [render_profile(profile), f"written to {path}"], profile.model_dump(mode="json")
    if target is not None and cluster_output is not None:
        names = {case.name for case in cases} if for_ is not None else None
        model = calibrated_model(target, profile)
        like = next(found for found in target.devices if found.model == model)
        calibrated(target, profile, names).save(cluster_output)
        text += [render_rates(fit(profile, like, names), model), f"cluster written to {cluster_output}"]
    emit("\n".join(text), {**data, "path": str(path)}, json)
    return 0


def _cases(plan: Path | None, short: bool, cluster: ClusterSpec | None) -> list[DeviceCase]:
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


def _is_supported(number: Number, cluster: ClusterSpec) -> bool:
    return all(number in device.flops_per_second for device in cluster.devices if device.kind == "cuda")


def _gpu_path(device: str) -> Path:
    """Return the file of a GPU's calibration in the user's cache: one for each kind of card."""
    if not torch.cuda.is_available():  # of a merge elsewhere, nobody knows of which card the caller thinks
        raise UsageError(
            "cannot choose a file for a GPU's calibration", ["there is no GPU here"], ["-o FILE"]
        )
    card = torch.cuda.get_device_name(torch.device(device if device != "cpu" else "cuda"))
    return cache_path().parent / f"gpu-{re.sub(r'[^A-Za-z0-9]+', '-', card).strip('-').lower()}.json"


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
