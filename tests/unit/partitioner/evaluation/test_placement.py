from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from partitioner.evaluation.placed import inference_programs, inference_segments
from partitioner.evaluation.placement import reuse_placement, without_writes
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.graph.verify import verify_graph
from passes.lower.lower import crossing_values, lower
from passes.lower.placed_graph import PlacedGraph
from passes.lower.segment import segment_edges
from passes.trace.trace import trace
from runtime.check.check import check

BATCH = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(nn.Module):
    """``order``: in which order evaluation calls what training calls first, norm, drop, last."""

    def __init__(self, order: str = "same") -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "reversed" and not self.training:
            return self.first(self.norm(self.last(x)))
        if self.order == "merged" and not self.training:
            return nn.functional.linear(x, self.last.weight @ self.first.weight) + self.norm.bias
        y = self.last(self.drop(self.norm(self.first(x))))
        return y if self.training else y.softmax(-1)


def traces(model: nn.Module) -> tuple[OpGraph, dict[str, int], OpGraph]:
    training = trace(model, (BATCH,), loss_fn=lambda output, _: output.sum())
    evaluation = without_writes(trace(model, (BATCH,), training=False))
    stage_of = {node.name: int(node.meta["module_path"] in ("last", "")) for node in training.ops}
    return training, stage_of, evaluation


def holders(graph: OpGraph) -> dict[str, set[int]]:
    names = (*graph.parameters, *graph.buffers)
    return {name: {int(name.startswith("last"))} for name in names}


def reused(model: nn.Module, held: Mapping[str, set[int]] | None = None) -> PlacedGraph:
    training, stage_of, evaluation = traces(model)
    return reuse_placement(training, stage_of, evaluation, ((0,), (1,)), held or holders(evaluation))


def run(made: PlacedGraph, model: nn.Module, held: Mapping[str, set[int]]) -> Tensor:
    """The segments, one after another; every rank may read only what it holds."""
    graph, segmentation = made.graph, made.segmentation
    state = dict((*model.named_parameters(), *model.named_buffers()))
    made_values: dict[str, Tensor] = {}
    for index, code in lower(graph, segmentation).items():
        rank = segmentation.ranks[index][0]
        arguments = []
        for source in code.inputs:
            if source.kind in ("parameter", "buffer"):
                assert rank in held[source.name], f"segment {index} on rank {rank} reads {source.name}"
                arguments.append(state[source.name])
            else:
                arguments.append(made_values[source.name] if source.kind == "value" else BATCH)
        for output, tensor in zip(code.outputs, code.module(*arguments), strict=True):
            made_values[output.name] = tensor
    return made_values["output"]


def agrees(model: nn.Module, held: Mapping[str, set[int]] | None = None) -> PlacedGraph:
    """Placed, proved free of deadlock, and computes what the model computes."""
    made = reused(model.double(), held)
    verify_graph(made.graph, "reuse_placement")
    segments = inference_segments(made.graph, made.segmentation, {}, ClusterSpec.local(2), 2, 1e-6)
    check(inference_programs(segments, ClusterSpec.local(2), 3), segments, 3, training=False)
    expected = model.eval()(BATCH)
    found = run(made, model, held or holders(made.graph))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    return made


def test_evaluation_runs_where_training_was_placed() -> None:
    made = agrees(Net())
    placed = made.segmentation.segment_of
    by_module = {made.graph.nodes[name].meta["module_path"]: stage for name, stage in placed.items()}
    assert by_module["first"] == by_module["norm"] == 0
    assert by_module["last"] == by_module[""] == 1, "softmax at the root follows its input"
    assert made.segmentation.ranks == ((0,), (1,))


def test_another_order_of_modules_lets_values_travel_back() -> None:
    made = agrees(Net("reversed"))
    assert made.segmentation.ranks == ((1,), (0,)), "last, then norm and first"
    edges = segment_edges(made.graph, made.segmentation.segment_of)
    assert edges == {(0, 1)}


def test_an_op_that_reads_parameters_of_two_ranks_gets_one_of_them_as_a_value() -> None:
    model = Net("merged")
    made = agrees(model)
    crossing = {
        made.graph.input_of[made.graph.nodes[name].all_input_nodes[0].name].name
        for name in crossing_values(made.graph, made.segmentation)
        if made.graph.nodes[name].target is torch.ops.aten.alias.default
    }
    assert crossing == {"first.weight"} or crossing == {"last.weight"}


class Table(nn.Module):
    """In training every stage reads ``table``; evaluation has another reader of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x * self.table.cos()) if self.training else self.first(x)
        return self.last(y) if self.training else self.last(y) * self.table.cos()


def test_a_cheap_op_runs_where_its_buffer_is_held() -> None:
    model = Table()
    held = {"table": {0}, "first.weight": {0}, "first.bias": {0}, "last.weight": {1}, "last.bias": {1}}
    made = agrees(model, held)
    cheap = recomputed_ops(made.graph)
    assert cheap, "the cosine of the table is cheap"
    assert not made.segmentation.recomputed & cheap, "but rank 1 has no table to recompute it from"


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y = nn.functional.batch_norm(
            self.linear(x), self.norm.running_mean, self.norm.running_var, training=True, momentum=0.5
        )
        return y + self.calls


def test_an_evaluation_graph_writes_no_buffer() -> None:
    model = Counting().double()
    graph = without_writes(trace(model, (BATCH,), training=False))
    assert [output.kind for output in graph.outputs] == ["output"]
    verify_graph(graph, "without_writes")
    state = dict((*model.named_parameters(), *model.named_buffers()))
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    found = graph.module(*(BATCH if i.kind == "batch" else state[i.name] for i in graph.inputs))[0]
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    torch.testing.assert_close(found, model.eval()(BATCH), rtol=1e-12, atol=1e-12)
