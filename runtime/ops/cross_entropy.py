"""Cross entropy of logits whose classes, samples or both are spread over ranks.

z: logits (b, c, d…) or (c), of which a rank has c / ranks classes; y: target (b, d…); w: class weights (1 if none);
s: label smoothing; C: all classes, W = Σ_c w_c. Per sample, with log Z = log Σ_c exp z_c:

    loss = (1 - s) w_y (log Z - z_y) + s / C Σ_c w_c (log Z - z_c)                       (torch's definition)
    ∂loss / ∂z_c = (1 - s) w_y (p_c - [c = y]) + s / C (W p_c - w_c),    p_c = exp(z_c - log Z)

Ranks of the classes axis exchange, per sample: the largest logit, then Σ exp, z_y and, if smoothed, Σ w_c z_c. The
backward needs nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from runtime.ops.peers import Peers

NONE, MEAN, SUM = 0, 1, 2
"""Values of ``reduction``, numbered like ATen's."""


def cross_entropy(
    op: Any,
    axes: Mapping[str, Peers],
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the loss with ``axes`` "classes", "samples" (for means) or both."""
    if "classes" in axes:
        losses: Tensor = _ClassParallel.apply(  # type: ignore[no-untyped-call]
            logits, target, weight, ignore_index, label_smoothing, axes["classes"]
        )
        if reduction == NONE:
            return losses
        total = losses.sum()
    else:
        total = op(logits, target, weight, SUM, ignore_index, label_smoothing)
    if reduction == SUM:
        return total
    return total / _valid_weight(target, weight, ignore_index, total.dtype, axes)


def mean_nll_loss(
    op: Any,
    axes: Mapping[str, Peers],
    logs: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> Tensor:
    """Return the rank's sum over the valid weight of all ranks."""
    total: Tensor = op(logs, target, weight, SUM, ignore_index)
    return total / _valid_weight(target, weight, ignore_index, total.dtype, axes)


def _valid_weight(
    target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype, axes: Mapping[str, Peers]
) -> Tensor:
    """Return Σ w_y over the samples of all ranks that are not ignored."""
    valid = target != ignore_index
    if weight is None:
        total = valid.sum().to(dtype)
    else:
        total = weight[target.masked_fill(~valid, 0)].masked_fill(~valid, 0).sum().to(dtype)
    return axes["samples"].all_reduce(total) if "samples" in axes else total


class _ClassParallel(torch.autograd.Function):
    """Losses per sample, zero where ignored."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        classes: Peers,
    ) -> Tensor:
        dim = 1 if logits.dim() > 1 else 0
        here = logits.shape[dim]
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = classes.all_reduce(z.amax(dim), "max")
        first = classes.rank * here
        ignored = target == ignore_index
        mine = (target >= first) & (target < first + here) & ~ignored
        index = (target - first).masked_fill(~mine, 0).unsqueeze(dim)
        at_target = z.gather(dim, index).squeeze(dim).masked_fill(~mine, 0)
        parts = [(z - largest.unsqueeze(dim)).exp().sum(dim), at_target]
        own = _along(weight[first : first + here], z, dim) if weight is not None else None
        if smoothing:
            parts.append((z if own is None else z * own).sum(dim))
        sums = classes.all_reduce(torch.stack(parts))
        log_z = largest + sums[0].log()
        of_target = (
            torch.ones_like(log_z) if weight is None else weight[target.masked_fill(ignored, 0)].to(z.dtype)
        )
        losses = (1 - smoothing) * of_target * (log_z - sums[1])
        count = here * classes.size
        whole = float(count) if weight is None else weight.sum()
        if smoothing:
            losses = losses + smoothing / count * (whole * log_z - sums[2])
        ctx.save_for_backward(logits, log_z, of_target, index, mine, ignored, weight)
        ctx.dim, ctx.smoothing, ctx.first, ctx.count = dim, smoothing, first, count
        return losses.masked_fill(ignored, 0).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, log_z, of_target, index, mine, ignored, weight = ctx.saved_tensors
        dim, smoothing = ctx.dim, ctx.smoothing
        gradient = gradients[0].to(log_z.dtype).masked_fill(ignored, 0)
        p = (logits.to(log_z.dtype) - log_z.unsqueeze(dim)).exp()
        scale = ((1 - smoothing) * of_target * gradient).unsqueeze(dim)
        result = scale * p
        result.scatter_add_(dim, index, -scale.masked_fill(~mine.unsqueeze(dim), 0))
        if smoothing:
            here = logits.shape[dim]
            own = 1.0 if weight is None else _along(weight[ctx.first : ctx.first + here], p, dim)
            whole = float(ctx.count) if weight is None else weight.sum()
            result += (smoothing / ctx.count * gradient).unsqueeze(dim) * (whole * p - own)
        return result.to(logits.dtype), None, None, None, None, None


def _along(vector: Tensor, like: Tensor, dim: int) -> Tensor:
    """Return the vector as dimension ``dim`` of something that broadcasts over ``like``."""
    return vector.to(like.dtype).view(*(-1 if d == dim else 1 for d in range(like.dim())))
