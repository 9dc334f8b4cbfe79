"""The progress of a compile, reported as it runs to whoever watches: the pass, what is tried, the best so far, the bound.

    with watched(show):                 # show(progress) is called at each report, by the thread that plans
        plan = partition(…)

A report that nobody watches costs one look at a context variable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Progress:
    """The state of a compile."""

    phase: str = ""
    """The pass, or what else is being done."""
    trying: object = ""
    """The option being solved; its text says it in words."""
    solved: int = 0
    """Options of which the best plan is known."""
    bounded: int = 0
    """Options that were proved to have nothing to give."""
    options: int = 0
    """All options; 0 where the search does not count any."""
    found_seconds: float = math.inf
    """Seconds of the best step so far, by the search's own count."""
    bound_seconds: float = 0.0
    """No option has a step below this, by the same count; 0 if nothing is proved."""
    step_seconds: float = math.inf
    """Seconds of the fastest simulated step so far that fits."""
    stopping: bool = False
    """True once Ctrl-C came: the best so far is being carried to a plan."""

    @property
    def gap(self) -> float:
        """The share by which the bound is below the best so far; infinite while either is missing."""
        if not self.bound_seconds or math.isinf(self.found_seconds):
            return math.inf
        return max(0.0, 1 - self.bound_seconds / self.found_seconds)


@dataclass
class _Watch:
    show: Callable[[Progress], None]
    now: Progress = Progress()

    def take(self, now: Progress) -> None:
        self.now = now
        self.show(now)


_watch: ContextVar[_Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watched(show: Callable[[Progress], None]) -> Iterator[None]:
    """Call ``show`` with the progress of the search that runs within, whenever it changes."""
    token = _watch.set(_Watch(show))
    try:
        yield
    finally:
        _watch.reset(token)


def is_watched() -> bool:
    """Tell whether somebody watches."""
    return _watch.get() is not None


def report_phase(name: str) -> None:
    """Report that a pass begins, or something else that is no search of options."""
    if watch := _watch.get():
        watch.take(Progress(name, step_seconds=watch.now.step_seconds, stopping=watch.now.stopping))


def report_option(
    option: object, bound_seconds: float = 0.0, solved: int = 0, looked_at: int = 0, options: int = 0
) -> None:
    """Report the option that is solved next. ``solved``, ``looked_at``: those before it; ``bound_seconds``: of all."""
    if watch := _watch.get():
        found = watch.now.found_seconds if looked_at else math.inf  # a search that begins anew forgets
        watch.take(replace(watch.now, trying=option, bound_seconds=bound_seconds, found_seconds=found,
                           solved=solved, bounded=looked_at - solved, options=options))  # fmt: skip


def report_simulating(what: object) -> None:
    """Report the plan whose step is simulated next."""
    if watch := _watch.get():
        watch.take(replace(watch.now, phase="simulating", trying=what))


def report_found(seconds: float) -> None:
    """Report a plan by the search's own count, if it is the best so far."""
    watch = _watch.get()
    if watch and seconds < watch.now.found_seconds:
        watch.take(replace(watch.now, found_seconds=seconds))


def report_simulated(seconds: float) -> None:
    """Report a simulated step that fits, if it is the fastest so far."""
    watch = _watch.get()
    if watch and seconds < watch.now.step_seconds:
        watch.take(replace(watch.now, step_seconds=seconds))


def report_stopping() -> None:
    """Report that the search ends with the best so far."""
    if watch := _watch.get():
        watch.take(replace(watch.now, stopping=True))
