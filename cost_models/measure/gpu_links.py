"""Links between the GPUs of this machine: messages and collectives by size, one process per device.

Written for NCCL; ``backend="gloo"`` with CPU tensors runs the same code, for tests of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cost_models.measure.calibration import Measurement
from cost_models.measure.processes import run_ranks
from cost_models.measure.timing import ROUNDS, synchronize

SIZES_BYTES = (2**16, 2**20, 2**24, 2**28)
_LIMIT_SECONDS = 120.0
_CALLS = 4


def measure_links(
    world: int, kind: str, backend: str, sizes: tuple[int, ...] = SIZES_BYTES
) -> dict[str, Measurement]:
    """Measure with ``world`` processes on the first devices: by name, such as ``all_reduce x4``.

    Values are seconds by bytes: ``"1048576": 5e-05``. Of a collective, the bytes are those of the whole tensor.
    """
    by_rank = run_ranks(world, kind, backend, _LIMIT_SECONDS, _measure, kind, sizes)
    return {
        f"{name} x{world}": Measurement(kind="link", backend=backend, values=values)
        for name, values in by_rank[0].items()
    }


def _measure(rank: int, world: int, kind: str, sizes: tuple[int, ...]) -> dict[str, dict[str, float]]:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    return {
        name: {str(size): _seconds(make(rank, world, size, device), device) for size in sizes}
        for name, make in _PATTERNS.items()
        if name != "message" or world == 2
    }


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
