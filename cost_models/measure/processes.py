"""Processes that measure together: one per CPU worker or GPU, in one group of torch.distributed."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from cost_models.errors import InternalError
from cost_models.host import keep_freed_memory

_HOST = "127.0.0.1"
_STORE_SECONDS = 60.0
_END_SECONDS = 10.0


def run_ranks(
    world: int, kind: str, backend: str, seconds: float, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """Call ``function(rank, world, *arguments)`` in ``world`` new processes of one group; return the results by rank.

    Each process has one thread, or with ``kind`` "cuda" the GPU of its rank. InternalError where one ends without a
    result, or is not done after ``seconds``.
    """
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore(
        _HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_STORE_SECONDS)
    )
    started: list[tuple[Any, Connection]] = []
    try:
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run,
                args=(rank, world, store.port, kind, backend, seconds, theirs, function, arguments),
                daemon=True,
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        return _collect([pipe for _, pipe in started], seconds)
    finally:
        for process, pipe in started:
            pipe.close()
            process.join(_END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(pipes: list[Connection], seconds: float) -> list[Any]:
    deadline = time.monotonic() + seconds
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise InternalError("calibrate", [f"the workers were not done after {seconds:g} s"])
        for pipe, rank in waiting.items():
            if pipe in ready:
                try:
                    results[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise InternalError("calibrate", [f"worker {rank} ended without a result"]) from None
    return [results[rank] for rank in range(len(pipes))]


def _run(
    rank: int,
    world: int,
    port: int,
    kind: str,
    backend: str,
    seconds: float,
    pipe: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
        keep_freed_memory()
    if sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=_STORE_SECONDS))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
    )
    try:
        pipe.send(function(rank, world, *arguments))
    finally:
        dist.destroy_process_group()
