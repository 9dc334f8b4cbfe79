"""Copies of a model share what the model shares, and share nothing with it; so do conversions to float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from passes.copies.copied_module import copied_module
from passes.copies.float64 import widen_module


class Sharing(nn.Module):
    mirror: Tensor
    row: Tensor
    table: Tensor
    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.r = nn.Linear(4, 4), nn.Linear(4, 4), nn.LSTM(4, 4)
        self.register_buffer("mirror", self.a.weight.data[:2])
        self.register_buffer("row", self.b.weight[3])
        self.register_buffer("table", torch.zeros(6, 4))
        self.register_buffer("rows", self.table[2:4], persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.plain = self.a.weight.detach()[1]
        self.carries = self.a.weight[3]
        self.kept = [self.b.weight.detach()[2:], self.a.weight, {"bias": self.a.bias.data}]


def widened_copy(model: nn.Module) -> nn.Module:
    return widen_module(copied_module(model), "cpu")


@pytest.mark.parametrize(("copied", "dtype"), [(copied_module, torch.float32), (widened_copy, torch.float64)])
def test_views_follow_their_owners_in_the_copy(
    copied: Callable[[nn.Module], nn.Module], dtype: torch.dtype
) -> None:
    model = Sharing()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copy = copied(model)
    assert isinstance(copy, Sharing)
    detached, parameter, nested = copy.kept
    assert isinstance(detached, Tensor)
    assert isinstance(nested, dict)
    with torch.no_grad():
        copy.a.weight.fill_(7.0)
        copy.a.bias.fill_(6.0)
        copy.b.weight.fill_(5.0)
        copy.table.fill_(4.0)
    for view, value in (
        (copy.mirror, 7.0), (copy.plain, 7.0), (copy.carries, 7.0), (nested["bias"], 6.0),
        (copy.row, 5.0), (detached, 5.0), (copy.rows, 4.0),
    ):  # fmt: skip
        assert view.dtype == dtype
        assert (view == value).all()
    assert parameter is copy.a.weight
    assert copy.r._flat_weights[0] is copy.r.weight_ih_l0
    assert copy.get_buffer("count").dtype == torch.int64
    (copy.carries.sum() + copy.row.sum()).backward()
    assert copy.a.weight.grad is not None
    assert copy.a.weight.grad[3].sum() == 4.0
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


class Coded(nn.Parameter):
    """A parameter that is made in a way of its own, and carries a number."""

    group: int

    def __new__(cls, data: Tensor, group: int) -> Coded:
        self: Coded = torch.Tensor._make_subclass(cls, data, False)
        self.group = group
        return self


def test_parameters_keep_their_class_and_attributes() -> None:
    model = nn.Linear(4, 4)
    model.codes = Coded(torch.arange(4, dtype=torch.uint8), 2)
    model.bias.decays = False  # type: ignore[attr-defined]
    copy = copied_module(model)
    assert isinstance(copy.codes, Coded)
    assert copy.codes.group == 2
    assert not copy.codes.requires_grad
    assert copy.bias.requires_grad
    assert not copy.bias.decays
    copy.codes.add_(1)
    assert model.codes.tolist() == [0, 1, 2, 3]
