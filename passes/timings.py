"""The passes of a compile as they run: each by its name in the log, and with its seconds for whoever asks.

with pass_times() as times:
    plan = partition(…)
print(times)        # costs 0.41 s, 1,234 ops · place 2.30 s, 4 stages, 1f1b, 8 micro-batches · …
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from cost_models.units import format_seconds
from passes.interrupts import heed_interrupt
from passes.progress import report_phase

log = logging.getLogger("partitioner")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class PassTime:
    """One pass that ran."""

    name: str
    seconds: float
    result: str
    """The pass's result in a few words; empty where there is nothing to say."""


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
    began = time.perf_counter()
    result = run(*args, **kwargs)
    done = PassTime(name, time.perf_counter() - began, str(say(result)))
    log.info("%s: %s, %s", done.name, format_seconds(done.seconds), done.result)
    times = _collected.get()
    if times is not None:
        times.append(done)
    return result
