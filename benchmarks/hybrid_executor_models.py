"""The model of the hybrid benchmark, the plan of its pipeline of sharded stages, and the workers' task.

Shapes: x, target: [batch, positions, width]. Ranks: stage 0 on 0 and 1, stage 1 on 2 and 3.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.plan_tasks import plan_task
from benchmarks.sharded_models import COLUMNS, ROWS, BlockSpec, TransformerBlock
from cost_models.cluster import ClusterSpec
from partitioner.api import partition
from partitioner.models.as_graph import as_graph
from partitioner.models.workload import Workload
from partitioner.plan import Plan
from partitioner.record.rebuild import plan_segments
from partitioner.verify.rank import VerificationTask

STAGES, SHARDS = 2, 2
RANKS = STAGES * SHARDS
PINS = {
    **{f"*.{name}.{kind}": "S0" for name in COLUMNS for kind in ("weight", "bias")},
    **{f"*.{name}.weight": "S1" for name in ROWS},
    **{f"*.{name}.bias": "R" for name in ROWS},
    "*norm*": "R",  # its parameters, and what it makes
    "add*": "R",
    "x": "R",
}


class Layer(TransformerBlock):
    """x [b, s, width] -> y [b, s, width]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.through(x)


class Stack(nn.Module):
    """Layers one after another."""

    def __init__(self, spec: BlockSpec, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(spec) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of_pair(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss in the form that ``partition`` asks for: (output, whole batch)."""
    return F.mse_loss(output, batch[1])


@dataclass(frozen=True)
class HybridSpec:
    """Sizes of the model and of the whole batch, which goes in ``microbatches``."""

    block: BlockSpec = field(default_factory=lambda: BlockSpec(batch_size=16))
    layers: int = 4
    microbatches: int = 8

    def __str__(self) -> str:
        return f"{self.layers} times {self.block}, {self.microbatches} micro-batches"

    def build(self) -> Stack:
        """The model, with the same weights in every process."""
        torch.manual_seed(0)
        return Stack(self.block, self.layers)

    def batch(self) -> tuple[Tensor, Tensor]:
        """(x, target), the same in every process."""
        batch = self.block.batch()
        return batch["x"], batch["target"]

    def stage_layers(self, stage: int) -> range:
        """The layers of one of the equal stages."""
        each = self.layers // STAGES
        return range(stage * each, (stage + 1) * each)


def task_of(spec: HybridSpec) -> VerificationTask:
    """From the model to a plan with the other side's stages and layouts, and what the workers need to run it."""
    workload = Workload(spec.build(), spec.batch(), loss_of_pair, name="stack")
    graph = as_graph(workload, name="stack")
    samples = spec.block.batch_size // spec.microbatches
    borders = ",".join(f"layers.{spec.stage_layers(stage)[0]}" for stage in range(1, STAGES))
    plan = partition(
        graph,
        ClusterSpec.local(RANKS),
        strategy="hybrid",
        fix=f"pipeline={STAGES} tensor={SHARDS} microbatch={samples} recompute=none borders={borders}",
        pins=PINS,
        schedule="1f1b",
        batch_size=spec.block.batch_size,
        optimizer_memory="none",
    )
    _refuse_unlike(spec, plan)
    return plan_task(plan, workload, graph)


def _refuse_unlike(spec: HybridSpec, plan: Plan) -> None:
    """Raise AssertionError if stages, sums or messages are not those of the other side."""
    groups = tuple(tuple(range(first, first + SHARDS)) for first in range(0, RANKS, SHARDS))
    each = 2 * spec.layers // STAGES  # sums of a stage in one direction: after attention, after feed-forward
    found = [
        Counter((item.kind, item.backward) for item in stage.sharding.collectives)
        for stage in plan.stages
        if stage.sharding is not None
    ]
    expected = [Counter({("all_reduce", False): each, ("all_reduce", True): each})] * STAGES
    crossing = [
        [(piece.source, piece.target) for piece in value.pieces] for value in plan_segments(plan).values
    ]
    straight = [list(zip(*groups, strict=True))]
    if tuple(stage.devices for stage in plan.stages) != groups or found != expected or crossing != straight:
        raise AssertionError(f"not planned as meant: {plan}")
