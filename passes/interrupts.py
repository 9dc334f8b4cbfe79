"""Ctrl-C while a plan is made: what is found already is carried to a plan, and nothing is lost on the way there.

                    first Ctrl-C                                                   second
    nothing found   KeyboardInterrupt, at once                                     the process ends: SystemExit(130)
    something found KeyboardInterrupt where work may be lost; elsewhere it waits   SystemExit(130)
                    until such work would begin, which then does not
torch exports   it waits until that is over                                    SystemExit(130)

Searches say from where on there is something (:func:`keep_from_here`) and which of their work the search can end without
(:func:`may_be_lost`). Only between the two does an interrupt wait, so a plan is simulated, proved and written in peace.
Without :func:`best_so_far_kept` around, Ctrl-C is Python's own.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from cost_models.errors import InterruptedSearchError
from passes.progress import report_stopping

INTERRUPTED = InterruptedSearchError.exit_code
"""The exit code where nothing was found."""


@dataclass
class Interrupts:
    """The interrupts of one compile."""

    asked: bool = False
    """True once Ctrl-C came."""
    kept: bool = False
    """True once something is found that a plan can be made of."""
    losing: int = 0
    """Depth of work that may be lost."""
    waiting: int = 0
    """Depth of work that it waits for."""

    def handle(self, *_: object) -> None:
        """Take a signal."""
        if self.asked:
            raise SystemExit(INTERRUPTED)
        self.asked = True
        self.heed()

    def heed(self) -> None:
        """Raise KeyboardInterrupt where Ctrl-C came and nothing is lost by it."""
        if self.asked and not self.waiting and (self.losing or not self.kept):
            raise KeyboardInterrupt
        if self.asked:
            report_stopping()


_interrupts: ContextVar[Interrupts | None] = ContextVar("interrupts", default=None)


@contextmanager
def best_so_far_kept() -> Iterator[Interrupts]:
    """Handle Ctrl-C as above within; in the main thread, and where nobody else handles it."""
    own = Interrupts()
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield own
        return
    token = _interrupts.set(own)
    signal.signal(signal.SIGINT, own.handle)
    try:
        yield own
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _interrupts.reset(token)


@contextmanager
def quiet_in_finalizers() -> Iterator[None]:
    """Say nothing of a Ctrl-C that comes in a finalizer, where Python drops it: while a plan is made, it waits."""
    report = sys.unraisablehook

    def quietly(error: sys.UnraisableHookArgs) -> None:
        if not isinstance(error.exc_value, KeyboardInterrupt | SystemExit):
            report(error)

    sys.unraisablehook = quietly
    try:
        yield
    finally:
        sys.unraisablehook = report


def keep_from_here() -> None:
    """Say that something is found: from here on the first Ctrl-C waits for work that may be lost."""
    if own := _interrupts.get():
        own.kept = True


def heed_interrupt() -> None:
    """End here if Ctrl-C came before anything was found, and was lost in code that swallows exceptions."""
    if own := _interrupts.get():
        own.heed()


@contextmanager
def interrupt_waits() -> Iterator[None]:
    """Let the first Ctrl-C wait until the work within is over: code in C++ that calls Python, as torch's exporter does,
    may abort the process when an exception comes out of Python."""
    own = _interrupts.get()
    if own is None:
        yield
        return
    own.waiting += 1
    try:
        yield
    finally:
        own.waiting -= 1
    own.heed()


@contextmanager
def may_be_lost(lost: bool = True) -> Iterator[None]:
    """Let Ctrl-C end the work within, if it is ``lost``: its caller has, or may have, something to go on with."""
    own = _interrupts.get()
    if own is None or not lost:
        yield
        return
    own.losing += 1
    try:
        own.heed()
        yield
    finally:
        own.losing -= 1
