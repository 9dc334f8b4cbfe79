"""Rows sorted by expert and put back couple no samples; what reads a place in the order does, and is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partitioner import trace
from passes.graph.nodes import op_name
from passes.shard.couplings import couplings

EXPERTS, CHOICES = 4, 2
Body = Callable[["Mixture", Tensor], Tensor]


class Mixture(nn.Module):
    """A projection, experts, and a body that sends the one through the others: a mean of what each sample gives."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.weights = nn.Parameter(torch.randn(EXPERTS, 8, 8) / 3)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.first(x)).square().mean()


def expert_of(h: Tensor) -> Tensor:
    return h[:, :EXPERTS].argmax(-1)


def there_and_back(m: Mixture, h: Tensor) -> Tensor:
    order = torch.argsort(expert_of(h), stable=True)
    return h[order].tanh()[torch.argsort(order)]


def put_into_an_inverse(m: Mixture, h: Tensor) -> Tensor:
    _, order = expert_of(h).sort()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(h.shape[0])
    return (h[order] * 2)[inverse]


def added_to_their_tokens(m: Mixture, h: Tensor) -> Tensor:
    experts = h[:, :EXPERTS].topk(CHOICES, dim=-1).indices.reshape(-1)
    order = torch.argsort(experts, stable=True)
    token = order // CHOICES
    return torch.zeros_like(h).index_add(0, token, h[token].sin())


def scattered_to_their_tokens(m: Mixture, h: Tensor) -> Tensor:
    experts = h[:, :EXPERTS].topk(CHOICES, dim=-1).indices.view(-1)
    token = (torch.argsort(experts, stable=True) // CHOICES).reshape(-1, 1).expand(-1, 8)
    return torch.zeros_like(h).scatter_add(0, token, torch.gather(h, 0, token).sin())


def grouped(m: Mixture, h: Tensor) -> Tensor:
    keys, order = expert_of(h).sort()
    ends = torch.histc(keys.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    made = torch._grouped_mm(h[order].bfloat16(), m.weights.bfloat16(), ends).float()
    return made[torch.argsort(order)]


def grouped_by_counts_of_the_unsorted(m: Mixture, h: Tensor) -> Tensor:
    expert = expert_of(h)
    ends = torch.histc(expert.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).int()
    order = torch.argsort(expert, stable=True)
    made = torch._grouped_mm(h[order].bfloat16(), m.weights.bfloat16(), ends).float()
    return made[torch.argsort(order)]


def only_summed(m: Mixture, h: Tensor) -> Tensor:
    return h[torch.argsort(h[:, 0])] * 3


APART = (
    there_and_back,
    put_into_an_inverse,
    added_to_their_tokens,
    scattered_to_their_tokens,
    grouped,
    grouped_by_counts_of_the_unsorted,
    only_summed,
)


def first_of_each_half(m: Mixture, h: Tensor) -> Tensor:
    """A capacity: rows behind the first two are dropped."""
    return h[torch.argsort(h[:, 0])][:2]


def weighted_by_place(m: Mixture, h: Tensor) -> Tensor:
    return h[torch.argsort(h[:, 0])] * torch.arange(h.shape[0]).unsqueeze(-1)


def numbers_as_values(m: Mixture, h: Tensor) -> Tensor:
    return h * torch.argsort(h[:, 0]).unsqueeze(-1)


def left_in_order(m: Mixture, h: Tensor) -> Tensor:
    return h * h[torch.argsort(h[:, 0])]


def back_by_another_order(m: Mixture, h: Tensor) -> Tensor:
    rows = h[torch.argsort(h[:, 0])]
    return h * rows[torch.argsort(torch.argsort(h[:, 1]))]


def put_to_others(m: Mixture, h: Tensor) -> Tensor:
    rows = h[torch.argsort(h[:, 0])]
    return h + torch.zeros_like(h).index_add(0, torch.argsort(h[:, 1]), rows)


def grouped_by_another_key(m: Mixture, h: Tensor) -> Tensor:
    other = h[:, EXPERTS:].argmax(
        -1
    )  # four columns: every row is in a group, or its product would be anything
    ends = torch.histc(other.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).int()
    order = torch.argsort(expert_of(h), stable=True)
    made = torch._grouped_mm(h[order].bfloat16(), m.weights.bfloat16(), ends).float()
    return made[torch.argsort(order)]


def balanced(m: Mixture, h: Tensor) -> Tensor:
    """The auxiliary loss of mixtures: a product of two means over the batch."""
    share = torch.histc(expert_of(h).float(), EXPERTS, 0, EXPERTS - 1) / h.shape[0]
    return h.softmax(-1).mean(0)[:EXPERTS] * share


COUPLED = {
    first_of_each_half: "slice",
    weighted_by_place: "mul",
    numbers_as_values: "mul",
    left_in_order: "mul",
    back_by_another_order: "index",
    put_to_others: "index_add",
    grouped_by_another_key: "_grouped_mm",
    balanced: "mul",
}


def halves(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """The loss of the whole batch, and the mean of its halves' losses."""
    with torch.no_grad():
        whole, parts = model(x), [model(part) for part in x.chunk(2)]
    return float(whole), float(sum(parts) / 2)


def batch() -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("body", APART, ids=lambda body: body.__name__)
def test_rows_in_another_order_couple_nothing(body: Body) -> None:
    model = Mixture(body)
    assert couplings(trace(model, (batch(),))) == ()
    whole, parts = halves(model, batch())
    assert whole == pytest.approx(parts, rel=1e-5)


@pytest.mark.parametrize("body", COUPLED, ids=lambda body: body.__name__)
def test_a_place_in_the_order_couples(body: Body) -> None:
    model = Mixture(body)
    graph = trace(model, (batch(),))
    (found,) = couplings(graph)
    assert op_name(graph.nodes[found.op]) == COUPLED[body]
    whole, parts = halves(model, batch())
    assert whole != pytest.approx(parts, rel=1e-3)
