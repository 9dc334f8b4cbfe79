"""A model with what makes engines hard, and training it unpartitioned.

    tokens (b, 5) -> embed -> mean -> middle, gate (frozen) -> norm -> head (tied to embed) -> cross-entropy of label (b,)

``spare`` is in no graph: it gets no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from partitioner import Workload
from partitioner.models.as_graph import as_graph
from passes.graph.graph import OpGraph

WORDS, WIDTH, LENGTH, SAMPLES, MICROBATCHES = 11, 8, 5, 8, 4
PINS = {"embed": 0, "middle": 1, "norm": 2, "head": 2}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight
        self.spare = nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(self.embed(tokens).mean(1)) * self.gate)
        return self.head(self.norm(hidden))


def loss_fn(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = nn.functional.cross_entropy(output, batch["label"])
    right = (output.argmax(-1) == batch["label"]).double().mean()
    return loss, {"right": right, "size": output.square().mean()}


def model() -> Net:
    made = Net().double()
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.copy_(drawn.double() * 0.5)
    return made


def batch(samples: int = SAMPLES, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(0, WORDS, (samples, LENGTH), generator=generator),
        "label": torch.randint(0, WORDS, (samples,), generator=generator),
    }


def workload() -> Workload:
    return Workload(model(), batch(), loss_fn, "net")


@cache
def graph() -> OpGraph:
    """Traced once in every process, for tests of what comes after tracing."""
    return as_graph(workload())


def groups_by_name(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
    """Weight decay for matrices of the middle only; a group that most ranks have nothing of."""
    decayed = [p for name, p in named if name == "middle.weight"]
    plain = [p for name, p in named if name != "middle.weight" and not name.endswith("bias")]
    biases = [p for name, p in named if name.endswith("bias")]
    return torch.optim.AdamW(
        [
            {"params": plain, "weight_decay": 0.0},
            {"params": decayed, "weight_decay": 0.3},
            {"params": biases, "weight_decay": 0.1, "lr": 0.02},
        ],
        lr=0.05,
    )


def annealing(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)


@dataclass(frozen=True)
class Course:
    """A training run: samples of each batch, how it is clipped."""

    sizes: tuple[int, ...]
    max_norm: float | None
    norm_type: float = 2.0


@dataclass
class Outcome:
    """What a run shows, unpartitioned or on one rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    """Parameters per group."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


def eager(course: Course) -> Outcome:
    """The course on the whole model, whole batches."""
    net, outcome = model(), Outcome()
    trained = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    optimizer = groups_by_name(trained)
    schedule = annealing(optimizer)
    for seed, samples in enumerate(course.sizes):
        data = batch(samples, seed)
        optimizer.zero_grad()
        loss, metrics = loss_fn(net(data["tokens"]), data)
        loss.backward()
        norm = None
        if course.max_norm is not None:
            norm = float(
                nn.utils.clip_grad_norm_(net.parameters(), course.max_norm, norm_type=course.norm_type)
            )
        optimizer.step()
        schedule.step()
        outcome.losses.append(loss.item())
        outcome.norms.append(norm)
        outcome.metrics.append({name: metric.item() for name, metric in metrics.items()})
        outcome.rates.append([group["lr"] for group in optimizer.param_groups])
    outcome.groups = [len(group["params"]) for group in optimizer.param_groups]
    outcome.parameters = {name: p.detach() for name, p in net.named_parameters()}
    outcome.gradients = {name: p.grad for name, p in net.named_parameters()}
    return outcome


def names_of(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]]) -> list[list[str]]:
    """The names in each group."""
    names = {id(tensor): name for name, tensor in named}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
