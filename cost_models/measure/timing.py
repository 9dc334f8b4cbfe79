"""Seconds of calls by a device's own clock: processor time of this thread on a CPU, events of the stream on a GPU.

Processor time, since what other programs take between is theirs. On a GPU a round is enqueued behind a kernel that only
waits, so that the host is ahead when the first call runs and its launches are not part of what is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

ROUNDS = 5
WARM_UPS = 2
ROUND_SECONDS = 4e-3
"""The least that a round should take: a thousand times the resolution of CUDA events (half a microsecond)."""
MOST_CALLS = 200
"""The most calls of a round: a stream takes about a thousand launches before the host has to wait; a call has <= 5."""
_CYCLES_PER_SECOND = 2.0e9
"""Cycles of a GPU's clock, a little more than the fastest cards have, so that a wait is long enough."""
_MOST_WAIT_SECONDS = 0.1


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the device's seconds of one call of ``run``: the median of ROUNDS rounds of equally many calls."""
    for _ in range(WARM_UPS):
        run()
    synchronize(device)
    once = round_seconds(run, 1, device)
    calls = max(1, min(MOST_CALLS, int(ROUND_SECONDS / max(once, 1e-9))))
    return statistics.median(round_seconds(run, calls, device) / calls for _ in range(ROUNDS))


def round_seconds(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the device's seconds of ``calls`` calls, one after the other."""
    if device.type != "cuda":
        return _seconds(time.thread_time, run, calls)
    launching = _seconds(time.perf_counter, run, 1) * (calls + 1)
    synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(int(min(_MOST_WAIT_SECONDS, launching) * _CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def host_seconds(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the host's seconds to start one of ``calls`` calls, the median of ROUNDS rounds."""
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    run()
    rounds = []
    for _ in range(ROUNDS):
        synchronize(device)
        rounds.append(_seconds(clock, run, calls) / calls)
    synchronize(device)
    return statistics.median(rounds)


def _seconds(clock: Callable[[], float], run: Callable[[], object], calls: int) -> float:
    started = clock()
    for _ in range(calls):
        run()
    return clock() - started
