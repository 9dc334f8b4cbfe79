"""Start processes: join what ``torchrun`` started, or spawn local Gloo workers.

    init_distributed(device)                 under torchrun: NCCL on GPUs, Gloo on CPU
    spawn_local(4, function, *arguments)     four local processes, once; their results by rank
    with WorkerPool(4) as pool:              four that stay up, because importing torch costs seconds
        pool.run(function, *arguments, world_size=3)

Functions must be importable by name (module level). In a worker, ``torch.distributed`` is initialized with
the asked number of ranks, on 127.0.0.1 only. A worker's exception is raised in the parent with its
traceback's text. Workers import the caller's script only if the function or its arguments come from it, so that
scripts need no ``if __name__ == "__main__":`` otherwise.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist

from cost_models.errors import PartitionerError, RankFailureError, UsageError
from runtime.ranks.meeting import Meeting

logger = logging.getLogger("partitioner")

_HOST = "127.0.0.1"


class WorkerError(RankFailureError):
    """The error of local workers that raised an exception, died or ran out of time. ``errors``: the text of each rank."""

    def __init__(
        self,
        what: str,
        because: Sequence[str] = (),
        suggestions: Sequence[str] = (),
        errors: dict[int, str] | None = None,
    ) -> None:
        super().__init__(what, because, suggestions)
        self.errors = errors or {}


def init_distributed(
    device: torch.device | str, timeout_seconds: float = 30.0, *, meeting: Meeting | None = None
) -> Any:
    """Return the default process group: the existing one, or one over the processes ``torchrun`` started.

    ``meeting``: the one at which these processes found each other already.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return dist.group.WORLD
    meeting = meeting or Meeting.join()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"partitioner/group{meeting.number}", meeting.store),
        rank=meeting.rank,
        world_size=meeting.world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    return dist.group.WORLD


def spawn_local(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_seconds: float = 300.0,
    threads: int = 1,
) -> list[Any]:
    """Run ``function(*arguments)`` in ``world_size`` fresh local processes; return what each rank returned, by rank."""
    with WorkerPool(world_size, threads=threads) as pool:
        return pool.run(function, *arguments, timeout_seconds=timeout_seconds)


