"""126 equal layers on 16 groups: 126 does not divide by 16, and what lies before and behind the layers takes time too."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from partitioner.models.as_graph import as_graph
from partitioner.models.load import load_workload
from passes.costs.costs import costs_of
from passes.graph.blocks import block_of
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.search.hybrid.search import GroupSearch
from passes.search.hybrid.solve import SolvedOption
from passes.search.hybrid.survey import survey
from passes.trace.trace import trace
from tests.unit.passes.search.hybrid.test_directions import cluster

LAYERS, GROUPS = 126, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())  # type: ignore[no-any-return]


class Deep(nn.Module):
    """A head as dear as a layer; what is in front has no gradient to make of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(256, 32), nn.Linear(32, 256)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()  # type: ignore[no-any-return]


def layers_of(graph: OpGraph, search: GroupSearch, solved: SolvedOption) -> list[int]:
    """Count the layers of each stage."""
    candidate = search.decode(solved, one_queue=False).candidate
    stage_of_block = {
        block: candidate.stage_of[op] for op, block in block_of(graph).items() if op in candidate.stage_of
    }
    counts = Counter(stage for block, stage in stage_of_block.items() if "layers." in block)
    return [counts[stage] for stage in range(len(candidate.groups))]


def test_first_and_last_stage_get_fewer_layers() -> None:
    """128 equal pieces of work: 14 stages of 8 layers, and two of 7 beside the embedding and the head."""
    torch.manual_seed(0)
    graph = trace(Deep(), {"x": torch.randn(2, 256)}, loss_reduction="mean")
    machine = cluster(speeds=(1.0,) * GROUPS, each=1)
    search = GroupSearch(graph, costs_of(graph, machine), machine, Job(32), microbatches=32, schedule="1f1b")
    surveyed = survey(search, math.inf)
    best = surveyed.solved[0]
    assert best.option.groups == GROUPS
    assert layers_of(graph, search, best) == [7, *[8] * 14, 7]
    assert surveyed.bound_seconds <= best.seconds <= surveyed.bound_seconds * 1.01


@pytest.mark.matrix
def test_the_last_stages_of_llama_405b_get_more_layers_and_compute_fewer_of_them_again() -> None:
    """On 128 devices: the stage n places from the end holds the activations of n micro-batches more than the last."""
    graph = as_graph(load_workload("llama-405b", settings={}, seq=8192, dtype="bfloat16"))
    machine = ClusterSpec.preset("dgx-h100", GROUPS)
    search = GroupSearch(
        graph, costs_of(graph, machine), machine, Job(128), microbatches=128, schedule="1f1b"
    )
    (option,) = (own for own in search.options() if own.groups == GROUPS and own.runs[0].tensor == 8)
    solved = search.solve(option, math.inf)
    assert solved is not None
    layers, again = (
        layers_of(graph, search, solved),
        [sum(step.again for step in stage) for stage in solved.steps],
    )
    assert sum(layers) == LAYERS
    assert len(set(layers)) > 1
    assert sum(layers[:4]) < sum(layers[-4:])
    assert sum(again[:4]) > sum(again[-4:])
