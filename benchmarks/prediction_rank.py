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
    """Per step: this rank's seconds, its own processor seconds, and the whole machine's busy processor seconds."""

    seconds: list[float]
    own_seconds: list[float]
    busy_seconds: list[float]


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
        for _ in range(steps):
            dist.barrier()
            busy, own, started = busy_seconds(), time.process_time(), time.perf_counter()
            step(number)
            found.seconds.append(time.perf_counter() - started)
            found.own_seconds.append(time.process_time() - own)
            found.busy_seconds.append(busy_seconds() - busy)
    finally:
        _set_priority(0)
    return found


def busy_seconds() -> float:
    """Processor seconds that all programs of this machine have used; 0 where the system does not say."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) / 100.0
