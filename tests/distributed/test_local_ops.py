"""Local ops over a real process group: what threads stand for in the proofs of sharding rules."""

from __future__ import annotations

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
