"""Communication beside a program: sums over all ranks (the loss, a gradient norm), and results on their way.

    pending = collectives.all_reduce(tensor, "the loss")     at once; the network works, this thread goes on
    pending.wait()                                           on a GPU the stream waits, not this thread
    collectives.broadcast(tensor, 2, "logits")               from rank 2 to all
    collectives.move(tensor, 2, 0, "logits")                 from rank 2 to rank 0; others have no part in it

A wait that ends badly is explained like one inside a program: the error names the rank that did not take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.ranks.failure import FailureMonitor
from runtime.ranks.groups import TAG_BASE

MOVE_TAG = TAG_BASE - 1
"""Tag of moved tensors, next to the tags of programs, which start at TAG_BASE."""

Waited = list[tuple[int, Any]]
"""The (wait number, work) of everything that a GPU's stream was told to wait for and that may be unfinished."""


class Pending:
    """A tensor that the network is still working on."""

    def __init__(self, tensor: Tensor, wait: Callable[[], None] | None = None) -> None:
        self._tensor, self._wait = tensor, wait

    def wait(self) -> Tensor:
        """Return the tensor once it is complete (on a GPU: for whatever the current stream does next)."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self._tensor


class Collectives:
    """Collectives of all ranks of ``group``. Every rank calls them in the same order.

    ``number``: function that makes the number of the next wait. ``failed``: function that raises, for an error, the one
    to raise instead.
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
        """Name of the result that is waited for."""
        self.waits_on: Sequence[int] = ()
        """Ranks that it comes from."""

    def all_reduce(self, tensor: Tensor, what: str, op: Any = dist.ReduceOp.SUM) -> Pending:
        """Start to reduce ``tensor`` in place over all ranks. ``what`` names it in an error."""
        if len(self.ranks) < 2:
            return Pending(tensor)
        others = [rank for rank in self.ranks if rank != self._monitor.rank]
        return Pending(
            tensor,
            self._start(
                what, others, lambda: dist.all_reduce(tensor, op=op, group=self._group, async_op=True)
            ),
        )

    def broadcast(self, tensor: Tensor, source: int, what: str) -> None:
        """Fill ``tensor`` on every rank with that of ``source``. Bytes, contiguous."""
        if len(self.ranks) < 2 or not tensor.numel():
            return
        mine = source == self._monitor.rank
        others = [rank for rank in self.ranks if rank != source] if mine else [source]
        root = dist.get_global_rank(self._group, source)
        self._start(what, others, lambda: dist.broadcast(tensor, root, group=self._group, async_op=True))()

    def move(self, tensor: Tensor, source: int, target: int, what: str) -> None:
        """Fill ``tensor`` on ``target`` with that of ``source``; other ranks need not call it. Bytes, contiguous."""
        here = self._monitor.rank
        if source == target or here not in (source, target) or not tensor.numel():
            return
        peer, post = (target, self._group.send) if here == source else (source, self._group.recv)
        self._start(what, [peer], lambda: post([tensor], peer, MOVE_TAG))()

    def among(self, ranks: Sequence[int], what: str, start: Callable[[], Any]) -> Callable[[], None]:
        """Start a collective of ``ranks``, this one included, by ``start()``; return the function that waits for it."""
        return self._start(what, [rank for rank in ranks if rank != self._monitor.rank], start)

    def _start(self, what: str, others: Sequence[int], start: Callable[[], Any]) -> Callable[[], None]:
        """Start what ``others`` take part in; return the function that waits for it."""
        number = self._number()
        work = self._guard(number, what, others, start)
        return lambda: self._wait(number, what, others, work)

    def _wait(self, number: int, what: str, others: Sequence[int], work: Any) -> None:
        if self.device.type == "cuda":
            self._guard(number, what, others, work.wait)
            self._waited.append((number, work))
            return
        limit = timedelta(seconds=self._monitor.wait_seconds)
        self._guard(number, what, others, lambda: work.wait(limit))

    def _guard(self, number: int, what: str, others: Sequence[int], call: Callable[[], Any]) -> Any:
        self.waits_for, self.waits_on = what, others
        self._monitor.waiting = number
        try:
            result = call()
        except BaseException as error:
            self._failed(error)
            raise
        self._monitor.waiting = -1
        return result
