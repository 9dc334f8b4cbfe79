"""Agreement of two steps of one model: the same loss, gradients and buffers, up to rounding of their types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Part of a tensor's norm by which two runs of the same kernels may differ, by the type they run in."""
OF_ALL = 1e-6
"""Part of the norm of all gradients below which a gradient is rounding, as in ``partitioner.verify.compare``."""


@dataclass(frozen=True)
class Numbers:
    """Everything that one step computed, by the model's own names."""

    loss: Tensor
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def tolerance(dtypes: set[torch.dtype]) -> float:
    """Return the tolerance of the narrowest type among ``dtypes``."""
    return max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=1e-9) or 1e-9


def difference(expected: Numbers, actual: Numbers, allowed: float) -> str:
    """Name the first kind of number that differs, with the worst of its kind; "" if all agree.

    A gradient that only one side has counts as zeros on the other. Numbers that are not finite must be so in both.
    """
    if not close(expected.loss, actual.loss, allowed, 1.0):
        return f"the loss is {float(actual.loss):.6g} instead of {float(expected.loss):.6g}"
    norms = [_norm(gradient) for gradient in expected.gradients.values()]
    floor = OF_ALL * math.sqrt(sum(norm**2 for norm in norms if math.isfinite(norm)))
    for kind, mine, theirs, least in (
        ("gradient", expected.gradients, actual.gradients, floor),
        ("buffer", expected.buffers, actual.buffers, 1.0),
    ):
        worst, said = 0.0, ""
        for name in dict.fromkeys((*mine, *theirs)):
            e, a = mine.get(name), theirs.get(name)
            if e is None or a is None:
                other = a if e is None else e
                assert other is not None
                zeros = torch.zeros_like(_dense(other))
                e, a = (zeros, other) if e is None else (e, zeros)
            if not close(e, a, allowed, least):
                error = float((_wide(e) - _wide(a)).norm()) if e.shape == a.shape else math.inf
                error = math.inf if math.isnan(error) else error
                if error > worst or not said:
                    worst, said = error, f"the {kind} of {name} is off by {error:.3g} of {_norm(e):.3g}"
        if said:
            return said
    return ""


def close(expected: Tensor, actual: Tensor, allowed: float, least: float) -> bool:
    """Tell whether two tensors agree up to ``allowed`` of the first one's norm, or of ``least`` if that is more."""
    if expected.shape != actual.shape:
        return False
    e, a = _wide(expected), _wide(actual)
    broken = ~torch.isfinite(e)
    if not torch.equal(broken, ~torch.isfinite(a)):
        return False
    if bool(broken.any()):
        if not torch.equal(torch.nan_to_num(e[broken], 7.0), torch.nan_to_num(a[broken], 7.0)):
            return False
        e, a = e[~broken], a[~broken]
    return float((e - a).norm()) <= allowed * max(float(e.norm()), least)


def _norm(tensor: Tensor) -> float:
    return float(_wide(tensor).norm())


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def _wide(tensor: Tensor) -> Tensor:
    dense = _dense(tensor.detach())
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)
