"""What backward is said to hold at most is what a real backward holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from passes.costs.backward_peak import backward_peak
from passes.costs.costs import cost_graph
from passes.graph.graph import OpGraph
from passes.trace.loss.reduction import with_normalizers
from passes.trace.trace import trace
from tests.support.alive import AliveBytes
from tests.support.matrix import thinned
from tests.unit.passes.costs.test_saved import Batch, gpt2, llama, lora, resnet


class Wide(nn.Module):
    """A head much wider than what is in front of it, as a language model's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4096))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), labels)


def wide() -> tuple[nn.Module, Batch]:
    return Wide(), {"x": torch.randn(8, 16), "labels": torch.arange(8)}


class Branches(nn.Module):
    """One value read three times, sums that hand gradients on, views."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.down(torch.sigmoid(self.gate(x)) * self.up(x)).flip(-1) + x.relu()
        return x.transpose(0, 1).square().sum()


def branches() -> tuple[nn.Module, Batch]:
    return Branches(), {"x": torch.randn(32, 64)}


def measured(graph: OpGraph, model: nn.Module, batch: Batch, *, first: bool) -> int:
    """Run a micro-batch for real, and return what its backward holds beyond what was saved for it.

    ``first``: no micro-batch before it has left gradients.
    """
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    batch = with_normalizers(graph, batch, 1)
    pools = {"parameter": state, "buffer": state, "constant": graph.constants, "batch": batch}
    inputs = [pools[i.kind][i.name] for i in graph.inputs]
    for parameter in model.parameters():
        parameter.grad = None if first else torch.zeros_like(parameter)
    known = [*inputs, *(p.grad for p in model.parameters() if p.grad is not None)]
    with AliveBytes(known) as alive:
        loss = graph.module(*inputs)
        loss = loss[0] if isinstance(loss, tuple) else loss
        held = alive.peak_bytes = alive.current_bytes
        loss.backward()
    return alive.peak_bytes - held


@pytest.mark.parametrize(
    "example",
    thinned([wide, branches, llama, lora, gpt2, resnet], [wide, branches, lora, gpt2, resnet]),
    ids=lambda f: f.__name__,
)
def test_equals_what_a_real_backward_holds(example):
    torch.manual_seed(0)
    model, batch = example()
    graph = trace(model.train(), batch)
    costs = cost_graph(graph)
    size = next(iter(batch.values())).shape[0]
    peak = backward_peak(graph, costs, range(len(graph.ops)), size)
    assert peak.later_bytes == pytest.approx(measured(graph, model, batch, first=False), rel=0.1)
    assert peak.first_bytes == pytest.approx(measured(graph, model, batch, first=True), rel=0.1)
    assert peak.gradient_bytes == sum(p.numel() * p.itemsize for p in model.parameters() if p.requires_grad)
