"""Evaluation in training's blocks: on the same parts, with nothing put together where it does the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partitioner.evaluation.parts import reuse_splits
from partitioner.evaluation.placement import reuse_placement, without_writes
from passes.graph.graph import OpGraph
from passes.graph.verify import verify_graph
from passes.split.split import Split, split_neurons
from passes.trace.trace import trace

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(nn.Module):
    """``other``: evaluation reads the first layer's weight in an op that training does not have."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.drop = nn.Dropout(0.5)
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc2(self.drop(self.norm(torch.relu(self.fc1(x)))))
        return y @ self.fc1.weight.t() if self.other and not self.training else y


def graphs(net: nn.Module) -> tuple[OpGraph, OpGraph, OpGraph, tuple[Split, ...]]:
    """Training, its blocks, evaluation, splits."""
    training = trace(net, (X,), loss_fn=lambda output, _: output.square().mean())
    splits = (Split("linear", -1, (4, 2)),)
    return (
        training,
        split_neurons(training, splits),
        without_writes(trace(net, (X,), training=False)),
        splits,
    )


def run(graph: OpGraph, net: nn.Module) -> Tensor:
    state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    arguments = []
    for given in graph.inputs:
        part = graph.parts.get(given.name)
        whole = X if given.kind == "batch" else state[given.name if part is None else part.whole]
        arguments.append(whole if part is None else part.block.of(whole).clone())
    (output,) = graph.module(*arguments)
    assert isinstance(output, Tensor)
    return output


def placed(blocks: OpGraph, made: OpGraph) -> tuple[OpGraph, dict[str, int]]:
    """Parts and blocks 1 on rank 1."""
    rank_of = {node.name: int(node.name.endswith("_b1")) for node in blocks.ops}
    holders = {name: {int(name.endswith("#1"))} for name in (*made.parameters, *made.buffers)}
    found = reuse_placement(blocks, rank_of, made, ((0,), (1,)), holders)
    ranks = {name: found.segmentation.ranks[s][0] for name, s in found.segmentation.segment_of.items()}
    return found.graph, ranks


def targets(graph: OpGraph) -> set[str]:
    return {str(node.target) for node in graph.ops}


def test_the_same_ops_run_in_the_same_blocks_where_their_parts_are() -> None:
    net = Net(other=False).double()
    training, blocks, evaluation, splits = graphs(net)
    made = reuse_splits(evaluation, training, blocks, splits)
    verify_graph(made, after="reuse_splits")
    assert made.parts == blocks.parts
    assert {part.whole for part in made.parts.values()} >= {"fc1.weight", "norm.running_mean", "fc2.weight"}
    assert targets(made).isdisjoint({"aten.cat.default"})
    graph, ranks = placed(blocks, made)
    assert len(graph) == len(made), "no parameter travels"
    blocks_at = {(name[-2:], rank) for name, rank in ranks.items() if name[-3:-1] == "_b"}
    assert blocks_at == {("b0", 0), ("b1", 1)}
    assert torch.allclose(run(graph, net.eval()), net(X), rtol=1e-12)


def test_what_evaluation_does_otherwise_reads_parts_that_are_put_together() -> None:
    net = Net(other=True).double()
    training, blocks, evaluation, splits = graphs(net)
    made = reuse_splits(evaluation, training, blocks, splits)
    verify_graph(made, after="reuse_splits")
    assert set(made.parts) == set(blocks.parts), "never in both forms"
    graph, _ = placed(blocks, made)
    assert torch.allclose(run(graph, net.eval()), net(X), rtol=1e-12)


def test_where_nothing_is_split_it_stays_itself() -> None:
    training, _, evaluation, _ = graphs(Net(other=False).double())
    assert reuse_splits(evaluation, training, training, ()) is evaluation
