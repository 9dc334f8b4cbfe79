"""Plans on one GPU train as the model does on the CPU, and as plain PyTorch does on the same GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu_models import cluster_of
from partitioner import Workload, partition
from runtime.ranks.launch import WorkerError, WorkerPool
from tests.gpu.one_device import (
    DATA_PARALLEL,
    WAYS,
    Way,
    plan_of,
    train_plain,
    train_planned,
    train_profiled,
    train_saved,
)

DEVICE = "cuda:0"
WORKER_SECONDS = 60.0
"""One that hangs takes less than half of the time of all: importing takes some 10 s, compiling most of a minute."""


def on_gpu(
    pool: WorkerPool, ranks: int, function: Callable[..., Any], way: Way, *arguments: Any
) -> list[Any]:
    """Run ``function`` on ``ranks`` ranks of a plan that share the GPU."""
    plan = plan_of(way, ranks, DEVICE)
    assert ranks == 1 or not plan.transfers
    try:
        return pool.run(
            *(function, plan.model_dump_json(), way, DEVICE, *arguments),
            world_size=ranks,
            timeout_seconds=WORKER_SECONDS,
        )
    except WorkerError:
        pool.close()  # an error of CUDA stays in the process that saw it: the next test gets others
        raise


@pytest.mark.parametrize("name", WAYS)
def test_a_plan_trains_as_plain_pytorch_does(name: str, pool: WorkerPool) -> None:
    way = WAYS[name]
    (losses,) = on_gpu(pool, 1, train_planned, way)
    assert losses == pytest.approx(train_plain(way, DEVICE), rel=way.tolerance)


def test_a_checkpoint_goes_on_on_a_gpu(pool: WorkerPool, tmp_path: Path) -> None:
    way = WAYS["layer"]
    ((straight, again),) = on_gpu(pool, 1, train_saved, way, str(tmp_path / "saved"))
    assert again == pytest.approx(straight, rel=way.tolerance)  # attention's backward may add in any order


def test_a_profile_is_by_the_devices_clock(pool: WorkerPool) -> None:
    ((seconds, busy),) = on_gpu(pool, 1, train_profiled, WAYS["layer"])
    assert 0.0 < busy[0] < seconds


def test_two_ranks_share_a_gpu_over_gloo(pool: WorkerPool) -> None:
    # NCCL refuses two ranks on one device; Gloo sums CUDA tensors but sends none, so only data parallelism can be shown.
    way = DATA_PARALLEL
    first, second = on_gpu(pool, 2, train_planned, way)
    assert first == second
    assert first == pytest.approx(train_plain(way, DEVICE), rel=way.tolerance)


def test_a_plan_trains_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    # In this process, and last: one that hangs in NCCL cannot be ended by itself.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    batch = (torch.randn(6, 8, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64))

    def loss_fn(output: Tensor, whole: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(output, whole[1])

    workload = Workload(model, batch, loss_fn, "mlp")
    plan = partition(
        workload,
        cluster_of(torch.device("cuda")),
        batch_size=6,
        microbatches=3,
        schedule="1f1b",
        strategy="layer",
    )
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    for name, value in environment.items():
        monkeypatch.setitem(os.environ, name, value)
    options = {"optimizer": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.1}}
    try:
        with plan.deploy(workload, **options) as engine:
            losses = [float(engine.train_step(batch)) for _ in range(3)]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch)
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    assert losses == pytest.approx(expected, rel=1e-9)
