"""Sums over all ranks beside a program: the loss, a gradient norm.

    pending = collectives.all_reduce(tensor, "the loss")     at once; the network works, this thread goes on
    pending.wait()                                           on a GPU the stream waits, not this thread

A wait that ends badly is explained like one inside a program: the error names the rank that did not take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.failure import FailureMonitor

Waited = list[tuple[int, Any]]
"""On a GPU: (wait number, work) of everything that the stream was told to wait for and that may be unfinished."""


class Pending:
    """A tensor that the network is still working on."""

    def __init__(self, tensor: Tensor, wait: Callable[[], None] | None = None) -> None:
        self._tensor, self._wait = tensor, wait

    def wait(self) -> Tensor:
        """The tensor, once it is complete (on a GPU: for whatever the current stream does next)."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self._tensor


class Collectives:
    """Collectives of all ranks of ``group``. Every rank calls them in the same order.

    ``number``: makes the number of the next wait. ``failed(error)``: raises what is to be raised.
    """

    def __init__(
        self,
        group: Any,
        monitor: FailureMonitor,
        device: torch.device,
        waited: Waited,
        number: Callable[[], int],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._group, self._monitor, self.device, self._waited = group, monitor, device, waited
        self._number, self._failed = number, failed
        self.ranks: Sequence[int] = () if group is None else range(dist.get_world_size(group))
        self.waits_for = ""
        """What the collective is for that is waited on."""

    def all_reduce(self, tensor: Tensor, what: str, op: Any = dist.ReduceOp.SUM) -> Pending:
        """Start to reduce ``tensor`` in place over all ranks. ``what`` names it in an error."""
        if len(self.ranks) < 2:
            return Pending(tensor)
        number = self._number()
        work = self._guard(
            number, what, lambda: dist.all_reduce(tensor, op=op, group=self._group, async_op=True)
        )
        return Pending(tensor, lambda: self._wait(number, what, work))

    def _wait(self, number: int, what: str, work: Any) -> None:
        if self.device.type == "cuda":
            self._guard(number, what, work.wait)
            self._waited.append((number, work))
            return
        limit = timedelta(seconds=self._monitor.wait_seconds)
        self._guard(number, what, lambda: work.wait(limit))

    def _guard(self, number: int, what: str, call: Callable[[], Any]) -> Any:
        self.waits_for = what
        self._monitor.waiting = number
        try:
            result = call()
        except BaseException as error:
            self._failed(error)
            raise
        self._monitor.waiting = -1
        return result
