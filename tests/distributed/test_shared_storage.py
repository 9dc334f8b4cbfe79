"""Tensors that share memory, in every strategy: three steps of the engine equal a plain loop over the user's own module.

Each case gives a model buffers, attributes and lists that are views of its parameters, of other buffers, and of each
other. The plain loop below uses nothing of this project: forward, backward, SGD with momentum, the module's state dict.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from partitioner import Plan, Workload, partition
from partitioner.models.as_graph import as_graph
from passes.copies.float64 import float64_by_default
from runtime.ranks.launch import WorkerPool
from tests.distributed.test_odd_models import random_pins
from tests.support.matrix import thinned

WIDTH, SAMPLES, STEPS = 6, 8, 3
SGD = {"lr": 0.1, "momentum": 0.9}
TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda t: t,
    "rows": lambda t: t[1:4],
    "columns": lambda t: t[:, 2:5],
    "transposed": lambda t: t.t(),
    "row": lambda t: t[2],
    "column": lambda t: t[:, 1],
    "steps": lambda t: t[::2, 1::3],
    "diagonal": lambda t: t.diagonal(),
    "flat": lambda t: t.view(-1)[3:21],
    "corner": lambda t: t[:3, :3].t(),
}


class Shared(nn.Module):
    """Three layers, and views of their weights and of a table, as buffers, attributes and in lists."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))
        self.table: Tensor
        self.kept: list[Tensor] = []
        self.reads: list[tuple[str, int]] = []
        """(name of the view, layer after which it is read)."""
        self.counts = draw.random() < 0.5
        for number in range(4):
            source = draw.choice(["table", "0", "1", "2", "2"])
            owner = self.table if source == "table" else self.layers[int(source)].get_parameter("weight")
            with_gradient = draw.random() < 0.3
            view = TAKEN[draw.choice(list(TAKEN))](owner if with_gradient else owner.detach())
            kind, name = draw.choice(["buffer", "hidden", "attribute", "list"]), f"view{number}"
            if kind == "list":
                self.kept.append(view)
                name = f"kept.{len(self.kept) - 1}"
            elif kind == "attribute":
                setattr(self, name, view)
            else:
                self.register_buffer(name, view, persistent=kind == "buffer")
            self.reads.append((name, draw.randrange(3)))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if self.training and self.counts and number == 1:
                self.table.add_(0.25 * x.detach().mean(0))  # the views of it are read before and after
            for name, place in self.reads:
                if place == number:
                    view = self.kept[int(name[5:])] if name.startswith("kept.") else getattr(self, name)
                    x = x * (1.0 + 0.3 * view.mean()) + 0.1 * view.reshape(-1)[:WIDTH].sin().sum()
        return x


def squared(output: Tensor, batch: object) -> Tensor:
    return (output**2).mean()


def batch(step: int) -> Tensor:
    return torch.randn(
        SAMPLES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + step)
    )


def workload(seed: int) -> Workload:
    with float64_by_default():
        return Workload(Shared(seed), batch(0), squared)


def plain_loop(seed: int, microbatches: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of all steps and of an evaluation after them, and the state dict between the two."""
    with float64_by_default():
        model = Shared(seed)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for piece in batch(step).chunk(microbatches):
            loss = squared(model(piece), piece) / microbatches
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    losses.append(squared(model.eval()(batch(0)[:4]), None).item())
    return losses, state


PLACED: dict[str, dict[str, Any]] = {
    "layer": {"strategy": "layer", "microbatches": 2},
    "free": {"strategy": "free", "microbatches": 2, "time_limit_seconds": 1.0},
    "zero3": {"strategy": "feature", "mesh": (2,), "microbatches": 2, "pins": {"*": "zero3"}},
    "column_row": {"strategy": "feature", "mesh": (2,), "microbatches": 2, "pins": {"*": "column_row"}},
    "mesh": {"strategy": "feature", "mesh": (2, 2), "microbatches": 2},
}
SEEDS = {"layer": (3, 8), "free": (1, 4, 7), "zero3": (2, 9), "column_row": (5, 10), "mesh": (6,)}
RANKS_OF = {"layer": 2, "free": 3, "zero3": 2, "column_row": 2, "mesh": 4}


def planned(seed: int, how: str) -> Plan:
    graph, options = as_graph(workload(seed)), dict(PLACED[how])
    if how in ("layer", "free"):
        options["pins"] = random_pins(graph, RANKS_OF[how], random.Random(seed))
    return partition(
        graph,
        ClusterSpec.local(RANKS_OF[how]),
        batch_size=SAMPLES,
        optimizer_memory="momentum",
        **{"strategy": "layer", **options},
    )


def train(plans: tuple[str, str], seed: int, folder: str = "") -> tuple[list[float], dict[str, Tensor]]:
    """In a worker: all steps with the first plan; with a ``folder``, the last one by the second, which resumes."""
    options: dict[str, Any] = {
        "optimizer": torch.optim.SGD,
        "optimizer_kwargs": SGD,
        "timeout_seconds": 30.0,
    }
    losses = []
    engine = Plan.from_json(plans[0]).deploy(workload(seed), **options)
    for step in range(STEPS):
        if folder and step == STEPS - 1:
            engine.save(folder)
            engine.close()
            other = workload(seed)
            with torch.no_grad():
                for tensor in (*other.model.parameters(), *other.model.buffers()):
                    tensor.mul_(1.5)  # what is loaded must replace it, in the views too
            engine = Plan.from_json(plans[1]).deploy(other, **options)
            engine.load(folder)
        losses.append(engine.train_step(batch(step)).item())
    state = engine.state_dict()
    losses.append(float(engine.eval_step(batch(0)[:4]).loss))
    engine.close()
    return losses, state


def check(seed: int, plans: tuple[Plan, Plan], pool: WorkerPool, folder: str = "") -> None:
    expected, state = plain_loop(seed, plans[0].microbatches)
    (losses, found), *_ = pool.run(
        train,
        tuple(plan.model_dump_json() for plan in plans),
        seed,
        folder,
        world_size=plans[0].world_size,
        timeout_seconds=90.0,
    )
    assert losses == pytest.approx(expected, rel=1e-9)
    assert list(found) == list(state)
    for name, value in state.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-11), name


@pytest.mark.parametrize(
    ("how", "seed"),
    thinned(
        [(how, seed) for how, seeds in SEEDS.items() for seed in seeds],
        [(how, seeds[0]) for how, seeds in SEEDS.items() if how not in ("zero3", "column_row")],
    ),
)
def test_training_and_verification_follow_the_shared_memory(how: str, seed: int, pool: WorkerPool) -> None:
    plan = planned(seed, how)
    assert plan.views, "nothing is shared: another seed"
    check(seed, (plan, plan), pool)
    plan.verify(workload(seed), pool=pool).raise_if_different()


@pytest.mark.parametrize(
    ("first", "second"), thinned([("layer", "zero3"), ("column_row", "layer")], [("layer", "zero3")])
)
def test_a_checkpoint_is_resumed_under_another_plan(
    first: str, second: str, pool: WorkerPool, tmp_path: Path
) -> None:
    check(3, (planned(3, first), planned(3, second)), pool, str(tmp_path))
