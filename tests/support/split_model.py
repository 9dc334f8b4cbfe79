"""A model whose neurons are split into blocks, and a plan of it by hand: what tests of parts stand on.

linear(x, fc1.weight) -> batch norm (norm.weight, …) -> tanh -> linear(·, fc2.weight, fc2.bias)

linear(x, fc1.weight#0) -> batch norm (norm.weight#0, …) -> tanh -> linear(·, fc2.weight#0, fc2.bias) ─┐
linear(x, fc1.weight#1) -> batch norm (norm.weight#1, …) -> tanh -> linear(·, fc2.weight#1) ───────────┴─ add

Buffers that training writes have parts as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from partitioner import Workload, partition
from passes.graph.graph import OpGraph
from passes.split.split import Split, split_neurons
from passes.trace.trace import trace

WIDTH, HIDDEN, CLASSES, SAMPLES, MICROBATCHES = 6, 10, 4, 8, 2
SIZES = (3, 5, 2)
RANK_OF_BLOCK = (0, 1, 0)
"""Rank 0 holds two parts of each tensor."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm = nn.Linear(WIDTH, HIDDEN, bias=False), nn.BatchNorm1d(HIDDEN)
        self.fc2, self.head = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x + self.fc2(torch.tanh(self.norm(self.fc1(x)))))
        return output


def loss_fn(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch["label"])


def batch(samples: int = SAMPLES, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64),
        "label": torch.randint(0, CLASSES, (samples,), generator=generator),
    }


def model(seed: int = 0) -> Net:
    made = Net().double()
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            generator = torch.Generator().manual_seed(100 * seed + number)
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return made


def workload(seed: int = 0) -> Workload:
    return Workload(model(seed), batch(), loss_fn, "net")


def traced(made: Workload) -> OpGraph:
    return trace(made.model, made.example_inputs, loss_fn=made.loss_fn, name=made.name)


def split_of(graph: OpGraph, sizes: Sequence[int] = SIZES) -> tuple[Split, ...]:
    """The neurons of the first linear layer."""
    first = next(node for node in graph.ops if node.target is torch.ops.aten.linear.default)
    return (Split(first.name, -1, tuple(sizes)),)


def split(graph: OpGraph, sizes: Sequence[int] = SIZES) -> OpGraph:
    """``graph`` with the first two linear layers in blocks."""
    return split_neurons(graph, split_of(graph, sizes))


def split_plan(
    made: Workload, sizes: Sequence[int] = SIZES, rank_of_block: Sequence[int] = RANK_OF_BLOCK
) -> str:
    """A plan with block i on ``rank_of_block[i]``, sums on rank 0, the head on rank 1."""
    graph = traced(made)
    blocks = {f"*_b{number}": rank for number, rank in enumerate(rank_of_block)}
    return partition(
        graph,
        ClusterSpec.local(2),
        batch_size=SAMPLES,
        microbatches=MICROBATCHES,
        strategy="free",
        splits={split.op: split.sizes for split in split_of(graph, sizes)},
        pins={**blocks, "*_sum*": 0, "head": 1},
    ).model_dump_json()
