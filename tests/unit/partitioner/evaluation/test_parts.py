"""A graph of whole tensors reads parts: the same numbers, whatever the blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cost_models.errors import InternalError
from partitioner.evaluation.parts import read_parts
from partitioner.evaluation.placement import reuse_placement, without_writes
from passes.graph.graph import OpGraph
from passes.graph.verify import verify_graph
from passes.trace.trace import trace
from runtime.mesh.sharding import Block
from runtime.state.rank_state import TensorPart
from tests.support.split_model import batch, model, traced, workload
from tests.support.split_model import split as split_graph

Cut = list[tuple[tuple[int, ...], tuple[int, ...]]]
ROWS: Cut = [((0, 0), (1, 4)), ((1, 0), (2, 4)), ((3, 0), (1, 4))]
GRID: Cut = [((0, 0), (3, 1)), ((0, 1), (3, 3)), ((3, 0), (1, 1)), ((3, 1), (1, 3))]
COLUMNS_THEN_ROWS: Cut = [((2, 0), (2, 3)), ((0, 3), (1, 1)), ((0, 0), (2, 3)), ((1, 3), (3, 1))]
WINDMILL: Cut = [((0, 0), (1, 3)), ((0, 3), (3, 1)), ((3, 1), (1, 3)), ((1, 0), (3, 1)), ((1, 1), (2, 2))]
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(nn.Module):
    """Returns a parameter and a buffer as they are, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.norm(self.first(x))
        return {
            "y": y,
            "weight": self.first.weight,
            "mean": self.norm.running_mean,
            "again": y @ self.first.weight,
        }


def evaluation(net: nn.Module) -> OpGraph:
    return without_writes(trace(net, (X,), training=False))


def parts_of(name: str, cut: Cut) -> dict[str, TensorPart]:
    return {f"{name}#{i}": TensorPart(name, Block(*block)) for i, block in enumerate(cut)}


def run(graph: OpGraph, net: nn.Module, x: Tensor) -> list[Tensor]:
    state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    arguments = []
    for given in graph.inputs:
        part = graph.parts.get(given.name)
        whole = x if given.kind == "batch" else state[given.name if part is None else part.whole]
        arguments.append(whole if part is None else part.block.of(whole).clone())
    return list(graph.module(*arguments))


@pytest.mark.parametrize("cut", [ROWS, GRID, COLUMNS_THEN_ROWS], ids=["rows", "grid", "columns then rows"])
def test_the_same_numbers(cut: Cut) -> None:
    net = Net().double().eval()
    graph = evaluation(net)
    parts = {**parts_of("first.weight", cut), **parts_of("norm.running_mean", [((0,), (3,)), ((3,), (1,))])}
    read = read_parts(graph, {**parts, **parts_of("elsewhere", ROWS)})
    verify_graph(read, after="read_parts")
    assert read.parts == parts
    assert set(parts) <= {*read.parameters, *read.buffers}
    assert {"first.weight", "norm.running_mean"}.isdisjoint({*read.parameters, *read.buffers})
    for name, part in parts.items():
        spec = read.parameters.get(name) or read.buffers[name]
        assert (spec.name, spec.shape) == (name, part.block.shape)
    assert [o.name for o in read.outputs] == [o.name for o in graph.outputs]
    for found, expected in zip(run(read, net, X), run(graph, net, X), strict=True):
        assert torch.equal(found, expected)


def test_a_graph_that_reads_no_parts_stays_itself() -> None:
    graph = evaluation(Net().double())
    assert read_parts(graph, {}) is graph
    assert read_parts(graph, parts_of("elsewhere", ROWS)) is graph


def test_blocks_that_no_line_separates_are_refused() -> None:
    with pytest.raises(InternalError, match=r"first\.weight lie in no rows"):
        read_parts(evaluation(Net().double()), parts_of("first.weight", WINDMILL))


def test_parts_travel_to_whoever_reads_them() -> None:
    """The layer runs where its first block is trained; no rank holds all of its weight."""
    made = workload()
    split = split_graph(traced(made))
    whole = without_writes(trace(made.model, (batch()["x"],), training=False))
    read = read_parts(whole, split.parts)
    rank_of = {node.name: int("_b1" in node.name) for node in split.ops}
    holders = {name: {int(name.endswith("#1"))} for name in (*read.parameters, *read.buffers)}
    placed = reuse_placement(split, rank_of, read, ((0,), (1,)), holders)
    assert len(placed.graph.ops) > len(read.ops), "a parameter travels as a value"
    (output,) = run(placed.graph, model(), batch()["x"])
    assert torch.equal(output, model().eval()(batch()["x"]))
