"""A batch may be whatever a data loader yields: the engine's step is that of the model on it."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding
from transformers.utils import ModelOutput

from cost_models.cluster import ClusterSpec
from partitioner import Plan, Workload, partition
from runtime.ranks.launch import WorkerPool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, scale: Tensor, power: float = 1.0) -> Tensor:
        return self.b(torch.tanh(self.a(x)) * scale * power)


@dataclass(frozen=True)
class Fields:
    """forward's arguments, and one for the loss."""

    x: Tensor
    scale: Tensor
    target: Tensor
    power: float = 2.0


@dataclass
class Output(ModelOutput):
    x: Tensor | None = None
    scale: Tensor | None = None
    target: Tensor | None = None
    power: float | None = None


class Own(MutableMapping[str, Any]):
    """A mapping whose shallow copy shares its storage."""

    def __init__(self, **items: Any) -> None:
        self.items_here = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_here[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_here[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_here[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_here)

    def __len__(self) -> int:
        return len(self.items_here)

    @property
    def target(self) -> Tensor:
        return self.items_here["target"]


class Whole(nn.Module):
    """Takes the dataclass itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.a, self.b = self.net.a, self.net.b

    def forward(self, batch: Fields) -> Tensor:
        return self.net(batch.x, batch.scale, batch.power)


def tensors(samples: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, 4, generator=generator, dtype=torch.float64),
        "scale": torch.rand(samples, 1, generator=generator, dtype=torch.float64),
        "target": torch.randn(samples, 3, generator=generator, dtype=torch.float64),
    }


def make(kind: str, samples: int = 6, seed: int = 0) -> Any:
    data = tensors(samples, seed)
    match kind:
        case "dataclass" | "argument":
            return Fields(**data)
        case "output":
            return Output(**data, power=2.0)
        case "encoding":
            return BatchEncoding({**data, "power": 2.0})
        case "own":
            return Own(**data, power=2.0)
        case _:
            return (data["x"], data["scale"], 2.0, data["target"])


def loss_fn(output: Tensor, batch: Any) -> Tensor:
    target = batch[3] if isinstance(batch, tuple) else batch.target
    return (output - target).square().mean()


def workload(kind: str) -> Workload:
    torch.manual_seed(0)
    model = (Whole() if kind == "argument" else Net()).double()
    return Workload(model, make(kind), loss_fn, kind)


def steps(plans: dict[str, str]) -> dict[str, list[float]]:
    """In a worker: losses of three steps with each kind of batch, the last one of a short batch."""
    losses = {}
    for kind, text in plans.items():
        options: dict[str, Any] = {"optimizer": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.5}}
        with Plan.from_json(text).deploy(workload(kind), timeout_seconds=20.0, **options) as engine:
            first, second, short = make(kind), make(kind, seed=1), make(kind, 1, seed=2)
            losses[kind] = [engine.train_step(batch).item() for batch in (first, second, short)]
    return losses


def expected() -> list[float]:
    model, losses = workload("tuple").model, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for samples, seed in ((6, 0), (6, 1), (1, 2)):
        batch = make("tuple", samples, seed)
        loss = loss_fn(model(*batch[:3]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_steps_are_the_same_whatever_the_batch_is(pool: WorkerPool) -> None:
    plans = {}
    for kind in ("dataclass", "argument", "output", "encoding", "own", "tuple"):
        made = workload(kind)
        pins = {"*a": 0, "*b": 1}
        plan = partition(
            made, ClusterSpec.local(2), batch_size=6, microbatches=2, pins=pins, strategy="layer"
        )
        plans[kind] = plan.model_dump_json()
        assert type(made.example_inputs) is type(make(kind))
        if kind == "own":
            assert torch.equal(made.example_inputs["x"], tensors(6, 0)["x"]), (
                "tracing changed the user's batch"
            )
    for losses in pool.run(steps, plans, world_size=2, timeout_seconds=120.0):
        for kind, found in losses.items():
            assert found == pytest.approx(expected(), rel=1e-11), kind
