"""The model of the sharded benchmark, its two placements, and the workers' tasks.

Shapes: x, target: [batch, positions, width]. One transformer block with its norms first, without dropout; the loss is the
mean square difference to the target. The first projection makes q, k and v of one head after another, so that a part
of its rows is some heads' all (Shoeybi et al. 2019).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cost_models.cluster import ClusterSpec
from passes.costs.costs import costs_of
from passes.graph.verify import verify_graph
from passes.lower.job import Job
from passes.lower.lower import lower
from passes.lower.segment import on_mesh
from passes.search.feature.place import FeatureRequest, place_features
from passes.shard.shard import shard_graph
from passes.shard.state import gradient_sums, shardings
from passes.trace.trace import trace
from runtime.check.check import check
from runtime.mesh.sharding import Sharding
from runtime.ops.bridges import is_bridge
from runtime.program.program import Program, SegmentCost, SegmentGraph
from runtime.segment.code import BatchSpec, SegmentCode
from tests.support.sharded_programs import sharded_programs, sharded_segments

RANKS = 2
COLUMNS, ROWS = ("qkv", "up"), ("out", "down")
PINS: Mapping[str, Mapping[str, str]] = {
    "column_row": {
        **{f"{name}.{kind}": "S0" for name in COLUMNS for kind in ("weight", "bias")},
        **{f"{name}.weight": "S1" for name in ROWS},
        **{f"{name}.bias": "R" for name in ROWS},
        "norm*": "R",  # its parameters, and what it makes
        "add*": "R",
        "broadcast_tensors": "R",
        "mse_loss": "R",
        "x": "R",
        "target": "R",
    },
    "data": {"*.weight": "R", "*.bias": "R", "x": "S0", "target": "S0"},
}
"""Layouts of parameters, batch and some values by the case; how each op runs then is the search's own."""

BRIDGES: Mapping[str, Mapping[str, int]] = {
    "column_row": {
        "sum_gradient": 2,
        "all_reduce": 2,
        "keep_first": 3,
    },  # the latter: of the rows' biases and the loss
    "data": {},
}
"""What the plans must then have in their graphs: no more communication than on the other side."""


@dataclass(frozen=True)
class BlockSpec:
    """Sizes of the block and of the whole batch."""

    width: int = 512
    heads: int = 8
    hidden: int = 2048
    positions: int = 128
    batch_size: int = 8

    def __str__(self) -> str:
        return (
            f"one transformer block, width {self.width}, {self.heads} heads, feed-forward {self.hidden}, "
            f"{self.positions} positions, batch {self.batch_size}, float32"
        )

    def build(self) -> Block:
        """The model, with the same weights in every process."""
        torch.manual_seed(0)
        return Block(self)

    def batch(self) -> dict[str, Tensor]:
        """The whole batch, the same in every process."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.batch_size, self.positions, self.width)
        return {name: torch.randn(shape, generator=generator) for name in ("x", "target")}


class TransformerBlock(nn.Module):
    """The block's layers, and the way through them, for modules with and without a loss behind it."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        width = spec.width
        self.head_width = width // spec.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, spec.hidden), nn.Linear(spec.hidden, width)

    def through(self, x: Tensor) -> Tensor:
        """x [b, s, width] -> y [b, s, width]."""
        heads = self.qkv(self.norm1(x)).unflatten(
            -1, (-1, 3, self.head_width)
        )  # [b, s, heads, 3, head_width]
        q, k, v = (t.transpose(1, 2) for t in heads.unbind(3))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class Block(TransformerBlock):
    """x, target [b, s, width] -> loss."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.through(x), target)


@dataclass(frozen=True)
class ShardedTask:
    """What a worker needs to run a sharded model. ``state``: whole."""

    programs: tuple[Program, ...]
    codes: Mapping[int, SegmentCode]
    segments: SegmentGraph
    spec: BatchSpec
    shardings: Mapping[str, Sharding]
    state: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]


def task_of(spec: BlockSpec, case: str) -> ShardedTask:
    """From the model to checked programs."""
    model, batch = spec.build(), spec.batch()
    graph = trace(model, batch, loss_reduction="mean")
    machine = ClusterSpec.local(RANKS)
    request = FeatureRequest(Job(spec.batch_size, "none"), microbatches=1, pins=PINS[case], mesh=(RANKS,))
    placement = place_features(graph, costs_of(graph, machine), machine, request).placement
    # The pins leave gradients and their state to the search: here whole on every rank, as on the other side.
    sharded = shard_graph(graph, replace(placement, sharded_state={}))
    verify_graph(sharded.graph, "shard")
    bridges = Counter(node.target.__name__ for node in sharded.graph.module.graph.nodes if is_bridge(node))
    summed = Counter(name for sync in sharded.syncs for name in sync.parameters)
    if bridges != BRIDGES[case] or set(summed) != (set(graph.parameters) if case == "data" else set()):
        raise AssertionError(f"{case} was not planned as meant: bridges {bridges}, gradients summed {summed}")
    programs = sharded_programs(sharded, 1, RANKS)
    segments = sharded_segments(sharded, SegmentCost(1.0, 1.0, 1.0), RANKS)
    check(programs, segments, 1, tied=gradient_sums(sharded))
    codes = lower(sharded.graph, on_mesh(sharded.graph, sharded.mesh))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return ShardedTask(programs, codes, segments, sharded.graph.batch, shardings(sharded), state, batch)
