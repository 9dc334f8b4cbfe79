"""Batch normalization in training over samples that are spread over ranks.

x (n, c, …) here, N = n · pixels · ranks values per channel in all. Means and sums of squares of the ranks are combined
by Chan, Golub and LeVeque (1983): M2 = Σ_r M2_r + n_r Σ_r (mean_r - mean)²; one all-gather of (2, c) forward. Backward:

    ∂x = w / σ (∂y - (Σ ∂y + x̂ Σ ∂y x̂) / N),    ∂w = Σ ∂y x̂,    ∂b = Σ ∂y

One all-reduce of (2, c); a rank's ∂w and ∂b are its own part of the sum. Every rank updates its running statistics alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from runtime.ops.peers import Peers


def batch_norm(
    op: Any,
    axes: Mapping[str, Peers],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = False,
) -> Tensor:
    """Run ``aten.batch_norm`` with the statistics of all ranks of axis "samples"."""
    samples = axes["samples"]
    result, mean, variance = _Normalize.apply(x, weight, bias, eps, samples)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_var is not None:
        count = _values_per_channel(x, samples)
        unbiased = variance * (count / (count - 1))
        # The kernel, too, writes behind autograd's back: another norm on the same statistics may have saved them, unread.
        running_mean.data.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
        running_var.data.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    return result  # type: ignore[no-any-return]


class _Normalize(torch.autograd.Function):
    """The normalized tensor, mean and variance; the statistics have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, samples: Peers
    ) -> tuple[Tensor, Tensor, Tensor]:
        dims = [d for d in range(x.dim()) if d != 1]
        exact = torch.promote_types(x.dtype, torch.float32)
        own_variance, own_mean = torch.var_mean(x.to(exact), dims, correction=0)
        everyones = samples.all_gather(torch.stack([own_mean, own_variance]))
        means, variances = everyones[:, 0], everyones[:, 1]
        mean = means.mean(0)
        variance = (variances + (means - mean) ** 2).mean(0)
        inverse = (variance + eps).rsqrt()
        scale = inverse if weight is None else inverse * weight.to(exact)
        result = (x.to(exact) - _channels(mean, x)) * _channels(scale, x)
        if bias is not None:
            result += _channels(bias.to(exact), x)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.samples, ctx.dims, ctx.has_bias = samples, dims, bias is not None
        ctx.mark_non_differentiable(mean, variance)
        return result.to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, mean, inverse = ctx.saved_tensors
        gradient = gradients[0].to(mean.dtype)
        normal = (x.to(mean.dtype) - _channels(mean, x)) * _channels(inverse, x)
        own = torch.stack([gradient.sum(ctx.dims), (gradient * normal).sum(ctx.dims)])
        averages = ctx.samples.all_reduce(own) / _values_per_channel(x, ctx.samples)
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        of_x = _channels(scale, x) * (
            gradient - _channels(averages[0], x) - normal * _channels(averages[1], x)
        )
        of_weight = None if weight is None else own[1].to(weight.dtype)
        of_bias = own[0].to(mean.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return of_x.to(x.dtype), of_weight, of_bias, None, None


def _values_per_channel(x: Tensor, samples: Peers) -> int:
    return math.prod(size for dim, size in enumerate(x.shape) if dim != 1) * samples.size


def _channels(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view(1, -1, *(1,) * (like.dim() - 2))
