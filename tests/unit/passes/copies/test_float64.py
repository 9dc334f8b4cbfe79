"""A model in float64: eager code and its graph compute the same numbers, whatever in them has a type of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner.models.workload import Workload
from passes.copies.copied_module import copied_module
from passes.copies.float64 import Float64, code_in_float64, in_float64, wide, widen_module
from passes.fidelity.agree import difference
from passes.fidelity.steps import EagerSubject, eager_step, graph_step
from passes.graph.verify import verify_graph
from passes.trace.trace import trace
from runtime.ops.grouped import GROUPED, grouped_mm

OFFSETS = torch.tensor([3, 3, 8, 16], dtype=torch.int32)
"""Ends of four groups, of which one is empty."""
WIDTH = 8
WEIGHTS = torch.tensor([0.3, 1.7, 9.1])


class Scaled(nn.Module):
    """A layer between two numbers that forward makes tensors of; three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x * torch.tensor(3**0.5, dtype=x.dtype))
        return y * x.new_tensor([0.1, 0.2, 0.3])


def weighted(output: Tensor, batch: Any) -> Tensor:
    """Weigh classes by a tensor of this module, in its own type, normalized here."""
    return F.cross_entropy(output, batch["y"], weight=WEIGHTS / WEIGHTS.sum())


class Criterion(nn.Module):
    """A loss function with weights in a buffer; no part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", WEIGHTS.clone())
        self.weights: Tensor

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(torch.cat([output, output]), torch.cat([batch["y"]] * 2), self.weights)


class Experts(nn.Module):
    """Rows in groups, each multiplied by a matrix of its own, in the one type that traces."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, 8, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(1, 5, dtype=torch.int32) * (x.shape[0] // 4)
        y: Tensor = F.grouped_mm(x, self.weight, offs=ends)
        return y[:, :3].float()


CASES: dict[str, Callable[[], Workload]] = {
    "numbers made tensors": lambda: workload(Scaled(), weighted),
    "numbers made tensors, of 16 bits": lambda: workload(Scaled().bfloat16(), squared),
    "a loss function that is a module": lambda: workload(Scaled(), Criterion()),
    "limits of its type": lambda: workload(Limited(), squared),
    "limits of its type, of 16 bits": lambda: workload(Limited().bfloat16(), squared),
    "grouped products": lambda: workload(Experts(), weighted),
}


class Limited(nn.Module):
    """A norm that adds the least spacing of its type, and a mask of its lowest number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        limits = torch.finfo(h.dtype)
        h = 1e-3 * h
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + limits.eps)
        return (h > 0).to(h.dtype) * limits.min * 1e-38 + h


def squared(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def workload(model: nn.Module, loss_fn: Any) -> Workload:
    x = torch.randn(8, WIDTH).to(next(model.parameters()).dtype)
    return Workload(model, {"x": x, "y": torch.randint(0, 3, (8,))}, loss_fn)


@pytest.mark.parametrize("case", CASES)
def test_eager_code_and_its_graph_agree_to_rounding_of_float64(case: str) -> None:
    torch.manual_seed(0)
    given = CASES[case]()
    graph = trace(given.model, given.example_inputs, loss_fn=given.loss_fn)
    double = in_float64(graph)
    verify_graph(double, after="float64")
    batch = {name: wide(leaf) for name, leaf in given.example_inputs.items()}
    subject = EagerSubject(widen_module(copied_module(given.model)), batch, batch, given.loss_fn)
    with code_in_float64(graph):
        expected = eager_step(subject)
        found = graph_step(double, subject, wide)
    assert {gradient.dtype for gradient in expected.gradients.values()} == {torch.float64}
    assert difference(expected, found, 1e-14) == ""


def test_tensors_that_code_changes_or_watches_are_its_own() -> None:
    kept, seen = torch.zeros(2), []
    with Float64():
        kept.add_(torch.ones(2, dtype=torch.float64))
        kept[0] = 5.0
        torch.add(kept, 1, out=kept)
        kept.requires_grad_().register_hook(seen.append)
        (kept * torch.ones(2, dtype=torch.float64)).sum().backward()
    assert kept.dtype == torch.float32
    assert kept.tolist() == [6.0, 2.0]
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("left", "right", "groups"),
    [((16, 4), (4, 4, 8), True), ((4, 4, 8), (8, 16), True), ((4, 16), (16, 8), True), ((4, 4, 8), (4, 8, 4), False)],
    ids=["rows", "columns", "inner", "batches"],
)  # fmt: skip
def test_products_group_by_group_are_torchs_own(
    left: tuple[int, ...], right: tuple[int, ...], groups: bool
) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(left, requires_grad=True), torch.randn(right, requires_grad=True)
    assert torch._grouped_mm in GROUPED
    found, expected = (op(a, b, OFFSETS if groups else None) for op in (grouped_mm, torch._grouped_mm))
    torch.testing.assert_close(found, expected)
    factor = torch.randn(found.shape)
    own, wanted = (torch.autograd.grad((product * factor).sum(), (a, b)) for product in (found, expected))
    torch.testing.assert_close(own, wanted)


def test_what_is_in_no_group_is_zero() -> None:
    assert (
        grouped_mm(torch.ones(18, 4), torch.ones(4, 4, 8), OFFSETS).sum(1).tolist() == [32.0] * 16 + [0.0] * 2
    )
    assert (
        grouped_mm(torch.ones(4, 4, 8), torch.ones(8, 18), OFFSETS).sum(0).tolist() == [32.0] * 16 + [0.0] * 2
    )
