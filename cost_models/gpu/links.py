"""Links between the GPUs of this machine: messages and collectives by size, one process per device.

Written for NCCL; ``backend="gloo"`` with CPU tensors runs the same code, for tests of it.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from cost_models.errors import InternalError
from cost_models.gpu.profile import Measured
from cost_models.gpu.timing import ROUNDS, synchronize

SIZES_BYTES = (2**16, 2**20, 2**24, 2**28)
_HOST = "127.0.0.1"
_LIMIT_SECONDS = 120.0
_CALLS = 4


def measure_links(
    world: int, kind: str, backend: str, sizes: tuple[int, ...] = SIZES_BYTES
) -> dict[str, Measured]:
    """Measure with ``world`` processes on the first devices: by name, such as ``all_reduce x4``.

    Values are seconds by bytes: ``"1048576": 5e-05``. Of a collective, the bytes are those of the whole tensor.
    """
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    ours, theirs = context.Pipe(duplex=False)
    started = [
        context.Process(
            target=_worker, args=(rank, world, store.port, kind, backend, sizes, theirs), daemon=True
        )
        for rank in range(world)
    ]
    try:
        for process in started:
            process.start()
        theirs.close()
        if not ours.poll(_LIMIT_SECONDS):
            raise InternalError("measure links", [f"the workers were not done after {_LIMIT_SECONDS:g} s"])
        try:
            found: dict[str, dict[str, float]] = ours.recv()
        except EOFError:
            raise InternalError("measure links", ["a worker ended without a result"]) from None
    finally:
        ours.close()
        for process in started:
            if process.pid is not None:
                process.join(10.0)
                if process.is_alive():
                    process.kill()
                    process.join()
    return {
        f"{name} x{world}": Measured(kind="link", backend=backend, values=values)
        for name, values in found.items()
    }


def _worker(
    rank: int, world: int, port: int, kind: str, backend: str, sizes: tuple[int, ...], pipe: Connection
) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=_LIMIT_SECONDS)
    )
    try:
        found = {}
        for name, make in _PATTERNS.items():
            if name == "message" and world != 2:
                continue
            found[name] = {str(size): _seconds(make(rank, world, size, device), device) for size in sizes}
        if rank == 0:
            pipe.send(found)
    finally:
        dist.destroy_process_group()


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call: the median of rounds from a barrier on."""
    found = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        synchronize(device)
        started = time.perf_counter()
        for _ in range(_CALLS):
            run()
        synchronize(device)
        found.append((time.perf_counter() - started) / _CALLS)
    return statistics.median(found[1:])


def _message(rank: int, world: int, size: int, device: torch.device) -> Callable[[], Any]:
    """Send there and back; half of that is one way, so each call is one message on average."""
    buffer, peer, turn = torch.ones(size, dtype=torch.uint8, device=device), 1 - rank, [0]

    def run() -> None:
        sends = turn[0] % 2 == rank
        turn[0] += 1
        work = dist.isend(buffer, peer) if sends else dist.irecv(buffer, peer)
        assert work is not None
        work.wait()

    return run


def _all_reduce(rank: int, world: int, size: int, device: torch.device) -> Callable[[], Any]:
    buffer = torch.ones(size // 4, device=device)
    return lambda: dist.all_reduce(buffer)


def _all_gather(rank: int, world: int, size: int, device: torch.device) -> Callable[[], Any]:
    whole = torch.ones(size // 4 // world * world, device=device)
    own = torch.ones(len(whole) // world, device=device)
    return lambda: dist.all_gather_into_tensor(whole, own)


def _reduce_scatter(rank: int, world: int, size: int, device: torch.device) -> Callable[[], Any]:
    whole = torch.ones(size // 4 // world * world, device=device)
    own = torch.ones(len(whole) // world, device=device)
    return lambda: dist.reduce_scatter_tensor(own, whole)


_PATTERNS = {
    "message": _message,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}
