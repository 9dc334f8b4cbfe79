"""A rank that does not come to a collective of sharded owners: others end in time and say who and what was waited for."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist

from cost_models.errors import RankFailureError
from cost_models.layout import Mesh
from cost_models.precision import Precision
from passes.copies.float64 import float64_by_default
from runtime.execute.context import RankProgram
from runtime.execute.execute import Executor
from runtime.ranks.launch import WorkerError, WorkerPool
from runtime.state.step_precision import StepPrecision
from tests.distributed.sharded_models import COLUMN_ROW, ZERO1, Mlp, mlp_batch
from tests.distributed.test_sharded import (
    FOUR,
    MICROBATCHES,
    SAMPLES,
    TWO,
    Task,
    rank_state,
    sharded_of,
    task_of,
)
from tests.support.matrix import thinned

LIMIT_SECONDS = 3.0


def step_without(task: Task, absent: int) -> None:
    """In a worker: one good step; then ``absent`` never updates. Raises what the step raises, in time.

    It is raised and not returned because the pool keeps the process groups of workers that return.
    """
    rank = dist.get_rank()
    state = rank_state(task, rank)
    executor = Executor(
        RankProgram(
            task.programs, rank, task.codes, task.segments, state.leaves, task.spec, shardings=task.shardings
        ),
        timeout_seconds=LIMIT_SECONDS,
    )
    precision = StepPrecision(state, Precision(), executor.collectives, executor.sharded_owners(state))
    optimizer = torch.optim.SGD(state.parameters.values(), lr=1e-2)
    precision.attach(optimizer)
    started = time.monotonic()
    try:
        with float64_by_default():
            for step in range(2):
                executor.train_step(task.batch, MICROBATCHES)
                precision.after_backward()
                started = time.monotonic()
                if step and rank == absent:
                    time.sleep(LIMIT_SECONDS * 1.2)
                    return
                optimizer.step()
    except RankFailureError:
        assert time.monotonic() - started < LIMIT_SECONDS * 1.25
        raise
    finally:
        executor.close()


@pytest.mark.parametrize(("mesh", "absent"), thinned([(TWO, 1), (FOUR, 3)], [(FOUR, 3)]))
def test_a_rank_that_does_not_update_is_named(pool: WorkerPool, mesh: Mesh, absent: int) -> None:
    model, batch = Mlp().double(), mlp_batch(SAMPLES)
    forced = (ZERO1,) if mesh is TWO else (ZERO1, COLUMN_ROW)
    task = task_of(model, batch, sharded_of(model, batch, mesh, forced))
    partner = absent - 1 if mesh is TWO else absent - 2  # the one rank that shares its owners' leaves
    expected = f"rank {absent} failed or hangs: rank {partner} got no answer for `the new values of"
    with pytest.raises(WorkerError, match=re.escape(expected)):
        pool.run(step_without, task, absent, world_size=len(mesh.ranks), timeout_seconds=30)
