"""A GPU's calibration from end to end: what is missing in the file is measured, and written as it is found.

jobs ─► those without a record ─► measured one by one ─► file, every SAVE_SECONDS and at the end
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from cost_models.errors import UsageError
from cost_models.gpu.cases import DeviceCase
from cost_models.gpu.links import measure_links
from cost_models.gpu.measure import (
    OPTIMIZERS,
    WAYS,
    Count,
    measure_case,
    measure_memory,
    measure_optimizer,
    measure_overheads,
)
from cost_models.gpu.profile import GpuMachine, GpuProfile, Measured

SAVE_SECONDS = 2.0
"""The most seconds of measurements that an interruption loses, beside the one under way."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """Something to measure: the names of its records, and what measures them."""

    names: tuple[str, ...]
    run: Callable[[], dict[str, Measured]]


def jobs_of(cases: Sequence[DeviceCase], count: Count, device: torch.device, devices: int) -> list[Job]:
    """List everything: memory first, while the process holds little; overheads, optimizers, ops, links if there are any."""

    def one(name: str, run: Callable[[], Measured]) -> Job:
        return Job((name,), lambda: {name: run()})

    jobs = [
        one("memory", partial(measure_memory, device)),
        one("overheads", partial(measure_overheads, device)),
        *(
            one(f"optimizer {name} {way}", partial(measure_optimizer, name, way, device))
            for name in OPTIMIZERS
            for way in WAYS
        ),
        *(one(case.name, partial(measure_case, case, count, device)) for case in cases),
    ]
    if device.type == "cuda" and devices > 1:
        for world in sorted({2, devices}):
            collectives = tuple(f"{what} x{world}" for what in ("all_reduce", "all_gather", "reduce_scatter"))
            names = ("message x2", *collectives) if world == 2 else collectives
            jobs.append(Job(names, partial(measure_links, world, "cuda", "nccl")))
    return jobs


def calibrate_device(
    path: Path | None,
    cases: Sequence[DeviceCase],
    count: Count,
    device: torch.device,
    *,
    seconds: float = math.inf,
    tell: Tell = lambda _: None,
) -> GpuProfile:
    """Measure what the file at ``path`` does not hold yet, for ``seconds`` at most; return all it holds then.

    Raises UsageError where the file is of another machine or software.
    """
    machine = GpuMachine.this(device)
    profile = GpuProfile(machine=machine, date=_now())
    if path is not None and path.exists():
        profile = GpuProfile.load(path)
        if differences := profile.machine.differences(machine):
            raise UsageError(
                f"cannot go on with the calibration {path}",
                ["it is of another machine or other software", *differences],
                ["write to another file with -o"],
            )
    jobs = jobs_of(cases, count, device, machine.count)
    missing = [job for job in jobs if not profile.records.keys() >= set(job.names)]
    started = saved = time.monotonic()
    records, before = dict(profile.records), profile.seconds

    def kept() -> GpuProfile:
        spent = before + time.monotonic() - started
        return profile.model_copy(update={"records": records, "date": _now(), "seconds": spent})

    for number, job in enumerate(missing):
        if time.monotonic() - started > seconds:
            tell(f"out of time: {len(missing) - number} of {len(jobs)} are left for the next call")
            break
        tell(f"{number + 1} of {len(missing)}: {job.names[0]}")
        records.update(job.run())
        if path is not None and time.monotonic() - saved > SAVE_SECONDS:
            kept().save(path)
            saved = time.monotonic()
    found = kept() if missing else profile
    if path is not None and missing:
        found.save(path)
    return found


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
