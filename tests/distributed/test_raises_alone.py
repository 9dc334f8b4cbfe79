"""A rank that raises alone and lives on: the others hear of it long before the time limit, and refuse to go on."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError, RankFailureError, UsageError
from partitioner import Plan, partition
from partitioner.engine.engine import Engine
from runtime.ranks.launch import WorkerPool
from tests.distributed import engine_model as net

LIMIT_SECONDS = 30.0
SOON_SECONDS = 4.0
"""About 2 on a machine that has nothing else to do."""


@pytest.fixture(scope="module")
def plan_json() -> str:
    made = partition(
        net.workload(), ClusterSpec.local(3), batch_size=8, microbatches=4, pins=net.PINS, strategy="layer"
    )
    return made.model_dump_json()


@pytest.fixture(autouse=True)
def new_group(pool: WorkerPool) -> None:
    """A group that saw a failure is unusable: one of another size makes the pool form the next one anew."""
    pool.run(dist.get_rank, world_size=2)


@dataclass
class Seen:
    """What one rank saw."""

    text: str = ""
    seconds: float = 0.0
    refusals: dict[str, str] = field(default_factory=dict)


def failing(plan_json: str, good_steps: int, method: str, lacks: str, told: Path) -> Seen:
    """In a worker: the rank that reads ``lacks`` alone gets none after ``good_steps``; nobody leaves before all know."""
    engine = Plan.from_json(plan_json).deploy(
        net.workload(), graph=net.graph(), timeout_seconds=LIMIT_SECONDS
    )
    call: Callable[[Any], Any] = getattr(engine, method)
    for _ in range(good_steps):
        call(net.batch())
    data = {name: leaf for name, leaf in net.batch().items() if name != lacks}
    started, seen = time.monotonic(), Seen()
    try:
        call(data)
    except PartitionerError as error:
        seen.text, seen.seconds = str(error), time.monotonic() - started
        if isinstance(error, RankFailureError):
            seen.refusals = refusals(engine)
    (told / str(dist.get_rank())).touch()
    while time.monotonic() - started < SOON_SECONDS and len(list(told.iterdir())) < dist.get_world_size():
        time.sleep(0.02)
    engine.close()
    return seen


def refusals(engine: Engine) -> dict[str, str]:
    """What every method says after a failed step."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, argument in {
            "train_step": net.batch(),
            "forward_backward": net.batch(),
            "clip_grad_norm_": 1.0,
            "eval_step": net.batch(),
            "forward": net.batch(),
            "state_dict": None,
            "save": folder,
            "load": folder,
        }.items():
            try:
                getattr(engine, name)(*([] if argument is None else [argument]))
            except UsageError as error:
                found[name] = str(error)
    return found


@pytest.mark.parametrize(
    ("good_steps", "method", "lacks", "culprit"),
    [
        pytest.param(
            0, "train_step", "label", 2, marks=pytest.mark.matrix
        ),  # the others wait in the comparison of batches
        (3, "train_step", "tokens", 0),  # in a receive, one of them on a rank that waits itself
        pytest.param(1, "eval_step", "label", 2, marks=pytest.mark.matrix),  # for the loss
    ],
)
def test_the_others_end_soon_and_know_why(
    good_steps: int, method: str, lacks: str, culprit: int, plan_json: str, pool: WorkerPool, tmp_path: Path
) -> None:
    outcomes = pool.run_each(
        failing, plan_json, good_steps, method, lacks, tmp_path, world_size=3, timeout_seconds=60.0
    )
    for rank, (ok, seen) in enumerate(outcomes):
        assert ok, seen
        if rank == culprit:
            assert "the batch lacks inputs" in seen.text
            continue
        assert f"rank {culprit} failed or hangs: rank {rank}" in seen.text
        assert f"rank {culprit} reported: UsageError: error[usage]: the batch lacks inputs" in seen.text
        assert lacks in seen.text
        assert seen.seconds < SOON_SECONDS, seen
        assert len(seen.refusals) == 8
        for text in seen.refusals.values():
            assert "an earlier step failed: " in text
            assert "restart all ranks from the last checkpoint" in text


def refused_by_all(plan_json: str) -> list[float]:
    """In a worker: what all ranks refuse they may go on from, at their own pace."""
    with Plan.from_json(plan_json).deploy(
        net.workload(), graph=net.graph(), timeout_seconds=LIMIT_SECONDS
    ) as engine:
        with pytest.raises(UsageError):
            engine.train_step({})
        time.sleep(3.0 if dist.get_rank() == 1 else 0.0)
        return [float(engine.train_step(net.batch()))]


def test_what_all_ranks_refuse_ends_nothing(plan_json: str, pool: WorkerPool) -> None:
    found = pool.run(refused_by_all, plan_json, world_size=3, timeout_seconds=60.0)
    assert found[0] == found[1] == found[2]
