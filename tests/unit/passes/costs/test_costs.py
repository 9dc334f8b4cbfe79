"""Work and seconds of every op."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cost_models.cluster import ClusterSpec
from cost_models.precision import Precision
from passes.costs.costs import GraphCosts, cost_graph
from passes.graph.graph import OpGraph
from passes.graph.signatures import group_by_signature
from passes.trace.trace import trace
from tests.unit.cost_models.stand_in import StandIn


class TwoLayers(nn.Module):
    """Shapes: x [b, 4, 8], hidden [b, 4, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16, bias=False)
        self.second = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        return (self.second(h) + x).pow(2).sum()


@pytest.fixture(scope="module")
def two_layers() -> tuple[OpGraph, GraphCosts]:
    graph = trace(TwoLayers(), {"x": torch.randn(2, 4, 8)})
    return graph, cost_graph(graph)


def _index(costs: GraphCosts, name: str) -> int:
    return costs.ops.index(name)


def test_gradients_summed_in_another_type_cost_a_cast():
    """Per element of a bfloat16 weight: cast 2 + 4 bytes and add 3 · 4, against add 3 · 2."""

    def costed(precision: Precision) -> GraphCosts:
        model, batch = TwoLayers().to(torch.bfloat16), {"x": torch.randn(2, 4, 8, dtype=torch.bfloat16)}
        return cost_graph(trace(model, batch, precision=precision))

    wide, narrow = costed(Precision()), costed(Precision(gradients=torch.bfloat16))
    linear = _index(wide, "linear")
    assert (
        wide.at(4).backward_weight_bytes[linear] - narrow.at(4).backward_weight_bytes[linear] == 12 * 8 * 16
    )
    assert wide.at(4).backward_weight_launches[linear] - narrow.at(4).backward_weight_launches[linear] == 1


def test_a_linear_layer_by_hand(two_layers):
    _, costs = two_layers
    table = costs.at(10)
    first, second = _index(costs, "linear"), _index(costs, "linear_1")
    flops = 2 * 10 * 4 * 8 * 16
    assert table.forward_flops[first] == table.forward_flops[second] == flops
    assert table.backward_input_flops[first] == 0  # x is a batch input: nobody wants its gradient
    assert table.backward_weight_flops[first] == flops
    assert table.backward_input_flops[second] == table.backward_weight_flops[second] == flops
    assert table.forward_bytes[first] == 4 * (10 * 4 * 8 + 8 * 16 + 10 * 4 * 16)
    assert table.output_bytes[first] == 4 * 10 * 4 * 16


def test_accumulating_a_parameters_gradient_is_charged_to_the_op_that_reads_it(two_layers):
    _, costs = two_layers
    first = _index(costs, "linear")
    kernel = 4 * (10 * 4 * 8 + 10 * 4 * 16 + 8 * 16)
    assert costs.at(10).backward_weight_bytes[first] == kernel + 3 * 4 * 8 * 16


def test_work_without_arithmetic_has_no_flops_but_moves_bytes(two_layers):
    _, costs = two_layers
    relu = _index(costs, "relu")
    table = costs.at(3)
    assert table.forward_flops[relu] == 0
    assert table.forward_bytes[relu] == 2 * table.output_bytes[relu]
    assert table.backward_weight_bytes[relu] == 0 < table.backward_input_bytes[relu]


class Broad(nn.Module):
    """One value with three differentiating consumers, and a frozen layer in front."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(x) * self.weight
        return (h.sin() + h.cos() + h.exp()).sum()


def test_gradients_of_several_consumers_are_summed_at_the_producer():
    costs = cost_graph(trace(Broad(), {"x": torch.randn(2, 8)}))
    mul = _index(costs, "mul")
    table = costs.at(100)
    assert table.backward_weight_launches[mul] >= 2
    assert table.backward_weight_bytes[mul] >= 2 * 3 * 100 * 8 * 4
    frozen = _index(costs, "linear")
    assert table.backward_input_flops[frozen] == table.backward_weight_flops[frozen] == 0
    assert costs.saved[frozen] == ()


def test_without_a_gradient_there_is_no_backward():
    model = TwoLayers().requires_grad_(False)
    costs = cost_graph(trace(model, {"x": torch.randn(2, 4, 8)}))
    table = costs.at(4)
    assert table.forward_flops.sum() > 0
    assert not table.backward_input_bytes.any()
    assert not table.backward_weight_bytes.any()
    assert costs.saved_bytes(range(len(costs.ops)), 4) == 0


def _llama(layers: int, **changes: int) -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **{**sizes, "num_key_value_heads": 2, **changes}, num_hidden_layers=layers, use_cache=False
    )
    ids = torch.randint(0, 64, (2, 16))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture(scope="module")
def llama() -> tuple[nn.Module, OpGraph, GraphCosts]:
    model, batch = _llama(3)
    graph = trace(model, batch)
    return model, graph, cost_graph(graph)


def test_flops_of_a_whole_model_equal_the_flop_counters(llama):
    """``FlopCounterMode`` has no formula for the CPU's flash kernel; it counts everything else of the eager model."""
    model, _, costs = llama
    ids = torch.randint(0, 64, (5, 16))
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids, labels=ids.clone()).loss
        forward = counter.get_total_flops()
        loss.backward()
    layers, heads, seq, width = 3, 4, 16, 8
    attention = layers * 4 * 5 * heads * seq * seq * width
    table = costs.at(5)
    assert table.forward_flops.sum() == forward + attention
    backward = table.backward_input_flops.sum() + table.backward_weight_flops.sum()
    assert backward == counter.get_total_flops() - forward + 2.5 * attention


