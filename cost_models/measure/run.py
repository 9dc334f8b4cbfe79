"""Calibrations from end to end.

CPU workers    all at the same time, because they will train at the same time ─► seconds of each ─► records
a GPU          jobs ─► those without a record ─► measured one by one ─► file, every SAVE_SECONDS and at the end
"""

from __future__ import annotations

import datetime
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from cost_models.errors import UsageError
from cost_models.measure.calibration import Calibration, Machine, Measurement, PhaseTiming
from cost_models.measure.cases import OpCase, worker_cases
from cost_models.measure.gpu_links import measure_links
from cost_models.measure.messages import measure_messages
from cost_models.measure.ops import (
    COPY_BYTES,
    CPU,
    DEFAULT_WAY,
    OPTIMIZERS,
    PRODUCT_SIZE,
    WAYS,
    WORKER_STEPS,
    CaseSeconds,
    CountCase,
    compute_overhead_seconds,
    copy_seconds,
    measure_case,
    measure_memory,
    measure_optimizer,
    measure_overheads,
    product_seconds,
    time_case,
    worker_record,
)
from cost_models.measure.processes import run_ranks

Figures: TypeAlias = dict[str, tuple[float, ...]]
"""Numbers by what was measured; of less is better."""
MeasureCollectives: TypeAlias = Callable[[int, Any], Mapping[str, Sequence[tuple[float, float]]]]
"""Called on both ranks of a group of two with the rank and the group: (bytes, seconds) of collectives by kind."""

MOST_WORKERS = 64
_TIME_LIMIT_SECONDS = 600.0
"""A calibration takes a minute where each worker has a core, and longer where several share one."""
_TURNS = 3
"""The least of so many turns counts, which are 10 seconds apart: a virtual machine computes a fifth slower for seconds,
several times a minute."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SAVE_SECONDS = 2.0
"""The most seconds of a GPU's measurements that an interruption loses, beside the one under way."""


# --------------------------------------------------------------------------------------------------
# CPU workers


def calibrate_workers(
    workers: int, count: CountCase, collectives: MeasureCollectives | None = None
) -> Calibration:
    """Measure this machine with ``workers`` processes at once; takes a minute.

    ``count`` counts a case's FLOPs and bytes as the cost model of whole models does (``passes.costs.cases``).
    ``collectives`` measures those of the executor (``runtime.measure.collectives``); without it they go by the link.
    """
    if not 1 <= workers <= MOST_WORKERS:
        raise UsageError(f"cannot calibrate with {workers} workers", [f"expected 1 to {MOST_WORKERS}"])
    date, started = _now(), time.monotonic()
    by_rank = run_ranks(workers, "cpu", "gloo", _TIME_LIMIT_SECONDS, _measure_worker, collectives)
    figures, first = _combined([figures for figures, _ in by_rank], statistics.mean), by_rank[0][1]
    records = {
        **_processor_records(figures),
        **{
            case.name: worker_record(case, count(case), CaseSeconds(*figures[case.name]))
            for case in worker_cases()
        },
        **first,
        "host": first["host"].model_copy(
            update={"values": {**first["host"].values, "compute_seconds": figures["compute"][0]}}
        ),
    }
    return Calibration(
        machine=Machine.this(CPU),
        date=date,
        workers=workers,
        seconds=time.monotonic() - started,
        records=records,
    )


def _processor_records(figures: Figures) -> dict[str, Measurement]:
    """Make the records of products by type, of the copy, and of optimizers."""
    copied = PhaseTiming(flops=0, moved_bytes=2 * COPY_BYTES, seconds=figures["copy"][0])
    records = {"copy": Measurement(kind="copy", number="float32", parts={"forward": copied})}
    for dtype in _DTYPES:
        number = str(dtype).removeprefix("torch.")
        product = PhaseTiming(
            flops=2 * PRODUCT_SIZE**3,
            moved_bytes=3 * PRODUCT_SIZE**2 * dtype.itemsize,
            seconds=figures[f"product {number}"][0],
        )
        records[f"product {number}"] = Measurement(kind="product", number=number, parts={"forward": product})
    for name in OPTIMIZERS:
        per_tensor, per_byte = figures[f"optimizer {name}"]
        way = DEFAULT_WAY["cpu"]
        records[f"optimizer {name} {way}"] = Measurement(
            kind=f"optimizer {name}",
            number="float32",
            backend=way,
            values={"seconds_per_tensor": per_tensor, "seconds_per_byte": per_byte},
        )
    return records


