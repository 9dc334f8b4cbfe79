"""Messages of a plain MLP per micro-batch, one per pair of devices that talk, against the closed forms for a full mesh.

L layers                                 messages, forward and backward
a layer per device                       2 (L - 1)
every layer cut into F parts             2 (L - 1) F (F - 1)

A collective counts as what it is made of when every device sends to every other one straight: an all-gather, a
reduce-scatter and an all-to-all are F (F - 1) messages, an all-reduce is a reduce-scatter and an all-gather.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from partitioner import Plan, partition
from partitioner.record.rebuild import plan_programs
from passes.graph.graph import OpGraph
from passes.trace.trace import trace
from runtime.program.program import Send

WIDTH = 64


class Plain(nn.Module):
    """Linear layers with a non-linear function between them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(torch.relu(x) if number else x)
        return nn.functional.mse_loss(x, y)


@cache
def graph_of(layers: int) -> OpGraph:
    return trace(Plain(layers), {name: torch.randn(4, WIDTH) for name in ("x", "y")})


def messages(plan: Plan) -> int:
    """Inside the one stage of a feature-wise plan, per micro-batch."""
    (stage,) = plan.stages
    assert stage.sharding is not None
    parts = len(stage.devices)
    each = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
    return sum(each[item.kind] for item in stage.sharding.collectives) * parts * (parts - 1)


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("layers", [2, 3, 4, 5])
def test_layers_cut_into_parts(layers: int, parts: int) -> None:
    plan = partition(
        graph_of(layers),
        ClusterSpec.parse(f"A100-40GB:{parts}"),
        batch_size=16,
        microbatches=1,
        strategy="feature",
        mesh=(parts,),
        pins={"*": "column_row"},
    )
    (stage,) = plan.stages
    assert stage.sharding is not None
    cut = [name for name, layout in stage.sharding.stored.items() if layout.startswith("S")]
    assert {f"layers.{n}.weight" for n in range(layers)} <= set(cut), "every matrix is cut"
    assert 0 < messages(plan) <= 2 * (layers - 1) * parts * (parts - 1)


@pytest.mark.parametrize("layers", [2, 3, 5])
def test_a_layer_per_device(layers: int) -> None:
    plan = partition(
        graph_of(layers),
        ClusterSpec.parse(f"A100-40GB:{layers}"),
        batch_size=16,
        microbatches=4,
        pins={f"layers.{n}": n for n in range(layers)},
        schedule="1f1b",
        strategy="layer",
    )
    sends = [i for program in plan_programs(plan) for i in program.instructions if isinstance(i, Send)]
    assert len(plan.stages) == layers
    assert len(sends) <= 4 * 2 * (layers - 1)
    assert plan.prediction.messages == len(sends)
