"""The tests of one GPU (``tests/gpu``), on a CPU: that they can pass, and that they can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runtime.ranks.launch import WorkerPool
from tests.gpu.one_device import (
    DATA_PARALLEL,
    WAYS,
    plan_of,
    train_plain,
    train_planned,
    train_profiled,
    train_saved,
)
from tests.support.matrix import thinned

ON_A_CPU = [name for name in WAYS if name != "compiled"]
"""Compiling takes a minute for each; ``test_deploy.py`` compiles segments on a CPU."""


SHOWN = ["layer", "free", "float64", "bfloat16 under autocast", "float16 with loss scaling"]
"""On one device the strategies that shard have the plan of the first."""


@pytest.mark.parametrize("name", thinned(ON_A_CPU, SHOWN))
def test_a_plan_trains_as_plain_pytorch_does(name: str, pool: WorkerPool) -> None:
    way = WAYS[name]
    plan = plan_of(way, 1, "cpu")
    (losses,) = pool.run(train_planned, plan.model_dump_json(), way, "cpu", world_size=1)
    plain = train_plain(way, "cpu")
    assert losses == pytest.approx(plain, rel=way.tolerance)
    assert abs(plain[-1] / plain[0] - 1) > way.tolerance, "training moves losses by more than that"


def test_another_training_is_told_apart(pool: WorkerPool) -> None:
    way = replace(WAYS["layer"], options={"strategy": "layer", "loss_reduction": "sum"})
    plan = plan_of(way, 1, "cpu")
    (losses,) = pool.run(train_planned, plan.model_dump_json(), way, "cpu", world_size=1)
    assert losses != pytest.approx(train_plain(way, "cpu"), rel=way.tolerance)


def test_a_checkpoint_goes_on(pool: WorkerPool, tmp_path: Path) -> None:
    way = WAYS["layer"]
    arguments = plan_of(way, 1, "cpu").model_dump_json(), way, "cpu", str(tmp_path / "saved")
    ((straight, again),) = pool.run(train_saved, *arguments, world_size=1)
    assert again == straight


def test_a_profile_adds_up(pool: WorkerPool) -> None:
    way = WAYS["layer"]
    ((seconds, busy),) = pool.run(
        train_profiled, plan_of(way, 1, "cpu").model_dump_json(), way, "cpu", world_size=1
    )
    assert 0.0 < busy[0] < seconds


def test_two_ranks_are_one_training(pool: WorkerPool) -> None:
    way = DATA_PARALLEL
    plan = plan_of(way, 2, "cpu")
    assert not plan.transfers
    first, second = pool.run(train_planned, plan.model_dump_json(), way, "cpu", world_size=2)
    assert first == second
    assert first == pytest.approx(train_plain(way, "cpu"), rel=way.tolerance)
