"""The norm of a whole model's gradients, when no rank has all of them.

    p-norm over all elements = (Σ over ranks of (p-norm of what the rank speaks for)^p)^(1/p)
    inf-norm                 = max over ranks

Each gradient counts once: a rank brings only those that it speaks for (``RankState.spoken_for``). Sums over ranks are
made in float64, so that every rank computes the same coefficient from the same number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from cost_models.errors import UsageError
from runtime.ranks.collective import Collectives


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of those parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def global_norm(gradients: Sequence[Tensor], norm_type: float, collectives: Collectives) -> Tensor:
    """Return the norm over every rank's ``gradients``, as a float64 tensor of shape (). Collective; the same everywhere."""
    if not norm_type > 0:
        raise UsageError(
            f"cannot clip by a {norm_type:g}-norm", suggestions=["norm_type is 2.0, another p > 0, or inf"]
        )
    norm = _local_norm(gradients, norm_type).to(collectives.device, torch.float64)
    if math.isinf(norm_type):
        # A maximum over ranks may lose a nan, so whether there is one travels beside it.
        pair = torch.stack([norm.nan_to_num(nan=0.0, posinf=math.inf), norm.isnan().double()])
        highest, is_nan = collectives.all_reduce(pair, "the gradient norm", dist.ReduceOp.MAX).wait().unbind()
        return highest.where(is_nan == 0.0, math.nan)
    return collectives.all_reduce(norm**norm_type, "the gradient norm").wait() ** (1.0 / norm_type)


def _local_norm(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of this rank's ``gradients``. 16-bit ones are squared in 32 bits: float16 overflows at 65504."""
    narrow: list[Tensor] = []
    wide: list[Tensor] = []
    for gradient in gradients:
        dense = gradient.coalesce().values() if gradient.is_sparse else gradient
        (narrow if dense.dtype.itemsize < torch.float32.itemsize else wide).append(dense)
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float32) for g in narrow]
    return get_total_norm([*wide, *norms], norm_type)


def refuse_nonfinite(norm: Tensor, norm_type: float) -> None:
    """Raise RuntimeError, as torch does, unless the norm is a finite number. Waits for the device."""
    if not torch.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from all ranks is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
