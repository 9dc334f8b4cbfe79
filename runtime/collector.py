"""Python's cyclic garbage collector, paused while many small objects are made.

A program of 230,000 instructions is about a million tuples and numbers, none of which refer back. The collector
cannot know: it walks them again and again while they pile up, which is half to two thirds of the time of building,
simulating and checking them (64 stages, 512 micro-batches). Objects are still freed by reference count meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause cyclic collection inside; afterwards it is as before. Also a decorator."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
