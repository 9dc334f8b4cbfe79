"""All-gather and reduce-scatter on Gloo, made of messages: every rank sends every other its part, at once.

torch's Gloo has no reduce-scatter: it adds everything up everywhere and drops the rest, twice the bytes. Its all-gather
goes round a ring and through a buffer. Seconds of messages over seconds of torch's, 20th percentiles on two busy cores, by
the size of the whole tensor:

    2 ranks          1 MB   8 MB   25 MB        4 ranks          1 MB   8 MB   25 MB
    reduce-scatter   0.42   0.42   0.41         reduce-scatter   0.42   0.45   0.37
    all-gather       0.60   0.79                all-gather       0.68   0.66

Several at once are packed into one (``runtime.mesh.axis``): nine parameters of a block, 2.9 MB in all, gathered ahead, took
a step of ``llama-small pipeline=1 data=2 zero=3 recompute=full`` (``benchmarks.prediction``) from 564 to 502 ms.

All-reduces stay Gloo's: two halves of messages take 0.9 to 1.15 of its time.

Messages of one tag between two ranks arrive in the order in which they were sent, and every rank starts its collectives in
the same order, so one tag does for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from runtime.ranks.groups import TAG_BASE

_TAG = TAG_BASE - 3
"""A tag of its own, next to those of ``runtime.ranks.collective`` and ``runtime.ranks.groups``."""


class Messages:
    """Pending messages, waited for as one; then ``after`` is called, once."""

    def __init__(self, works: Sequence[Any], after: Callable[[], None]) -> None:
        self._works, self._after = works, after
        self._done = False

    def wait(self, *timeout: timedelta) -> None:
        """Wait for all messages, ``timeout`` in all, and call ``after`` the first time."""
        if self._done:
            return
        deadline = time.monotonic() + timeout[0].total_seconds() if timeout else 0.0
        for work in self._works:
            if timeout:  # Gloo takes nothing for "for ever"
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            else:
                work.wait()
        self._done = True
        self._after()

    def is_completed(self) -> bool:
        return self._done or all(work.is_completed() for work in self._works)


def start_gather(group: Any, here: int, parts: Tensor, x: Tensor) -> Messages:
    """Start to fill row r of ``parts`` [n, …] with ``x`` of rank r of ``group``. ``here``: this rank in it."""
    others = _others(here, len(parts))
    works = _exchange(group, dict.fromkeys(others, x), {r: parts[r] for r in others})
    parts[here].copy_(x)
    return Messages(works, lambda: None)


def start_sum_part(group: Any, here: int, part: Tensor, parts: Tensor) -> Messages:
    """Start to fill ``part`` with this rank's row of the sum of ``parts`` [n, …] over all ranks of ``group``.

    The sum is made when it is waited for; ``parts`` must stay as it is until then.
    """
    others = _others(here, len(parts))
    received = parts.new_empty((len(others), *parts.shape[1:]))
    works = _exchange(group, {r: parts[r] for r in others}, dict(zip(others, received, strict=True)))

    def add() -> None:
        torch.add(parts[here], received[0], out=part)
        for row in received[1:]:
            part.add_(row)

    return Messages(works, add)


def _others(here: int, size: int) -> list[int]:
    """List the other ranks, the next one first, so that not all begin with the same one."""
    return [(here + step) % size for step in range(1, size)]


def _exchange(group: Any, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> list[Any]:
    """Start to send and to receive a contiguous tensor by rank of ``group``; receives first, which is quicker."""
    if not any(tensor.numel() for tensor in sent.values()):
        return []
    works = [group.recv([tensor], rank, _TAG) for rank, tensor in received.items()]
    return works + [group.send([tensor], rank, _TAG) for rank, tensor in sent.items()]
