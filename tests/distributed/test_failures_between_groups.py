"""A rank of a pipeline of sharded stages that dies, hangs or raises: the others end in time and say who it was.

inside of                            1 + 3 by samples                2 + 2 by columns and rows
a value on its way in pieces         rank 0 has sent one of three
a collective of a group                                              rank 1 comes to the second of a step no more
a block that is computed again                                       rank 2, while rank 3 does its part
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest import mock

import psutil
import pytest
import torch.distributed as dist

from cost_models.errors import RankFailureError
from cost_models.layout import Shard
from passes.copies.float64 import float64_by_default
from runtime.mesh.axis import Axis
from runtime.ranks.launch import WorkerPool
from runtime.segment import recompute
from tests.distributed.sharded_models import BATCH, COLUMN_ROW
from tests.distributed.stages import Group, staged
from tests.distributed.test_between_groups import (
    H1,
    MICROBATCHES,
    Task,
    again_everywhere,
    executor_of,
    graph,
    task_of,
)
from tests.support.matrix import thinned

LIMIT_SECONDS = 4.0

GROUPS = {
    "pieces": ((Group(1, BATCH), Group(3, BATCH, Shard(0))), 0),
    "collective": ((Group(2, COLUMN_ROW), Group(2, COLUMN_ROW)), 1),
    "computed again": ((Group(2, COLUMN_ROW), Group(2, COLUMN_ROW)), 2),
}
"""Where it happens: the groups, and the rank to which."""


@cache
def task_for(where: str) -> Task:
    """Everything is computed again where that is the place, and nothing elsewhere."""
    groups, _ = GROUPS[where]
    candidate = staged(graph(), H1, groups, "1f1b", MICROBATCHES)
    return task_of(again_everywhere(candidate) if where == "computed again" else candidate)


def end(how: str) -> None:
    """In a worker: be gone, be stopped, or raise."""
    if how == "raise":
        raise ValueError("the loss is not what it was")
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def on_second(how: str, armed: list[bool], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call``, which ends this rank as it is called for the second time since it was ``armed``."""
    numbers = itertools.count()

    def run(*arguments: Any, **options: Any) -> Any:
        if armed and next(numbers) == 1:
            end(how)
        return call(*arguments, **options)

    return run


def planted(where: str, how: str, armed: list[bool]) -> Any:
    """The fault at its place."""
    if where == "pieces":
        send = vars(dist.ProcessGroup)["send"]
        return mock.patch.object(dist.ProcessGroup, "send", on_second(how, armed, send))
    if where == "collective":
        return mock.patch.object(Axis, "start_sum", on_second(how, armed, Axis.start_sum))
    checkpoint = recompute.checkpoint
    return mock.patch.object(
        recompute,
        "checkpoint",
        lambda function, *a, **k: checkpoint(on_second(how, armed, function), *a, **k),
    )


def break_in_the_middle(task: Task, where: str, how: str, culprit: int) -> tuple[str, str, float]:
    """In a worker: two good steps, then ``culprit`` ends in the third."""
    armed: list[bool] = []
    with planted(where, how, armed) if dist.get_rank() == culprit else nullcontext(), float64_by_default():
        executor, _ = executor_of(task, LIMIT_SECONDS)
        for _ in range(2):
            executor.train_step(task.batch, MICROBATCHES)
        armed.append(True)
        start = time.monotonic()
        try:
            executor.train_step(task.batch, MICROBATCHES)
        except RankFailureError as error:
            return "rank failure", str(error), time.monotonic() - start
        finally:
            executor.close()
    return "no failure", "", time.monotonic() - start


@pytest.fixture(scope="module")
def four() -> Iterator[WorkerPool]:
    """Workers of its own: some of them die."""
    with WorkerPool(4, group_timeout_seconds=20) as workers:
        yield workers
        pids = [worker[0].pid for worker in workers._workers if worker is not None]
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ("where", "how"),
    thinned(
        itertools.product(GROUPS, ["kill", "stop", "raise"]),
        [("pieces", "kill"), ("collective", "raise")],
    ),
)
def test_the_others_end_in_time_and_name_the_culprit(four: WorkerPool, where: str, how: str) -> None:
    culprit = GROUPS[where][1]
    four.run(dist.get_rank)  # so that starting does not count
    outcomes = four.run_each(
        break_in_the_middle, task_for(where), where, how, culprit, timeout_seconds=4 * LIMIT_SECONDS
    )
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
