"""Convolutions, pools and unfolded windows in blocks of their pixels: each block reads what is under its windows."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.graph.graph import OpGraph
from passes.split.split import Split, split_neurons
from tests.unit.passes.split.harness import check, ops, traced

aten = torch.ops.aten


class Layer(nn.Module):
    """``before``, the layer under test, and something uneven after it."""

    def __init__(self, layer: Callable[[Tensor], Tensor], channels: int = 2) -> None:
        super().__init__()
        self.before = nn.Conv2d(channels, channels, 1)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(torch.tanh(self.before(x)))
        weights = torch.arange(1.0, y[0].numel() + 1, dtype=y.dtype).reshape(y.shape[1:])
        return ((y * weights) ** 2).mean()


LAYERS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "conv": lambda: nn.Conv2d(2, 3, 3, padding=1),
    "conv stride": lambda: nn.Conv2d(2, 3, (4, 3), stride=(3, 1), padding=(2, 0)),
    "conv dilation": lambda: nn.Conv2d(2, 3, 3, padding=2, dilation=2, bias=False),
    "conv same": lambda: nn.Conv2d(2, 3, (5, 3), padding="same"),
    "conv valid": lambda: nn.Conv2d(2, 3, 4, padding="valid"),
    "conv even same": lambda: nn.Conv2d(2, 3, 4, padding="same"),
    "depthwise": lambda: nn.Conv2d(2, 4, 3, padding=1, groups=2),
    "max": lambda: nn.MaxPool2d(3, 2, padding=1),
    "max ceil": lambda: nn.MaxPool2d(3, 2, padding=1, ceil_mode=True, dilation=1),
    "max dilation": lambda: nn.MaxPool2d(2, 1, dilation=3),
    "average": lambda: nn.AvgPool2d(3, 2, padding=1),
    "average ceil": lambda: nn.AvgPool2d(4, 2, ceil_mode=True),
    "average uncounted": lambda: nn.AvgPool2d(3, 2, padding=1, count_include_pad=False),
    "average by 5": lambda: nn.AvgPool2d((3, 2), 2, padding=(0, 1), divisor_override=5),
    "pad": lambda: lambda x: F.pad(x, (1, 2, 3, 0), value=0.5),
    "reflect": lambda: lambda x: F.pad(x, (1, 2, 3, 0), mode="reflect"),
    "unfold": lambda: lambda x: x.unfold(2, 3, 2).unfold(3, 2, 1),
    "columns": lambda: nn.Unfold((3, 2), padding=(1, 0), stride=(2, 1)),
    "transposed": lambda: nn.ConvTranspose2d(2, 3, 3, stride=2),
    "adaptive": lambda: nn.AdaptiveAvgPool2d((3, 2)),
}
WHOLE = {"conv even same", "average ceil", "average uncounted", "reflect", "transposed", "adaptive"}
"""What windows do not describe: computed whole, the blocks are slices of it."""


def last(graph: OpGraph) -> str:
    """The op under test: what its product with the weights reads."""
    (product,) = (n for n in graph.ops if n.target is aten.mul.Tensor)
    return str(product.args[0])


@pytest.mark.parametrize("name", LAYERS)
def test_layers_in_blocks_of_pixels(name: str) -> None:
    torch.manual_seed(0)
    graph, state, leaves = traced(Layer(LAYERS[name]()), {"x": torch.randn(2, 2, 9, 7)})
    op = last(graph)
    sizes = tuple(graph.nodes[op].meta["val"].shape)
    in_blocks = []
    for dim in range(2, len(sizes)):
        first = sizes[dim] // 2 if dim == 2 else 1
        made = check(graph, [Split(op, dim, (first, sizes[dim] - first))], state, leaves)
        in_blocks.append(op not in made.nodes)
    assert any(in_blocks) == (name not in WHOLE)
    # and along with the blocks of what is before: pushed on
    before = check(graph, [Split("tanh", 2, (2, 3, 4))], state, leaves)
    check(graph, [Split("tanh", 2, (2, 3, 4)), Split(op, 2, (sizes[2] - 1, 1))], state, leaves)
    assert (op not in before.nodes) == (name not in WHOLE)


class Net(nn.Module):
    """Convolutions, pools, a spatial mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 1), nn.GELU(), nn.AvgPool2d(2), nn.Conv2d(6, 3, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).mean((2, 3)).pow(2).sum()
        return loss


def test_a_network_in_stripes_exchanges_borders() -> None:
    torch.manual_seed(0)
    graph, state, leaves = traced(Net(), {"x": torch.randn(2, 1, 16, 8)})
    made = check(graph, [Split("conv2d", 2, (5, 6, 5))], state, leaves)
    assert "mean_sum" in made.nodes
    # A cat of a block is of itself and of one row of each neighbour.
    for name in ops(made, aten.cat.default):
        rows = [source.meta["val"].shape[2] for source in made.nodes[name].args[0]]
        assert sorted(rows)[:-1] in ([1], [1, 1])
    assert not any(name.endswith("_whole") for name in made.nodes)


class LocallyConnected(nn.Module):
    """Three layers of windows with weights of their own at each location, in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(n, 3, 2, 2)) for n in (14, 12, 10))
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(2, n)) for n in (14, 12, 10))

    def forward(self, x: Tensor) -> Tensor:
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            windows = x.unfold(2, 3, 1)
            if layer == 0:
                y = torch.einsum("bclw,lwoc->bol", windows, weight)
            elif layer == 1:
                columns = windows.permute(2, 0, 3, 1).flatten(2)
                y = torch.bmm(columns, weight.transpose(2, 3).flatten(1, 2)).permute(1, 2, 0)
            else:
                y = (windows[:, None] * weight.permute(2, 3, 0, 1)).sum((2, 4))
            x = torch.tanh(y + bias)
        return x.pow(2).mean()


def test_a_locally_connected_network_by_location() -> None:
    torch.manual_seed(0)
    graph, state, leaves = traced(LocallyConnected(), {"x": torch.randn(2, 2, 16)})
    made = check(graph, [Split("unfold", 2, (5, 4, 5))], state, leaves)
    assert set(made.parameters) == {
        f"{kind}.{layer}#{k}"
        for kind, layer, k in itertools.product(("weights", "biases"), range(3), range(3))
    }
    assert not any(name.endswith("_whole") for name in made.nodes)
    for name in ops(made, aten.cat.default):  # two locations of a neighbour at most
        widths = [source.meta["val"].shape[2] for source in made.nodes[name].args[0]]
        assert len(widths) <= 3
        assert sum(widths) - max(widths) <= 2


def test_a_block_of_nothing_but_border_is_put_together() -> None:
    """Two rows of padding above: the first output reads no pixel at all."""
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, (2, 1), padding=(2, 0))
    graph, state, leaves = traced(Layer(layer), {"x": torch.randn(2, 2, 4, 2)})
    made = split_neurons(graph, [Split(last(graph), 2, (1, 6))])
    assert last(graph) in made.nodes
    check(graph, [Split(last(graph), 2, (1, 6))], state, leaves)
