"""Models of data-parallel recipes, deployed where a process group is already: they compute what one process computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from cost_models.cluster import ClusterSpec
from partitioner import Workload, deploy
from runtime.ranks.launch import WorkerPool

SAMPLES = 8
WAYS: Mapping[str, Mapping[str, Any]] = {
    "layer": {"min_stages": 2},
    "feature": {"pins": {"*": "data"}},
}


class Gather(torch.autograd.Function):
    """All samples' features where a process group exists, as contrastive losses gather them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if not dist.is_initialized():
            return x.clone()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if not dist.is_initialized():
            return gradients[0].clone()
        dist.all_reduce(gradients[0])
        return gradients[0].chunk(dist.get_world_size())[dist.get_rank()]


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(12, 16), nn.Linear(8, 16)
        self.norm = nn.SyncBatchNorm(16)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        x, y = self.norm(self.image(image)), self.text(text)
        if dist.is_available() and dist.is_initialized():
            parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, y)
            y = torch.cat(parts)
        own: Tensor = Gather.apply(x)
        return F.cross_entropy(own @ y.T, torch.arange(x.shape[0]))


def workload() -> Workload:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Contrastive().double()
        batch = {"image": torch.randn(SAMPLES, 12).double(), "text": torch.randn(SAMPLES, 8).double()}
    return Workload(model, batch)


def numbers(strategy: str) -> tuple[list[float], float, dict[str, Tensor]]:
    """In a worker, which has a process group: the losses of two steps, that of the evaluation, and the state."""
    made = workload()
    with deploy(
        made,
        ClusterSpec.local(2),
        batch_size=SAMPLES,
        microbatches=1,
        strategy=strategy,
        **WAYS[strategy],
        optimizer=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.1},
    ) as engine:
        losses = [engine.train_step(made.example_inputs).item() for _ in range(2)]
        return losses, engine.eval_step(made.example_inputs).loss.item(), engine.state_dict()


@pytest.mark.parametrize("strategy", WAYS)
def test_they_train_and_evaluate_as_one_process_does(strategy: str, pool: WorkerPool) -> None:
    results = pool.run(numbers, strategy, world_size=2, timeout_seconds=60.0)
    made = workload()
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = made.model(**made.example_inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    evaluated = made.model.eval()(**made.example_inputs).item()
    for own, evaluation, _ in results:
        assert own == pytest.approx(losses, rel=1e-12)
        assert evaluation == pytest.approx(evaluated, rel=1e-12)
    for name, tensor in made.model.state_dict().items():
        torch.testing.assert_close(results[0][2][name], tensor, rtol=1e-10, atol=1e-12)
