"""The passes of a compile as they run: each by its name in the log, and with its seconds for whoever asks.

with pass_times() as times:
    plan = partition(…)
print(times)        # costs 0.41 s, 1,234 ops · place 2.30 s, 4 stages, 1f1b, 8 micro-batches · …
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

from cost_models.units import format_seconds
from passes.interrupts import heed_interrupt
from passes.progress import report_phase

log = logging.getLogger("partitioner")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class PhaseTime:
    """A part of a pass that runs many times: its own seconds, without those of other phases inside it."""

    name: str
    seconds: float = 0.0
    calls: int = 0


@dataclass(frozen=True)
class PassTime:
    """One pass that ran."""

    name: str
    seconds: float
    result: str
    """The pass's result in a few words; empty where there is nothing to say."""
    processor_seconds: float = 0.0
    """Seconds of the process on all its cores: what is left of ``seconds`` was waited for, also for other processes."""
    peak_bytes: int = 0
    """The most memory that the process has had when the pass was done; 0 where the system does not say."""
    phases: tuple[PhaseTime, ...] = ()
    """The phases of a search, in the order in which they first ran; the rest of the seconds is the search's own."""


class _Phases:
    """The phases of the pass that runs."""

    def __init__(self) -> None:
        self.times: dict[str, PhaseTime] = {}
        self.inside = [0.0]
        """Seconds of the phases inside each that runs, the innermost last."""

    def begin(self) -> None:
        self.inside.append(0.0)

    def end(self, name: str, seconds: float) -> None:
        own = seconds - self.inside.pop()
        self.inside[-1] += seconds
        time = self.times.setdefault(name, PhaseTime(name))
        time.seconds, time.calls = time.seconds + own, time.calls + 1


_phases: ContextVar[_Phases | None] = ContextVar("phases", default=None)
_collected: ContextVar[list[PassTime] | None] = ContextVar("pass_times", default=None)


@contextmanager
def pass_times() -> Iterator[list[PassTime]]:
    """Collect the passes that run within, in order."""
    times: list[PassTime] = []
    token = _collected.set(times)
    try:
        yield times
    finally:
        _collected.reset(token)


def run_pass(
    name: str, say: Callable[[T], object], run: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run a pass by its name; ``say`` puts its result in a few words, for the log and for timings."""
    heed_interrupt()
    report_phase(name)
    times = _collected.get()
    phases = _Phases() if times is not None else None
    token = _phases.set(phases)
    began, busy = time.perf_counter(), time.process_time()
    try:
        result = run(*args, **kwargs)
    finally:
        _phases.reset(token)
    seconds, processor_seconds = time.perf_counter() - began, time.process_time() - busy
    inner = tuple(phases.times.values()) if phases is not None else ()
    done = PassTime(name, seconds, str(say(result)), processor_seconds, peak_memory_bytes(), inner)
    log.info("%s: %s, %s", done.name, format_seconds(done.seconds), done.result)
    if times is not None:
        times.append(done)
    return result


def peak_memory_bytes() -> int:
    """Return the most memory that this process has had so far; 0 where the system does not say."""
    if sys.platform == "win32":  # which has no module resource
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def phase(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Add a function's seconds to a phase's, while somebody collects."""

    def of(run: Callable[P, T]) -> Callable[P, T]:
        @wraps(run)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            phases = _phases.get()
            if phases is None:
                return run(*args, **kwargs)
            phases.begin()
            began = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                phases.end(name, time.perf_counter() - began)

        return timed

    return of
