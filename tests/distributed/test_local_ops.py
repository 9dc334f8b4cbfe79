"""Local ops over a real process group: what threads stand for in the proofs of sharding rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from runtime.mesh.axis import Axis
from runtime.ops.local import LOCAL
from runtime.ranks.launch import WorkerPool

aten = torch.ops.aten
RANKS = 2


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Logits (6, 8) with targets, and images (4, 3, 5)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 8, dtype=torch.float64, generator=generator)
    images = torch.randn(4, 3, 5, dtype=torch.float64, generator=generator)
    return logits, torch.tensor([0, 7, 3, -100, 4, 5]), images


def losses_and_norms() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One rank's loss by classes, its gradient, and its part of a batch norm with its gradient."""
    axis = Axis("model", RANKS, dist.get_rank(), dist.group.WORLD)
    logits, target, images = inputs()
    own = logits.tensor_split(RANKS, 1)[axis.rank].clone().requires_grad_()
    loss = LOCAL["cross_entropy"](aten.cross_entropy_loss.default, {"classes": axis}, own, target, None, 1)
    (of_logits,) = torch.autograd.grad(loss, own)
    x = images.tensor_split(RANKS)[axis.rank].clone().requires_grad_()
    options = (None, None, None, None, True, 0.1, 1e-5, False)
    y = LOCAL["batch_norm"](aten.batch_norm.default, {"samples": axis}, x, *options)
    (of_x,) = torch.autograd.grad(y.pow(3).sum(), x)
    return loss.detach(), of_logits, y.detach(), of_x


def heads(count: int) -> list[Tensor]:
    """Queries (1, 4, 6, 2), keys and values (1, ``count``, 6, 2) that they share."""
    generator = torch.Generator().manual_seed(0)
    sizes = (4, count, count)
    return [torch.randn(1, n, 6, 2, dtype=torch.float64, generator=generator) for n in sizes]


def attention(count: int) -> tuple[Tensor, ...]:
    """One rank's heads of an attention whose keys are split by tokens, and its gradients."""
    axis = Axis("model", RANKS, dist.get_rank(), dist.group.WORLD)
    own = [
        x.tensor_split(RANKS, dim)[axis.rank].clone().requires_grad_()
        for x, dim in zip(heads(count), (1, 2, 2), strict=True)
    ]
    options: tuple[Any, ...] = (None, 0.0, True)
    y = LOCAL["attention"](aten.scaled_dot_product_attention.default, {"tokens": axis}, *own, *options)
    return y.detach(), *torch.autograd.grad(y.pow(3).sum(), own)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_heads_are_exchanged_for_tokens_over_gloo(count: int, pool: WorkerPool) -> None:
    results = pool.run(attention, count, world_size=RANKS, timeout_seconds=60)
    whole = [x.requires_grad_() for x in heads(count)]
    y = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    wanted = y.detach(), *torch.autograd.grad(y.pow(3).sum(), whole)
    for found, dim, tensor in zip(zip(*results, strict=True), (1, 1, 2, 2), wanted, strict=True):
        torch.testing.assert_close(torch.cat(found, dim), tensor)


def test_classes_and_samples_over_gloo(pool: WorkerPool) -> None:
    results = pool.run(losses_and_norms, world_size=RANKS, timeout_seconds=60)
    logits, target, images = inputs()
    logits.requires_grad_()
    images.requires_grad_()
    loss = F.cross_entropy(logits, target)
    y = F.batch_norm(images, None, None, training=True)
    of_logits, of_images = torch.autograd.grad(loss + y.pow(3).sum(), (logits, images))
    for result in results:
        torch.testing.assert_close(result[0], loss.detach())
    torch.testing.assert_close(torch.cat([r[1] for r in results], 1), of_logits)
    torch.testing.assert_close(torch.cat([r[2] for r in results]), y.detach())
    torch.testing.assert_close(torch.cat([r[3] for r in results]), of_images)
