"""A Gloo group beside the one that trains: saving and gathering never queue behind, or before, a training step.

``agree`` is the way to fail together: what one rank raises, every rank raises, with the rank's number.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.errors import PartitionerError, RankFailureError

Told = TypeVar("Told")

SIDE_SECONDS = 1800.0
"""Seconds that a rank waits for another that writes or reads its part. A rank that died is noticed at once."""

SLOWEST_BYTES_PER_SECOND = 20e6
"""Rate below which a network counts as hanging when tensors are gathered."""


class SideGroup:
    """All ranks, over Gloo. Making it is collective."""

    def __init__(self, timeout_seconds: float = SIDE_SECONDS) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        # Nobody returns before all are connected: a rank that has nothing to wait for in the group may leave it at once,
        # and would close connections that others are still making.
        self._waiting("all ranks to be connected", lambda: dist.barrier(group=self.group))

    def close(self) -> None:
        """Leave the group. Where the process group is gone already, so is this one."""
        if dist.is_initialized() and self.group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(self.group)

    def agree(self, doing: str, function: Callable[[], Told]) -> list[Told]:
        """Return, on every rank, what ``function()`` returned on each; raise everywhere if it raised on any of them."""
        outcome: tuple[bool, Any]
        own: Exception | None = None
        try:
            outcome = (True, function())
        except Exception as error:  # the others wait, and must hear of it whatever it is
            if self.size == 1:
                raise
            own, outcome = error, (False, error if isinstance(error, PartitionerError) else repr(error))
        outcomes: list[Any] = [None] * self.size
        try:
            self._waiting(
                "the others", lambda: dist.all_gather_object(outcomes, outcome, group=self.group), doing
            )
        except RankFailureError as error:
            if own is not None:  # the reason, rather than that nobody could be told
                raise own from error
            raise
        failures = {rank: value for rank, (good, value) in enumerate(outcomes) if not good}
        raise_together(doing, failures, own)
        return [value for _, value in outcomes]

    def from_first(self, doing: str, function: Callable[[], Told]) -> Told:
        """Return, on every rank, what ``function()`` returned on rank 0; raise its error on every rank."""
        results = self.agree(doing, lambda: function() if self.rank == 0 else None)
        first: Any = results[0]
        return first  # type: ignore[no-any-return]

    def to_first(self, doing: str, value: Told) -> list[Told]:
        """Return the values of all ranks on rank 0, and none elsewhere: they may be too many for everybody."""
        values: list[Any] = [None] * self.size if self.rank == 0 else []
        self._waiting(
            "the others", lambda: dist.gather_object(value, values or None, 0, group=self.group), doing
        )
        return values

    def send(self, tensor: Tensor, target: int, *, ahead_bytes: int = 0) -> None:
        """Send a contiguous CPU tensor. ``ahead_bytes``: bytes that ``target`` receives from others before it."""
        self._transfer(f"rank {target} to take a tensor", dist.isend, tensor, target, ahead_bytes)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill a contiguous CPU tensor with what ``source`` sends."""
        self._transfer(f"a tensor of rank {source}", dist.irecv, tensor, source, 0)

    def _transfer(
        self, what: str, operation: Callable[..., Any], tensor: Tensor, peer: int, ahead_bytes: int
    ) -> None:
        if not tensor.numel():
            return
        # Bytes, because Gloo sends no complex128 and no float8.
        numbers = tensor.view(-1).view(torch.uint8)
        seconds = 60.0 + (ahead_bytes + numbers.numel()) / SLOWEST_BYTES_PER_SECOND

        def transfer() -> None:
            operation(numbers, peer, group=self.group).wait(timedelta(seconds=seconds))

        self._waiting(what, transfer)

    def _waiting(self, what: str, function: Callable[[], Any], doing: str = "") -> None:
        try:
            function()
        except RuntimeError as error:
            raise RankFailureError(
                f"a rank failed or hangs{f' while {doing}' if doing else ''}: rank {self.rank} waited for {what}",
                [str(error).strip().splitlines()[0] if str(error) else type(error).__name__],
                ["read the logs of the other ranks", "restart all ranks from the last checkpoint"],
            ) from error


def raise_together(
    doing: str, failures: dict[int, PartitionerError | str], own: Exception | None = None
) -> None:
    """Raise what the ranks in ``failures`` met: the error itself where all met the same one, else all of them.

    ``own``: this rank's error, whose traceback is kept.
    """
    if not failures:
        return
    first = failures[min(failures)]
    texts = {str(failure) for failure in failures.values()}
    if isinstance(first, PartitionerError) and len(texts) == 1:
        where = "every rank" if len(failures) > 1 else f"rank {min(failures)}"
        raise type(first)(first.what, (*first.because, f"met by {where}"), first.suggestions) from own
    because: list[str] = []
    suggestions: list[str] = []
    for rank, failure in failures.items():
        if isinstance(failure, PartitionerError):
            because.append("; ".join((f"rank {rank}: {failure.what}", *failure.because)))
            suggestions += failure.suggestions
        else:
            because.append(f"rank {rank}: {failure}")
    kind = type(first) if isinstance(first, PartitionerError) else RankFailureError
    raise kind(f"{doing} failed", because, tuple(dict.fromkeys(suggestions))) from own
