"""A rank that dies, hangs or raises: the others end in time and say who and what they waited for."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from cost_models.errors import RankFailureError
from runtime.execute.context import RankProgram
from runtime.execute.execute import Executor
from runtime.ranks.launch import WorkerError, WorkerPool, spawn_local
from tests.distributed import hand_model as hand
from tests.support.matrix import thinned

RANKS = (0, 0, 1, 2)  # a chain of three ranks, so that rank 0 waits on rank 2 only through rank 1
MICROBATCHES = 3
LIMIT_SECONDS = 3.0


def made_executor(timeout_seconds: float) -> Executor:
    return Executor(
        RankProgram(
            hand.programs("list", RANKS, MICROBATCHES),
            dist.get_rank(),
            hand.codes(),
            hand.graph(RANKS),
            hand.state(),
            hand.BATCH,
        ),
        timeout_seconds=timeout_seconds,
    )


def break_in_the_middle(how: str, culprit: int) -> tuple[str, str, float]:
    """In a worker: two good steps, then ``culprit`` fails in its second forward of the third step."""
    rank = dist.get_rank()
    executor = made_executor(LIMIT_SECONDS)
    for _ in range(2):
        executor.train_step(hand.batch(7), MICROBATCHES)
    if rank == culprit and how != "sleep in the reduction":
        runner = next(iter(executor._training.runners.values()))
        runner._call = _failing(how, runner._call)
    if rank == 2 and how == "sleep in the reduction":
        reduction = executor._active.reductions[0]
        reduction.start = lambda all_reduce: time.sleep(1.5 * LIMIT_SECONDS)
    start = time.monotonic()
    try:
        executor.train_step(hand.batch(7), MICROBATCHES)
    except RankFailureError as error:
        return "rank failure", str(error), time.monotonic() - start
    finally:
        executor.close()
    return "no failure", "", time.monotonic() - start


def _failing(how: str, call: Any) -> Any:
    calls = iter(range(100))

    def run(*arguments: Any) -> Any:
        if next(calls) == 1:
            if how == "raise":
                raise ValueError("the loss is not what it was")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        return call(*arguments)

    return run


def _pids(pool: WorkerPool) -> list[int]:
    return [worker[0].pid for worker in pool._workers if worker is not None]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(3, group_timeout_seconds=20) as workers:
        yield workers
        pids = _pids(workers)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ("how", "culprit"),
    thinned(itertools.product(["kill", "stop", "raise"], [1, 2]), [("stop", 1), ("raise", 2)]),
)
def test_the_others_end_in_time_and_name_the_culprit(pool: WorkerPool, how: str, culprit: int) -> None:
    ready(pool)
    outcomes = pool.run_each(break_in_the_middle, how, culprit, timeout_seconds=2.5 * LIMIT_SECONDS)
    for rank, (ok, outcome) in enumerate(outcomes):
        if rank == culprit:
            assert not ok
            expected = {"kill": "exit code -9", "stop": "no result in time", "raise": "ValueError: the loss"}
            assert expected[how] in outcome
            continue
        assert ok, outcome
        kind, text, seconds = outcome
        assert kind == "rank failure"
        assert seconds < LIMIT_SECONDS * 1.25
        assert f"rank {culprit} failed or hangs" in text, text
        assert f"rank {rank} waited on rank" in text
        assert "`<" in text or "`>" in text or "`+" in text  # the instruction


def ready(pool: WorkerPool) -> None:
    """Start all workers and train a step, so that a limit counts from here: on a busy machine imports take seconds."""
    pool.run(train_once, timeout_seconds=120.0)


def train_once() -> None:
    executor = made_executor(timeout_seconds=60.0)
    executor.train_step(hand.batch(7), MICROBATCHES)
    executor.close()


def fail_if(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ZeroDivisionError("planted")
    return dist.get_world_size()


def test_a_rank_that_hangs_in_a_reduction(pool: WorkerPool) -> None:
    ready(pool)
    outcomes = pool.run_each(break_in_the_middle, "sleep in the reduction", 2, timeout_seconds=30.0)
    ok, (kind, text, seconds) = outcomes[0]
    assert ok
    assert kind == "rank failure"
    assert "rank 0 waited on rank 2 for `+embed@0,2`" in text
    assert seconds < LIMIT_SECONDS * 1.25


def die(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_pool_goes_on_after_an_error(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(fail_if, 1)
    assert list(caught.value.errors) == [1]
    assert "ZeroDivisionError: planted" in str(caught.value)
    assert "fail_if" in str(caught.value)
    assert pool.run(fail_if, 5) == [3, 3, 3]
    assert pool.run(fail_if, 5, world_size=1) == [1]
    with pytest.raises(WorkerError, match="exit code -9"):
        pool.run(die, 1, world_size=2)
    assert pool.run(fail_if, 5) == [3, 3, 3]
    os.kill(_pids(pool)[1], signal.SIGKILL)
    time.sleep(0.2)
    assert pool.run(fail_if, 5, world_size=2) == [2, 2]


def test_spawn_local_leaves_no_process() -> None:
    before = set(psutil.Process().children(recursive=True))
    assert spawn_local(2, dist.get_rank) == [0, 1]
    with pytest.raises(WorkerError, match="no result in time"):
        spawn_local(2, time.sleep, 60, timeout_seconds=1)
    after = {
        p
        for p in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(p.cmdline())
    }
    assert after <= before
