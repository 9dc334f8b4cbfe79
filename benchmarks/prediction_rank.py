"""What each worker of the prediction benchmark does: build the plan's executor once, then run steps when asked."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.verify.rank import VerificationTask, build_rank
from runtime.execute.execute import Executor
from runtime.state.rank_state import RankState
from runtime.state.sharded_owners import ShardedOwners
from tests.support.alive import AliveBytes


@dataclass(frozen=True)
class _Ready:
    """One plan on this rank, ready to train."""

    task: VerificationTask
    executor: Executor
    state: RankState
    optimizer: torch.optim.Optimizer
    sharded: ShardedOwners


_ready: dict[int, _Ready] = {}
"""Plans by number, kept between calls of a pool's worker."""


@dataclass(frozen=True)
class RankSteps:
    """Per step: this rank's seconds, its own processor seconds, and what ``pace_seconds`` took before and after it."""

    seconds: list[float]
    own_seconds: list[float]
    pace_seconds: list[tuple[float, float]]


def prepare(number: int, task: VerificationTask) -> None:
    """Build the executor and run one step to warm up."""
    executor, state, optimizer = build_rank(task)
    assert optimizer is not None
    sharded = executor.sharded_owners(state)
    sharded.attach(optimizer)
    _ready[number] = _Ready(task, executor, state, optimizer, sharded)
    step(number)


def close() -> None:
    """Close the executors that ``prepare`` has built."""
    for ready in _ready.values():
        ready.executor.close()
    _ready.clear()


def step(number: int) -> None:
    """One step as the engine does it: gradients of the last one are dropped first."""
    ready = _ready[number]
    for tensor in (*ready.state.leaves.values(), *ready.state.parameters.values()):
        tensor.grad = None
    task = ready.task
    ready.executor.train_step(task.batch, task.microbatches, weights=task.weights)
    ready.sharded.collect()
    ready.optimizer.step()


def measure_memory(number: int) -> int:
    """Peak bytes of tensors alive during one step; the batch is the caller's and does not count."""
    ready = _ready[number]
    held = [*ready.state.leaves.values(), *ready.state.parameters.values()]
    held += [p.grad for p in held if p.grad is not None]
    held += [t for s in ready.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    with AliveBytes(held, ignored=ready.task.batch.values()) as tracker:
        del held
        step(number)
    return tracker.peak_bytes


def _set_priority(niceness: int) -> None:
    """Of all of this process's threads, Gloo's included, where that is allowed.

    Where Linux groups processes by session, niceness counts within the session only, and the session has one of its own.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness), encoding="ascii")
    threads = Path("/proc/self/task")
    for thread in threads.iterdir() if threads.is_dir() else ():
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)


def time_steps(number: int, steps: int, niceness: int) -> RankSteps:
    """One step that does not count (another plan had the caches), then ``steps`` that do, at ``niceness``."""
    torch.set_num_threads(1)
    found = RankSteps([], [], [])
    _set_priority(niceness)
    try:
        step(number)
        (before,) = pace_seconds(1)
        for _ in range(steps):
            dist.barrier()
            own, started = time.process_time(), time.perf_counter()
            step(number)
            found.seconds.append(time.perf_counter() - started)
            found.own_seconds.append(time.process_time() - own)
            (after,) = pace_seconds(1)
            found.pace_seconds.append((before, after))
            before = after
    finally:
        _set_priority(0)
    return found


def pace_seconds(times: int) -> list[float]:
    """Time the same work, ``times`` times: a transformer's layer, forward and backward, on all ranks at once."""
    torch.set_num_threads(1)
    if not _layers:
        _layers.append(torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True))
        pace_seconds(2)
    samples, spent = torch.ones(4, 128, 256), []
    for _ in range(times):
        dist.barrier()
        started = time.perf_counter()
        _layers[0](samples).sum().backward()
        spent.append(time.perf_counter() - started)
    return spent


_layers: list[torch.nn.Module] = []
"""The layer of ``pace_seconds``, once it has been made."""