def _measure_worker(
    rank: int, workers: int, collectives: MeasureCollectives | None
) -> tuple[Figures, dict[str, Measurement]]:
    """Measure in one worker: the least figures of all turns; and records of which rank 0's count."""
    torch.manual_seed(0)
    cases = worker_cases()
    time_case(cases[0])  # the first call of anything pays for loading it
    alone = product_seconds(torch.float32) if rank == 0 else 1.0
    turns = []
    for _ in range(_TURNS):
        dist.barrier()
        turns.append(_measure_turn(cases))
    figures = _combined(turns, min)
    host = {"busy_slowdown": figures["product float32"][0] / alone}
    records: dict[str, Measurement] = {}
    dist.barrier()
    if workers > 1:
        pair = dist.new_group([0, 1], backend="gloo")
        if rank < 2:
            messages = measure_messages(rank, pair)
            host |= {
                "contention": messages.contention,
                "send_seconds": messages.send_seconds,
                "receive_seconds": messages.receive_seconds,
            }
            curves = {"message": messages.one_way, **(collectives(rank, pair) if collectives else {})}
            for kind, curve in curves.items():
                values = {str(int(size)): seconds for size, seconds in curve}
                records[f"{kind} x2"] = Measurement(kind="link", backend="gloo", values=values)
    dist.barrier()
    return figures, {**records, "host": Measurement(kind="host", values=host)}


def _measure_turn(cases: Sequence[OpCase]) -> Figures:
    figures = {case.name: astuple(time_case(case)) for case in cases}
    for dtype in _DTYPES:
        figures[f"product {str(dtype).removeprefix('torch.')}"] = (product_seconds(dtype),)
    figures["copy"] = (copy_seconds(),)
    for name in OPTIMIZERS:
        values = measure_optimizer(name, DEFAULT_WAY["cpu"], CPU, WORKER_STEPS).values
        figures[f"optimizer {name}"] = values["seconds_per_tensor"], values["seconds_per_byte"]
    figures["compute"] = (compute_overhead_seconds(),)
    return figures


def _combined(several: Sequence[Figures], combine: Callable[[Sequence[float]], float]) -> Figures:
    """Combine each number that was measured several times."""
    return {
        name: tuple(combine(column) for column in zip(*(figures[name] for figures in several), strict=True))
        for name in several[0]
    }


# --------------------------------------------------------------------------------------------------
# A GPU


@dataclass(frozen=True)
class CalibrationJob:
    """Something to measure: the names of its records, and what measures them."""

    names: tuple[str, ...]
    run: Callable[[], dict[str, Measurement]]


def jobs_of(
    cases: Sequence[OpCase], count: CountCase, device: torch.device, devices: int
) -> list[CalibrationJob]:
    """List everything: memory first, while the process holds little; overheads, optimizers, ops, links if there are any."""

    def one(name: str, run: Callable[[], Measurement]) -> CalibrationJob:
        return CalibrationJob((name,), lambda: {name: run()})

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
            jobs.append(CalibrationJob(names, partial(measure_links, world, "cuda", "nccl")))
    return jobs


def calibrate_device(
    path: Path | None,
    cases: Sequence[OpCase],
    count: CountCase,
    device: torch.device,
    *,
    seconds: float = math.inf,
    tell: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure what the file at ``path`` does not hold yet, for ``seconds`` at most; return all it holds then.

    Raises UsageError where the file is of another machine or software.
    """
    machine = Machine.this(device)
    earlier = Calibration(machine=machine, date=_now())
    if path is not None and path.exists():
        earlier = Calibration.load(path)
        if differences := earlier.machine.differences(machine):
            raise UsageError(
                f"cannot go on with the calibration {path}",
                ["it is of another machine or other software", *differences],
                ["write to another file with -o"],
            )
    jobs = jobs_of(cases, count, device, machine.count)
    missing = [job for job in jobs if not earlier.records.keys() >= set(job.names)]
    started = saved = time.monotonic()
    records = dict(earlier.records)

    def as_measured() -> Calibration:
        spent = earlier.seconds + time.monotonic() - started
        return earlier.model_copy(update={"records": records, "date": _now(), "seconds": spent})

    for number, job in enumerate(missing):
        if time.monotonic() - started > seconds:
            tell(f"out of time: {len(missing) - number} of {len(jobs)} are left for the next call")
            break
        tell(f"{number + 1} of {len(missing)}: {job.names[0]}")
        records.update(job.run())
        if path is not None and time.monotonic() - saved > SAVE_SECONDS:
            as_measured().save(path)
            saved = time.monotonic()
    calibration = as_measured() if missing else earlier
    if path is not None and missing:
        calibration.save(path)
    return calibration


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
