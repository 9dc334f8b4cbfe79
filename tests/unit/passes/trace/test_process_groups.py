"""Code that asks for a process group is traced as without one, wherever it is traced; code that needs one is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner import trace
from passes.graph.nodes import op_name
from runtime.ranks.alone import NoGroupError


class Asking(nn.Module):
    """Doubles what it computes where there is a group: a graph that shows it has seen one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.SyncBatchNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x))
        return y * 2 if dist.is_initialized() else y


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Talking(nn.Module):
    """Communicates in forward: by itself, or in a Function of its own."""

    def __init__(self, function: bool) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.function:
            return Reduce.apply(y)  # type: ignore[no-any-return]
        dist.all_reduce(y)
        return y


def loss(output: Tensor, batch: Tensor) -> Tensor:
    return F.mse_loss(output, batch)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("training", [True, False])
def test_a_synchronized_norm_is_a_norm_over_the_batch_and_who_asks_is_told(training: bool) -> None:
    graph = trace(Asking(), torch.randn(6, 4), loss_fn=loss, training=training)
    assert [op_name(node) for node in graph.ops if op_name(node) in ("batch_norm", "mul")] == ["batch_norm"]
    (note,) = (note for note in graph.notes if "process group" in note)
    assert "test_process_groups.py:" in note


@pytest.mark.parametrize("function", [False, True])
def test_code_that_communicates_is_refused_with_its_line(function: bool) -> None:
    with pytest.raises(NoGroupError) as caught:
        trace(nn.Sequential(Talking(function)), torch.randn(6, 4), loss_fn=loss)
    assert caught.value.because[0].startswith("test_process_groups.py:")
    assert "dist.all_reduce(" in caught.value.because[0]