class WorkerPool:
    """Local processes that stay up and run one function after another.

    After an error, a death or a time-out the workers that cannot go on are replaced at the next ``run``.
    """

    def __init__(self, world_size: int, *, threads: int = 1, group_timeout_seconds: float = 60.0) -> None:
        self.world_size = world_size
        self._threads = threads
        self._group_timeout_seconds = group_timeout_seconds
        self._context = multiprocessing.get_context("spawn")
        self._generations = itertools.count()
        self._generation: tuple[int, int] | None = None
        """Number and size of the process group that the workers are in."""
        self._store = dist.TCPStore(
            _HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=group_timeout_seconds)
        )
        self._workers: list[tuple[Any, Connection] | None] = [None] * world_size
        self._with_script: set[int] = set()
        """Ranks whose worker has imported the caller's script."""

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        world_size: int | None = None,
        timeout_seconds: float = 300.0,
    ) -> list[Any]:
        """Run ``function(*arguments)`` on ranks 0 … ``world_size`` − 1; return what each returned, by rank."""
        outcomes = self.run_each(function, *arguments, world_size=world_size, timeout_seconds=timeout_seconds)
        errors = {rank: str(text) for rank, (ok, text) in enumerate(outcomes) if not ok}
        if errors:
            first = min(errors)
            raise WorkerError(
                f"{len(errors)} of {len(outcomes)} local workers failed in {function.__qualname__}",
                because=[f"rank {rank}: {text.strip()}" for rank, text in errors.items()],
                suggestions=[f"read rank {first}'s traceback above"],
                errors=errors,
            )
        return [value for _, value in outcomes]

    def run_each(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        world_size: int | None = None,
        timeout_seconds: float = 300.0,
    ) -> list[tuple[bool, Any]]:
        """Do what ``run`` does, but return for each rank (True, result) or (False, text of what went wrong)."""
        count = self.world_size if world_size is None else world_size
        if not 1 <= count <= self.world_size:
            raise UsageError(f"the pool has {self.world_size} workers, not {count}")
        for rank, worker in enumerate(self._workers):
            if worker is not None and not worker[0].is_alive():
                logger.warning(
                    "local worker %d ended with exit code %s; starting another", rank, worker[0].exitcode
                )
                self._end(rank, grace_seconds=0.0)
                self._generation = None
        tasks = [bytes(ForkingPickler.dumps((function, arguments))) for _ in range(count)]
        self._import_script(b"__main__" in tasks[0], count)
        if self._generation is None or self._generation[1] != count:
            self._generation = (next(self._generations), count)
        for rank, task in enumerate(tasks):
            pipe = self._worker(rank)[1]
            with suppress(BrokenPipeError, ConnectionResetError):  # a dead worker is explained below
                pipe.send((self._generation[0], count))
                pipe.send_bytes(task)  # apart, so that a worker that cannot make sense of it can say so
        outcomes = self._collect(count, time.monotonic() + timeout_seconds, timeout_seconds)
        if not all(ok for ok, _ in outcomes.values()):
            self._generation = None  # a group that saw a failure is unusable: the next run makes a new one
        return [outcomes[rank] for rank in range(count)]

    def close(self) -> None:
        """End the workers: politely first, then by force."""
        for worker in self._workers:
            if worker is not None:
                worker[1].close()  # the worker's loop ends at end of file
        for rank in range(self.world_size):
            self._end(rank, grace_seconds=1.0)

    def _collect(self, count: int, deadline: float, timeout_seconds: float) -> dict[int, tuple[bool, Any]]:
        outcomes: dict[int, tuple[bool, Any]] = {}
        failed = False
        while len(outcomes) < count:
            waiting = {self._worker(r)[1]: r for r in range(count) if r not in outcomes}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in [p for p in waiting if p in ready]:
                rank = waiting[pipe]
                try:
                    ok, value, usable = pipe.recv()
                    outcomes[rank] = (ok, value)
                    if not usable:
                        self._end(rank, grace_seconds=5.0)
                except (EOFError, ConnectionResetError):
                    process = self._worker(rank)[0]
                    process.join(5.0)
                    outcomes[rank] = (False, self._death(rank, process.exitcode))
                    self._end(rank, grace_seconds=0.0)
            if not failed and not all(ok for ok, _ in outcomes.values()):
                failed = True
                # The others may wait for the failed one; their own time limits come first, then ours.
                deadline = min(deadline, time.monotonic() + self._group_timeout_seconds)
            if not ready:
                for rank in waiting.values():
                    outcomes[rank] = (
                        False,
                        f"no result in time (at most {timeout_seconds:g} s); the process was killed",
                    )
                    self._end(rank, grace_seconds=0.0)
        return outcomes

    def _death(self, rank: int, exit_code: int | None) -> str:
        text = f"the process ended with exit code {exit_code}"
        if exit_code == 1 and rank in self._with_script:
            text += (
                "; it had to import your script, because the function or an argument is defined there: "
                'does the script start its work under `if __name__ == "__main__":`?'
            )
        return text

    def _import_script(self, wanted: bool, count: int) -> None:
        """Replace workers that lack the caller's script, where the task needs it."""
        if not wanted:
            return
        for rank in range(count):
            if rank not in self._with_script:
                if self._workers[rank] is not None:
                    self._end(rank, grace_seconds=0.0)
                    self._generation = None
                self._with_script.add(rank)

    def _worker(self, rank: int) -> tuple[Any, Connection]:
        worker = self._workers[rank]
        if worker is None:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve,
                args=(rank, theirs, self._store.port, self._threads, self._group_timeout_seconds),
                daemon=True,
                name=f"partitioner-worker-{rank}",
            )
            with _script_shown(rank in self._with_script):
                process.start()
            theirs.close()
            worker = self._workers[rank] = (process, ours)
        return worker

    def _end(self, rank: int, grace_seconds: float) -> None:
        worker = self._workers[rank]
        if worker is None:
            return
        process, pipe = worker
        pipe.close()
        if grace_seconds:
            process.join(grace_seconds)
        if process.is_alive():
            process.kill()
        process.join()
        process.close()
        self._workers[rank] = None


def _serve(rank: int, pipe: Connection, port: int, threads: int, group_timeout_seconds: float) -> None:
    """Run what the parent sends until the parent closes the pipe: a worker's life."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    timeout = timedelta(seconds=group_timeout_seconds)
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=timeout)
    current: int | None = None
    while True:
        try:
            generation, world_size = pipe.recv()
            task = pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            break
        if current != generation:
            try:
                _leave_group()
                prefixed = dist.PrefixStore(f"generation{generation}", store)
                dist.init_process_group(
                    "gloo", store=prefixed, rank=rank, world_size=world_size, timeout=timeout
                )
                current = generation
            except Exception:  # noqa: BLE001 - whatever it is, the parent must hear of it
                # torch cannot initialize again after this; the parent starts another worker.
                pipe.send((False, traceback.format_exc(), False))
                break
        try:
            function, arguments = ForkingPickler.loads(task)
            pipe.send((True, function(*arguments), True))
        except Exception as error:  # noqa: BLE001
            pipe.send(
                (False, str(error) if isinstance(error, PartitionerError) else traceback.format_exc(), True)
            )
            current = None
            _leave_group()  # closes the connections, so that peers that wait for this rank end at once
    _leave_group()


@contextmanager
def _script_shown(shown: bool) -> Iterator[None]:
    """Let a process started meanwhile import the caller's script if ``shown``: multiprocessing looks at these two names."""
    main = sys.modules["__main__"]
    hidden = (
        {} if shown else {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
    )
    for name in hidden:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
