"""Local ops that the proofs of sharding rules do not reach: random numbers, low precision, extremes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from passes.shard.rules.threads import Rendezvous, on_all
from runtime.ops.local import LOCAL

aten = torch.ops.aten
RANKS = 2


@dataclass(frozen=True)
class Alone:
    """An axis whose collectives nobody calls."""

    rank: int
    size: int = RANKS

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        raise AssertionError("no communication expected")

    def all_gather(self, tensor: Tensor) -> Tensor:
        raise AssertionError("no communication expected")


def together(function: str, role: str, run: Any) -> list[Any]:
    """``run(rank, call)`` on every rank."""
    meeting = Rendezvous([RANKS])

    def on_rank(rank: tuple[int, ...]) -> Any:
        axes = {role: meeting.axis((0,), rank)}
        return run(rank[0], lambda op, *args: LOCAL[function](op, axes, *args))

    return on_all(on_rank, [(r,) for r in range(RANKS)], meeting)


def masks(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a rank drops: replicated, sharded, replicated again."""
    torch.manual_seed(5)
    x = torch.ones(1000)
    first = aten.dropout(x, 0.5, True)
    mine = LOCAL["random"](aten.dropout.default, {"shards": Alone(rank)}, x[: 1000 // RANKS], 0.5, True)
    return first, mine, aten.dropout(x, 0.5, True)


def test_replicated_tensors_draw_equal_numbers_and_sharded_ones_independent_ones() -> None:
    (first, mine, last), (other_first, others, other_last) = masks(0), masks(1)
    assert torch.equal(first, other_first)
    assert torch.equal(last, other_last)
    assert not torch.equal(first, last)
    assert 0.4 < float(((mine > 0) == (others > 0)).double().mean()) < 0.6
    assert set(mine.tolist()) == {0.0, 2.0}


def test_gradients_of_sharded_dropout_use_its_own_mask() -> None:
    x = torch.ones(64, requires_grad=True)
    result = LOCAL["random"](aten.dropout.default, {"shards": Alone(1)}, x, 0.25, True)
    result.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, result.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_classes_on_several_ranks_with_large_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(6, 8) * 1e3).to(dtype)
    target = torch.tensor([0, 7, 3, -100, 4, 5])
    whole = logits.float().clone().requires_grad_()
    wanted = F.cross_entropy(whole, target, reduction="none")
    wanted.sum().backward()

    def run(rank: int, call: Any) -> tuple[Tensor, Tensor]:
        own = logits.tensor_split(RANKS, 1)[rank].clone().requires_grad_()
        losses = call(aten.cross_entropy_loss.default, own, target, None, 0)
        losses.sum().backward()
        assert own.grad is not None
        return losses.detach(), own.grad

    results = together("cross_entropy", "classes", run)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for losses, _ in results:
        assert losses.dtype == dtype
        torch.testing.assert_close(losses.float(), wanted.detach(), rtol=tolerance, atol=tolerance)
    gradient = torch.cat([g for _, g in results], 1)
    torch.testing.assert_close(gradient.float(), whole.grad, rtol=tolerance, atol=tolerance)


def test_statistics_of_numbers_far_from_zero() -> None:
    torch.manual_seed(0)
    x = (torch.randn(4, 3, 5) + 1e4).float()
    wanted = F.batch_norm(x.double(), None, None, training=True)

    def run(rank: int, call: Any) -> Tensor:
        result: Tensor = call(
            aten.batch_norm.default,
            x.tensor_split(RANKS)[rank],
            None,
            None,
            None,
            None,
            True,
            0.1,
            1e-5,
            False,
        )
        return result

    found = torch.cat(together("batch_norm", "samples", run))
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=5e-3)


def test_all_ranks_ignored_is_no_number_as_in_torch() -> None:
    target = torch.full((2,), -100)

    def run(rank: int, call: Any) -> Tensor:
        loss: Tensor = call(aten.cross_entropy_loss.default, torch.randn(2, 3), target, None, 1)
        return loss

    assert all(bool(loss.isnan()) for loss in together("cross_entropy", "samples", run))
