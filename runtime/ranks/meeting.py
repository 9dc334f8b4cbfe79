"""Meetings of ranks before anything is built: they compare notes through the store that they found each other by.

    meeting = Meeting.join(timeout_seconds)          the existing process group's store, or torchrun's
    verdict = meeting.decide("plan", mine, judge)    rank 0 judges what all ranks say; everybody gets its verdict
    with meeting.all_or_none("weights"): …           whoever fails raises its own error, all others name that rank

A store needs no process group, so a rank that lacks a GPU can say so instead of leaving the others to wait for it in
NCCL, and waits have time limits of their own: loading a model takes longer than a step may. Data are JSON.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from cost_models.errors import PartitionerError, RankFailureError, UsageError

MEETING_SECONDS = 600.0
"""Seconds that ranks wait for each other to arrive: some load a model for longer than a step may take."""

MakeVerdict = Callable[[list[Any]], Any]
"""Function from what every rank said, by rank, to the verdict (both JSON data)."""


@dataclass(frozen=True)
class Meeting:
    """All ranks of a launch, and the store where they leave notes. ``number``: how many meetings came before."""

    store: Any
    rank: int
    world_size: int
    number: int
    timeout_seconds: float = MEETING_SECONDS

    @classmethod
    def join(cls, timeout_seconds: float = MEETING_SECONDS) -> Meeting:
        """Join the other ranks. Collective. ``timeout_seconds``: how long they wait for each other until all is built."""
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            rank, world_size = dist.get_rank(), dist.get_world_size()
        else:
            refuse_single_process()
            timeout = timedelta(seconds=timeout_seconds)
            store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
            store.set_timeout(timeout)
        # The store counts, not this process: it lives exactly as long as the launch does.
        number = store.add(f"partitioner/meetings/{rank}", 1)
        return cls(store, rank, world_size, number, timeout_seconds)

    def decide(self, topic: str, mine: Any, judge: MakeVerdict, timeout_seconds: float | None = None) -> Any:
        """Return rank 0's verdict over what all ranks said. Collective; the same value everywhere."""
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        if self.rank != 0:
            self._put(f"{topic}/{self.rank}", mine)
            return self._get([f"{topic}/verdict"], [0], limit)[0]
        others = range(1, self.world_size)
        said = [mine, *self._get([f"{topic}/{rank}" for rank in others], others, limit)]
        verdict = json.loads(json.dumps(judge(said)))  # as the others read it
        self._put(f"{topic}/verdict", verdict)
        return verdict

    def tell(self, topic: str, make: Callable[[], Any], timeout_seconds: float | None = None) -> Any:
        """Return everywhere what ``make`` returns on rank 0. Collective; rank 0 waits for nobody."""
        if self.rank == 0:
            made = json.loads(json.dumps(make()))
            self._put(topic, made)
            return made
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        return self._get([topic], [0], limit)[0]

    @contextmanager
    def all_or_none(self, topic: str, timeout_seconds: float | None = None) -> Iterator[None]:
        """Let no rank go on from what one of them failed to do: the others hear which rank failed, and why."""
        try:
            yield
        except Exception as error:
            self.decide(topic, _text(error), _first_failure, timeout_seconds)
            raise
        failure = self.decide(topic, None, _first_failure, timeout_seconds)
        if failure is not None:
            rank, text = failure
            raise RankFailureError(
                f"rank {rank} cannot take part: rank {self.rank} gives up with it",
                because=text.splitlines(),
                suggestions=[f"read the log of rank {rank}"],
            )

    def _put(self, key: str, value: Any) -> None:
        self.store.set(self._key(key), json.dumps(value))

    def _get(self, keys: Sequence[str], ranks: Sequence[int], timeout_seconds: float) -> list[Any]:
        """Return the values of ``keys``, left there by ``ranks``; names the ranks that did not come."""
        if not keys:
            return []
        names = [self._key(key) for key in keys]
        deadline = time.monotonic() + timeout_seconds
        try:
            for name in names:
                self.store.wait([name], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            late = [rank for rank, name in zip(ranks, names, strict=True) if not self._is_there(name)]
            raise RankFailureError(
                f"rank {self.rank} waited {timeout_seconds:g} s in vain for {_ranks(late)}",
                because=[str(error).splitlines()[0]],
                suggestions=[
                    f"read the log of rank {late[0]}" if late else "read the other ranks' logs",
                    "every rank of the launch calls deploy, once",
                ],
            ) from error
        return [json.loads(self.store.get(name)) for name in names]

    def _is_there(self, name: str) -> bool:
        try:
            return bool(self.store.check([name]))
        except RuntimeError:  # the store itself went away
            return False

    def _key(self, key: str) -> str:
        return f"partitioner/meeting{self.number}/{key}"


def refuse_single_process() -> None:
    """Raise UsageError where nothing says which of several processes this one is."""
    missing = [v for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]
    if missing:
        raise UsageError(
            "this process was not started as one of several",
            because=[f"the environment lacks {', '.join(missing)}"],
            suggestions=["start it with torchrun --nproc-per-node=N SCRIPT"],
        )


def _first_failure(said: list[Any]) -> tuple[int, str] | None:
    return next(((rank, text) for rank, text in enumerate(said) if text is not None), None)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, PartitionerError) else f"{type(error).__name__}: {error}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" if ranks else "another rank"
