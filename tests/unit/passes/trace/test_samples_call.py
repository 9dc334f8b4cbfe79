"""A part that is run on batches of other sizes, whose inputs do not fit each other then: it is said whose call that was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cost_models.errors import ModelError
from passes.trace.trace import trace


class Rows(nn.Module):
    """An encoder of images whose rows lie one after another; how many are an image's, a number in ``counts`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, counts: Tensor, rows: Tensor) -> Tensor:
        encoded = self.layer(rows).split([int(count) for count in counts.flatten()])
        return torch.stack([part.mean(0) for part in encoded])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = Rows(), nn.Linear(4, 2)

    def forward(self, counts: Tensor, rows: Tensor) -> Tensor:
        loss: Tensor = self.head(self.rows(counts, rows)).square().mean()
        return loss


def test_our_call_with_other_sizes_is_not_the_users() -> None:
    batch = {"counts": torch.full((4, 1), 6), "rows": torch.randn(24, 3)}
    with pytest.raises(ModelError) as caught:
        trace(Model(), batch, opaque=["rows"])
    said = str(caught.value)
    assert (
        "the model itself runs on example_inputs; our call, with counts twice in a row, and rows unchanged"
        in said
    )
    assert "rows, (24, 3), may be 6 rows for each of 4 samples" in said
    assert "rows as (4, 6, 3), put together in forward" in said
