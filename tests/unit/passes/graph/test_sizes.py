"""Pass sizes: every integer comes from the shapes of batch inputs."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from torch import fx, nn

from cost_models.errors import InternalError, ModelError
from passes.graph.sizes import canonical_sizes
from passes.graph.verify import verify_graph
from passes.trace.trace import trace
from tests.support.rewritten_graphs import Exported, difference, eager, lowered, run, shuffled_order
from tests.support.traced_models import run as run_traced

aten = torch.ops.aten


def export_two(model: nn.Module, x: torch.Tensor) -> Exported:
    """Dimensions 0 and 1 of ``x`` are dynamic."""
    shapes = {"x": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}}
    program = torch.export.export(model, (x,), strict=False, dynamic_shapes=shapes)
    return Exported(model, program, {})


def sizes_of(gm: fx.GraphModule) -> list[fx.Node]:
    return [
        n
        for n in gm.graph.nodes
        if isinstance(n.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
    ]


class Arithmetic(nn.Module):
    """Sizes of activations: products, divisions with every rounding, remainders, roots, sums of several dynamic sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        both = torch.cat([h, h], 1).flatten(0, 1)
        rows = both.shape[0]
        half = (h.shape[0] * h.shape[1] + 3) // 2
        picked = both[: rows // 2 + rows % 3]
        scaled = picked * (picked.shape[0] ** 0.5) + torch.arange(4) * half
        larger = torch.sym_max(h.shape[0], h.shape[1])
        rounded = math.ceil(h.shape[0] / 2) + math.floor(h.shape[1] / 3) + math.trunc(h.shape[1] * 1.5)
        return (scaled / larger).pow(2).sum() + h.new_zeros(half).sum() + h.new_ones(rounded).sum()


def test_sizes_read_only_batch_inputs_and_compute_the_same() -> None:
    torch.manual_seed(0)
    program = export_two(Arithmetic().double(), torch.randn(3, 5, 4, dtype=torch.float64))
    gm, _ = lowered(program)
    linear = next(node for node in gm.graph.nodes if node.target == aten.linear.default)
    moved = 0
    for node in gm.graph.nodes:  # read the shape of an activation instead, as later passes may
        if node.target == aten.sym_size.int and node.args[0].name == "x":
            linear.append(node)
            node.args = (linear, node.args[1])
            moved += 1
    assert moved
    gm = canonical_sizes(gm, ["x"])
    known = set(sizes_of(gm))
    for node in known:
        assert all(source in known or source.name == "x" for source in node.all_input_nodes), node
    for batch, length in ((3, 5), (2, 7), (6, 4), (5, 2)):
        inputs = {"x": torch.randn(batch, length, 4, dtype=torch.float64)}
        expected = eager(program.model, inputs, lambda loss: loss)
        for seed in range(3):
            found = run(program, gm, inputs, shuffled_order(gm.graph, seed))
            assert difference(found, expected) <= 1e-12


def test_each_expression_is_built_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = x.relu()
            second = x.sigmoid()
            return (
                first.new_ones(first.shape[0] * 2).sum()
                + second.new_ones(second.shape[0] * 2).sum()
                + x.sum()
            )

    program = export_two(Twice(), torch.randn(3, 5, 4))
    gm = canonical_sizes(lowered(program)[0], ["x"])
    assert [node.target for node in sizes_of(gm)] == [aten.sym_size.int, operator.mul]
    assert all(node.meta["val"] is not None for node in sizes_of(gm))


def test_a_graph_without_dynamic_sizes_is_unchanged() -> None:
    program = Exported(nn.ReLU(), torch.export.export(nn.ReLU(), (torch.randn(3),), strict=False), {})
    gm, _ = lowered(program)
    assert str(canonical_sizes(gm, ["input"]).graph) == str(gm.graph)


def test_data_dependent_sizes_are_refused_by_line() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x > 0].sum() + x.sum()

    gm, _ = lowered(export_two(Masked(), torch.randn(3, 5, 4)))
    with pytest.raises(ModelError) as caught:
        canonical_sizes(gm, ["x"])
    assert "test_sizes.py:" in str(caught.value)
    assert "torch.where" in str(caught.value)


def test_a_symbol_that_no_batch_input_has_is_our_own_fault() -> None:
    program = export_two(Arithmetic(), torch.randn(3, 5, 4))
    with pytest.raises(InternalError, match="cannot be read from any batch input"):
        canonical_sizes(lowered(program)[0], [])


class Overwritten(nn.Module):
    """Writes whose out-of-place form has to read the shape of an activation, and a buffer that nothing reads after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.first(x).tanh() * 2
        hidden.view(-1, 4)[:2].mul_(3)
        mean = torch.empty_like(hidden)
        mean.copy_(x.mean(0, keepdim=True))
        return self.last(hidden + mean)


@pytest.mark.parametrize("dynamic", [{}, {"x": [1]}])
def test_a_trace_has_canonical_sizes(dynamic: dict[str, list[int]]) -> None:
    torch.manual_seed(0)
    model = Overwritten().double()
    graph = trace(
        model,
        torch.randn(3, 5, 4, dtype=torch.float64),
        loss_fn=lambda output, _: output.square().mean(),
        dynamic_dims=dynamic,
    )
    verify_graph(graph, after="trace")
    assert [output.name for output in graph.outputs if output.kind == "buffer"] == ["calls"]
    other = torch.randn(4, 7 if dynamic else 5, 4, dtype=torch.float64)
    expected = model(other).square().mean()
    torch.testing.assert_close(run_traced(graph, model, other)[0], expected)
