"""flex_attention on real ranks: by heads, by samples, in a pipeline that computes it again, beside torch's definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cost_models.cluster import ClusterSpec
from partitioner import Workload, partition
from partitioner.models.as_graph import as_graph
from partitioner.verify.verify import verify_plan
from passes.graph.nodes import op_name
from runtime.ranks.launch import WorkerPool

HEADS, KEY_HEADS, WIDTH, POSITIONS = 4, 2, 32, 140


class Block(nn.Module):
    """Attention of grouped heads; scores are bent, and fall with the distance."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.pair, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.register_buffer("slopes", torch.linspace(0.1, 0.4, HEADS))
        self.slopes: Tensor

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return 5 * torch.tanh(value / 5) - self.slopes[h] * (i - j)

        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = (t.unflatten(-1, (KEY_HEADS, -1)).transpose(1, 2) for t in self.pair(x).chunk(2, -1))
        seen = flex_attention(query, key, value, score, mask, enable_gqa=True)
        return x + torch.tanh(self.out(seen.transpose(1, 2).flatten(2)))


class Packed(nn.Module):
    """Two blocks over documents that lie one behind the other in a sample, in other places in each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(20, WIDTH), nn.ModuleList([Block(), Block()])

    def forward(self, tokens: Tensor, document: Tensor) -> Tensor:
        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (document[b, i] == document[b, j])

        mask = create_block_mask(visible, tokens.shape[0], None, POSITIONS, POSITIONS, device=tokens.device)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return x.square().mean()


def workload() -> Workload:
    torch.manual_seed(0)
    lengths = torch.tensor([30, 60, 20, 50, 40, 90, 70, 35]).view(-1, 1)
    return Workload(
        Packed(),
        {"tokens": torch.randint(0, 20, (8, POSITIONS)), "document": torch.arange(POSITIONS) // lengths},
    )


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "feature", "mesh": (2,), "pins": {"*": "column_row"}},
        pytest.param({"strategy": "feature", "mesh": (2,), "pins": {"*": "data"}}, marks=pytest.mark.matrix),
        {"strategy": "layer", "min_stages": 2, "microbatches": 4, "recompute": "full"},
    ],
    ids=["heads", "samples", "stages"],
)
def test_it_is_verified_in_float64(options: dict[str, Any], pool: WorkerPool) -> None:
    work = workload()
    graph = as_graph(work)
    assert [op_name(node) for node in graph.ops].count("flex_attention") == 2
    plan = partition(graph, ClusterSpec.local(2), batch_size=8, **{"strategy": "layer", **options})
    report = verify_plan(plan, work, pool=pool, graph=graph)
    report.raise_if_different()
    assert report.compared["gradient"] >= len(list(work.model.parameters()))
    if "mesh" in options:
        by = "S1" if options["pins"]["*"] == "column_row" else "S0"
        sharding = plan.stages[0].sharding
        assert sharding is not None
        found = [choice for name, choice in sharding.choices.items() if name.startswith("flex_attention")]
        assert [str(choice[0]).split("-> ")[1] for choice in found] == [by] * 2
