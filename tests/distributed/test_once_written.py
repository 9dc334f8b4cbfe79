"""Buffers that forward writes from nothing of the batch: in micro-batches on ranks they are what a whole-batch loop has."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from partitioner import Plan, Workload, partition
from runtime.ranks.launch import WorkerPool

RATE, STEPS = 0.1, 3


class Annealed(nn.Module):
    """A term that grows with a counter of training steps, spectral norm's vectors, an average of a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
        self.second = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.last = nn.Linear(8, 6)
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))
        self.register_buffer("average", torch.zeros(6, 8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.average.mul_(0.9).add_(0.1 * self.last.weight.detach())
        z = self.second(self.first(x).relu()).tanh()
        kept = (self.last.weight - self.average).square().sum()
        return (self.last(z) - x).square().mean() + (self.steps / 4) * z.square().mean() + 0.1 * kept


def batches() -> list[Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, dtype=torch.float64, generator=numbers) for _ in range(STEPS)]


@cache
def plain() -> dict[str, Tensor]:
    """The state after a loop over whole batches."""
    model = Annealed().train()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for x in batches():
        optimizer.zero_grad()
        model(x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def train(text: str) -> dict[str, Tensor]:
    """Three steps on this rank: the whole model's state afterwards, on rank 0."""
    workload = Workload(Annealed(), (batches()[0],))
    optimizer = {"optimizer": torch.optim.SGD, "optimizer_kwargs": {"lr": RATE}}
    with Plan.from_json(text).deploy(workload, timeout_seconds=60.0, **optimizer) as engine:
        for x in batches():
            engine.train_step((x,))
        return engine.state_dict()


@pytest.mark.parametrize("options", [{"min_stages": 2}, {"strategy": "feature"}], ids=["layer", "feature"])
def test_they_advance_once_a_batch(options: dict[str, object], pool: WorkerPool) -> None:
    workload = Workload(Annealed(), (batches()[0],))
    plan = partition(
        workload, ClusterSpec.local(2), batch_size=8, microbatches=4, **{"strategy": "layer", **options}
    )  # type: ignore[arg-type]
    assert plan.microbatches == 4
    assert not any("micro-batch" in note for note in plan.notes)
    results = pool.run(train, plan.model_dump_json(), world_size=plan.world_size, timeout_seconds=120.0)
    expected = plain()
    assert float(expected["steps"]) == STEPS
    found = next(state for state in results if state)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
