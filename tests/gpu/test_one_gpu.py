"""A plan on one GPU trains as the model does on the CPU."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from partitioner import Workload, partition


def test_a_plan_trains_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    batch = (torch.randn(6, 8, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64))

    def loss_fn(output: Tensor, whole: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(output, whole[1])

    workload = Workload(model, batch, loss_fn, "mlp")
    plan = partition(
        workload, ClusterSpec.parse("H100-80GB:1"), batch_size=6, microbatches=3, schedule="1f1b"
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
