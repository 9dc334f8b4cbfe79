"""Ranks as threads of one process, for local functions that communicate: collectives meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

Rank: TypeAlias = tuple[int, ...]
"""A coordinate per mesh axis."""

T = TypeVar("T")

MEETING_SECONDS = 30.0


class Rendezvous:
    """The ranks of a mesh as threads: collectives exchange tensors at a barrier per group of ranks."""

    def __init__(self, mesh_shape: Sequence[int]) -> None:
        self.mesh_shape = tuple(mesh_shape)
        self._lock = threading.Lock()
        self._groups: dict[tuple[tuple[int, ...], Rank], _Group] = {}

    def axis(self, dims: tuple[int, ...], rank: Rank) -> ThreadAxis:
        """Return the mesh axes ``dims`` taken together, as ``rank`` sees them."""
        rest = tuple(c for d, c in enumerate(rank) if d not in dims)
        size, place = 1, 0
        for d in dims:
            size, place = size * self.mesh_shape[d], place * self.mesh_shape[d] + rank[d]
        with self._lock:
            group = self._groups.setdefault((dims, rest), _Group(size))
        return ThreadAxis(place, size, group)

    def abort(self) -> None:
        """Let nobody wait for a rank that failed."""
        with self._lock:
            for group in self._groups.values():
                group.barrier.abort()


class _Group:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=MEETING_SECONDS)
        self.slots: list[Tensor] = [torch.empty(0)] * size


@dataclass(frozen=True)
class ThreadAxis:
    """One rank's view of a group: an ``Axis`` of ``runtime.ops.local``."""

    rank: int
    size: int
    group: _Group

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.group.slots[self.rank] = tensor.detach()
        self.group.barrier.wait()
        result = torch.stack(self.group.slots)
        self.group.barrier.wait()
        return result

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        everyones = self.all_gather(tensor)
        return everyones.sum(0) if op == "sum" else everyones.amax(0)

    def exchange(self, x: Tensor, cut: int, join: int) -> Tensor:
        return torch.cat([part.chunk(self.size, cut)[self.rank] for part in self.all_gather(x)], join)


def on_all(function: Callable[[Rank], T], ranks: Sequence[Rank], meeting: Rendezvous | None) -> list[T]:
    """Run ``function`` on every rank: in threads if they meet, else one after the other. The first error is raised."""
    if meeting is None:
        return [function(rank) for rank in ranks]

    def run(rank: Rank) -> T:
        try:
            return function(rank)
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(len(ranks)) as pool:
        running = [pool.submit(run, rank) for rank in ranks]
    errors = [error for future in running if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in running]