def test_forward_flops_are_two_per_parameter_and_token_plus_attention(llama):
    model, _, costs = llama
    tokens, layers, seq, hidden = 6 * 16, 3, 16, 32
    weights = sum(
        p.numel() for name, p in model.named_parameters() if "embed" not in name and "norm" not in name
    )
    expected = 2 * weights * tokens + layers * 4 * tokens * seq * hidden
    assert costs.at(6).forward_flops.sum() == pytest.approx(expected, rel=1e-2)


def test_equal_layers_share_their_signatures():
    small, large = (group_by_signature(trace(*_llama(n))) for n in (2, 4))
    assert len(large.of) > 1.5 * len(small.of)
    assert len(large.signatures) == len(small.signatures)


@pytest.mark.parametrize("table", [nn.Embedding(10_000, 8), nn.EmbeddingBag(10_000, 8)], ids=["rows", "bags"])
def test_an_embedding_reads_rows_and_not_its_table(table):
    graph = trace(table, (torch.zeros(2, 4, dtype=torch.long),), loss_fn=lambda out, batch: out.sum())
    costs = cost_graph(graph)
    (op,) = (node.name for node in graph.ops if "embedding" in node.name)
    assert 8 * 8 * 4 <= costs.at(2).forward_bytes[_index(costs, op)] < 10_000 * 8 * 4 / 10


class PerSample(nn.Module):
    """Work that grows with the square of the batch: each sample is compared with each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.weight
        return torch.softmax(h @ h.t(), dim=-1).pow(2).sum()


def test_quadratic_growth_is_exact():
    costs = cost_graph(trace(PerSample(), {"x": torch.randn(4, 8)}))
    assert costs._model.direct == ()
    matmul = next(i for i, name in enumerate(costs.ops) if "matmul" in name or name.startswith("mm"))
    for size in (2, 9, 100):
        assert costs.at(size).forward_flops[matmul] == 2 * size * size * 8
    assert costs.at(100).output_bytes[matmul] == 4 * 100 * 100


class Halves(nn.Module):
    """Shapes that are no polynomial of the batch: half of something, rounded down."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.ones((x.shape[0] + 9) // 2, 8)
        return (rows @ self.weight).sum() + x.mean()


def test_what_no_polynomial_fits_is_evaluated_at_each_size():
    graph = trace(Halves(), {"x": torch.randn(4, 8)})
    costs = cost_graph(graph)
    assert costs._model.direct
    for size in (6, 7, 50):
        assert costs.at(size).forward_flops.sum() == 2 * ((size + 9) // 2) * 8 * 8


def test_seconds_add_up_to_the_segment_and_follow_the_device(llama):
    _, _, costs = llama
    every = range(len(costs.ops))
    for kind in ("cpu", "cuda"):
        for device in (StandIn(kind), StandIn(kind, peak=1e12, memory_bandwidth_bytes_per_second=1e12)):
            per_op, whole = costs.seconds(4, device), costs.segment_seconds(every, 4, device)
            assert per_op.forward.sum() == pytest.approx(whole.forward)
            assert per_op.backward_input.sum() == pytest.approx(whole.backward_input)
            assert per_op.backward_weight.sum() == pytest.approx(whole.backward_weight)
    slow = costs.segment_seconds(every, 4, StandIn(launch_overhead_seconds=1e-3))
    assert slow.forward == pytest.approx(1e-3 * costs.at(4).forward_launches.sum())  # bound by launching


def test_equal_devices_share_what_is_computed():
    costs = cost_graph(trace(TwoLayers(), {"x": torch.randn(2, 4, 8)}))
    for device in ClusterSpec.preset("dgx-h100", nodes=2).devices:
        costs.seconds(4, device)
    assert len(costs._phases) == 1


def test_held_bytes_are_a_union_of_saved_sent_and_received(two_layers):
    _, costs = two_layers
    linear, relu, second, add = (_index(costs, n) for n in ("linear", "relu", "linear_1", "add"))
    hidden, row = 10 * 4 * 16 * 4, 10 * 4 * 8 * 4
    front = costs.held_bytes([linear, relu], 10, outputs=["relu"])
    assert front.saved == hidden  # relu keeps its result, which is also what is sent: once
    back = costs.held_bytes([second, add], 10)
    assert back.saved == hidden  # the received buffer, which the second layer keeps as well
    assert back.weight_saved == hidden + row  # its input and its output's gradient
    alone = costs.held_bytes([add], 10)
    assert alone.saved == row  # received and kept for the gradient, though add saves nothing
    assert alone.weight_saved == 0


def test_received_views_are_buffers_of_their_own():
    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            a, b, _ = self.wide(x).chunk(3, dim=-1)
            return (a * b).sum()

    costs = cost_graph(trace(Chunked(), {"x": torch.randn(2, 8)}))
    mul = _index(costs, "mul")
    assert costs.held_bytes([mul], 10).saved == 2 * 10 * 8 * 4  # two thirds of the projection, not all of it
    assert costs.saved_bytes([mul], 10) == 10 * 24 * 4  # one process keeps the base that both views share


def test_a_prediction_grows_with_the_batch(llama):
    _, _, costs = llama
    totals = [costs.saved_bytes(range(len(costs.ops)), size) for size in (1, 2, 4, 8)]
    assert np.all(np.diff(totals) > 0)
    assert totals[3] - totals[2] == 2 * (totals[2] - totals[1])
