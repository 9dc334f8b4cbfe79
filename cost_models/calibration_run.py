"""The processes of a calibration: all workers measure at the same time, because they will train at the same time."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from cost_models.errors import InternalError
from cost_models.host import keep_freed_memory
from cost_models.measure_links import LinkTimes, make_pair, measure_links
from cost_models.measure_ops import (
    CaseSeconds,
    compute_overhead_seconds,
    copy_bytes_per_second,
    matmul_flops_per_second,
    measure_case,
    optimizer_rates,
)
from cost_models.op_cases import op_cases

Curve: TypeAlias = tuple[tuple[float, float], ...]
"""(bytes, seconds), by rising bytes."""
MeasureCollectives: TypeAlias = Callable[[int, Any], Mapping[str, Curve]]
"""Called on both ranks of a group of two with the rank and the group: seconds of collectives by kind."""

_HOST = "127.0.0.1"
_TIME_LIMIT_SECONDS = 600.0
"""A calibration takes a minute where each worker has a core, and longer where several share one."""
_TURNS = 3
"""The least of so many turns counts, which are 10 seconds apart: a virtual machine computes a fifth slower for seconds,
several times a minute."""
_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class ComputeTimes:
    """One measurement of all that a worker computes."""

    cases: tuple[CaseSeconds, ...]
    flops_per_second: dict[str, float]
    copy_bytes_per_second: float
    optimizers: dict[str, tuple[float, float]]
    compute_overhead_seconds: float


@dataclass(frozen=True)
class WorkerTimes(ComputeTimes):
    """The measurements of one worker. ``link``, ``collectives`` and ``busy_slowdown`` are rank 0's."""

    busy_slowdown: float
    link: LinkTimes | None
    collectives: Mapping[str, Curve]


def measure_workers(workers: int, collectives: MeasureCollectives | None = None) -> list[WorkerTimes]:
    """Start ``workers`` processes, one thread each, let them measure, and return what they found, by rank."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    started: list[tuple[Any, Connection]] = []
    try:
        for rank in range(workers):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_worker, args=(rank, workers, store.port, theirs, collectives), daemon=True
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        return _collect([pipe for _, pipe in started])
    finally:
        for process, pipe in started:
            pipe.close()
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(pipes: list[Connection]) -> list[WorkerTimes]:
    deadline = time.monotonic() + _TIME_LIMIT_SECONDS
    found: dict[int, WorkerTimes] = {}
    while len(found) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in found}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise InternalError("calibrate", [f"the workers were not done after {_TIME_LIMIT_SECONDS:g} s"])
        for pipe, rank in waiting.items():
            if pipe in ready:
                try:
                    found[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise InternalError("calibrate", [f"worker {rank} ended without a result"]) from None
    return [found[rank] for rank in range(len(pipes))]


def _worker(
    rank: int, workers: int, port: int, pipe: Connection, collectives: MeasureCollectives | None
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    keep_freed_memory()
    if sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=workers, timeout=timedelta(seconds=_TIME_LIMIT_SECONDS)
    )
    try:
        pipe.send(_measure(rank, workers, collectives))
    finally:
        dist.destroy_process_group()


def _measure(rank: int, workers: int, collectives: MeasureCollectives | None) -> WorkerTimes:
    torch.manual_seed(0)
    cases = op_cases()
    measure_case(cases[0])  # the first call of anything pays for loading it
    alone = matmul_flops_per_second(torch.float32) if rank == 0 else 1.0
    turns = []
    for _ in range(_TURNS):
        dist.barrier()
        turns.append(
            ComputeTimes(
                tuple(measure_case(case) for case in cases),
                {name: matmul_flops_per_second(dtype) for name, dtype in _DTYPES.items()},
                copy_bytes_per_second(),
                optimizer_rates(),
                compute_overhead_seconds(),
            )
        )
    flops = {name: max(turn.flops_per_second[name] for turn in turns) for name in _DTYPES}
    dist.barrier()
    link, curves = None, {}
    if workers > 1:
        pair = make_pair()
        link = measure_links(rank)
        if collectives is not None and rank < 2:
            curves = dict(collectives(rank, pair))
    dist.barrier()
    return WorkerTimes(
        tuple(_least(times) for times in zip(*(turn.cases for turn in turns), strict=True)),
        flops,
        max(turn.copy_bytes_per_second for turn in turns),
        {name: _least_of([turn.optimizers[name] for turn in turns]) for name in turns[0].optimizers},
        min(turn.compute_overhead_seconds for turn in turns),
        alone / flops["float32"],
        link,
        curves,
    )


def _least(times: Sequence[CaseSeconds]) -> CaseSeconds:
    return CaseSeconds(
        min(case.forward for case in times),
        min(case.backward for case in times),
        min(case.backward_weight for case in times),
    )


def _least_of(rates: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return min(tensor for tensor, _ in rates), min(byte for _, byte in rates)
