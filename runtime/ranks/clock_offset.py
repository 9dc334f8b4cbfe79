"""The offset of a rank's clock from rank 0's, so that what ranks measured can be laid over each other.

Processes of one running system share its monotonic clock. Others exchange messages with rank 0 (Cristian, 1989):

    rank 0      t0 ──────┐           ┌──► t1        offset = theirs − (t0 + t1) / 2
    rank r               └─► theirs ─┘              error ≤ (t1 − t0) / 2, so the fastest of ROUNDS exchanges counts
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.ranks.side_group import SideGroup

ROUNDS = 16
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ClockOffset:
    """Seconds to subtract from this rank's clock to get rank 0's, exact up to ``error_seconds``."""

    seconds: float
    error_seconds: float


def system_name() -> str:
    """Return a name that processes with one monotonic clock share; "" where that cannot be known."""
    return _BOOT.read_text().strip() if _BOOT.exists() else ""


def clock_offset(side: SideGroup, system: str, now: Callable[[], float] = time.perf_counter) -> ClockOffset:
    """Measure the offset of this rank's ``now``. Collective. ``system``: see ``system_name``."""
    systems = side.agree("comparing clocks", lambda: system)
    strangers = [rank for rank, name in enumerate(systems) if rank and (not name or name != systems[0])]
    for rank in strangers:
        if side.rank == 0:
            _ask(side, rank, now)
        elif side.rank == rank:
            return _answer(side, now)
    return ClockOffset(0.0, 0.0)


def _ask(side: SideGroup, rank: int, now: Callable[[], float]) -> None:
    best: tuple[float, float] | None = None
    theirs = torch.zeros(1, dtype=torch.float64)
    for _ in range(ROUNDS):
        start = now()
        side.send(torch.zeros(1), rank)
        side.receive(theirs, rank)
        end = now()
        found = (end - start) / 2, theirs.item() - (start + end) / 2
        best = found if best is None else min(best, found)
    assert best is not None
    side.send(torch.tensor(best, dtype=torch.float64), rank)


def _answer(side: SideGroup, now: Callable[[], float]) -> ClockOffset:
    token = torch.zeros(1)
    for _ in range(ROUNDS):
        side.receive(token, 0)
        side.send(torch.tensor([now()], dtype=torch.float64), 0)
    found = torch.zeros(2, dtype=torch.float64)
    side.receive(found, 0)
    error, seconds = found.tolist()
    return ClockOffset(seconds, error)
