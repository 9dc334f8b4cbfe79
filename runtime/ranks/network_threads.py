"""Let Gloo's network threads wait for the threads that compute, where both want the same processor.

Gloo guards a connection with one lock. A thread that posts a send or a receive holds it while it writes to the
socket; the network thread, woken by what arrives, only *tries* to take it (``Pair::handleEvents``) and, where it
cannot, asks the kernel for the same event again at once. Woken on the processor of the thread that posts, it takes
that processor away and then spins until its time slice is over, because the holder of the lock cannot run:

    normal   post: lock, write ─┐ pre-empted, holding the lock …………… 2–5 ms …………… ┌─ write, unlock
             network thread     └─ try, try, try, … until the slice is over ───────┘
    batch    post: lock, write, unlock, wait ─┐
             network thread                   └─ try: taken, message handled

A thread under Linux's ``SCHED_BATCH`` has the same share of a processor as any other, but being woken does not make it
pre-empt one that runs. On an idle processor it starts as soon as ever. Where all processors compute it waits for
its turn, at most about one time slice.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger("partitioner")

GLOO_NETWORK_THREAD = "gloo_tcp_loop"
"""Name that Gloo gives its network threads."""


def network_threads() -> list[int]:
    """Return the thread ids of this process's Gloo network threads; none where the system does not list threads."""
    found = []
    for entry in Path("/proc/self/task").glob("*"):
        try:
            if (entry / "comm").read_text().strip() == GLOO_NETWORK_THREAD:
                found.append(int(entry.name))
        except OSError:  # it ended meanwhile
            continue
    return found


def let_compute_go_first() -> None:
    """Put this process's Gloo network threads under ``SCHED_BATCH``. Where that is refused, all still works."""
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in network_threads():
        try:
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        except OSError as error:
            logger.debug("Gloo's network thread %d stays as it is: %s", thread, error)
