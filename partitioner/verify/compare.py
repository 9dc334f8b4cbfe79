"""Agreement of two training steps: the one definition that verification, tests and docs use.

In float64, with d the difference of two tensors and ‖·‖ the 2-norm, these agree:

    loss         |d| ≤ 1e-9 · max(|loss|, 1)
    gradient g   ‖d‖ ≤ 1e-9 · max(‖g‖, 1e-6 · ‖all gradients‖)     some gradients (ViT's key bias) are zero but for rounding
    parameter p  ‖d‖ ≤ 1e-9 · max(‖p‖, lr · √n)                    after an optimizer step at rate lr, n elements
    buffer b     ‖d‖ ≤ 1e-9 · max(‖b‖, 1)

NaN agrees with NaN in the same place, and so does an infinity with itself; norms are those of the finite numbers.

Some differences are rounding of the unpartitioned model itself, and nothing of the partition. A bias before a batch norm
has no gradient: what backward leaves there is rounding, other rounding for every order of adding. Adam divides a gradient
by as little as 1e-8, so that a parameter may differ by rounding whose gradient is small and agrees. So where such a
gradient or any parameter differs, the unpartitioned step is made once more with the samples of each micro-batch in
reverse order, which changes nothing but that order. What differs as little between these two steps is the model's own
doing; the report names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.verify.grow_batch import rebuilt
from passes.graph.graph import OpGraph

TOLERANCE = 1e-9
ROUNDING = 1e-12
"""A gradient below this part of all gradients together is rounding: float64 has 16 digits."""
ORDERS = 16.0
"""The factor by which another order may round more than the one that was tried."""


@dataclass(frozen=True)
class StepResult:
    """Everything one training step computed, by the model's own names. ``loss``: None if it is not known here."""

    loss: float | None
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """One compared quantity. ``error`` and ``allowed`` are 2-norms; it agrees iff error ≤ allowed."""

    kind: str
    name: str
    error: float
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.error <= self.allowed  # False for nan

    @property
    def severity(self) -> float:
        """The quotient error / allowed; infinite when the error is no number."""
        if math.isnan(self.error):
            return math.inf
        return self.error / self.allowed if self.allowed else (math.inf if self.error else 0.0)


def compare(
    expected: StepResult,
    actual: StepResult,
    learning_rate: float,
    *,
    whole: Mapping[str, Tensor] | None = None,
    tolerance: float = TOLERANCE,
) -> list[Comparison]:
    """Compare every quantity. A name that only one side has counts as a difference, but for gradients: none means zero.

    ``whole``: all gradients of the model, where ``expected`` holds only a part of them.
    """
    found = [_compare("loss", "loss", _number(expected.loss), _number(actual.loss), _at_least_one, tolerance)]
    every = (expected.gradients if whole is None else whole).values()
    norm_of_all = math.sqrt(sum(float(_finite(_wide(gradient)).norm()) ** 2 for gradient in every))
    scales: dict[str, Callable[[float, int], float]] = {
        "gradient": lambda norm, _: max(norm, 1e-6 * norm_of_all),
        "parameter": lambda norm, elements: max(norm, learning_rate * math.sqrt(elements)),
        "buffer": _at_least_one,
    }
    for kind, scale in scales.items():
        for name, e, a in _pairs(getattr(expected, f"{kind}s"), getattr(actual, f"{kind}s")):
            if kind == "gradient":
                e = torch.zeros_like(a) if e is None and a is not None else e
                a = torch.zeros_like(e) if a is None and e is not None else a
            found.append(_compare(kind, name, e, a, scale, tolerance))
    return found


def rounding_only(
    differences: Sequence[Comparison],
    expected: StepResult,
    in_other_order: Callable[[], StepResult],
    learning_rate: float,
) -> list[Comparison]:
    """Return those of ``differences`` that are about as large as between the unpartitioned step and ``in_other_order``.

    Where the loss itself depends on the order of samples, the other step is another computation and explains nothing.
    """
    norms = {name: float(gradient.to_dense().norm()) for name, gradient in expected.gradients.items()}
    most = ROUNDING * math.sqrt(sum(norm**2 for norm in norms.values()))
    suspected = [
        c
        for c in differences
        if c.kind == "parameter" or (c.kind == "gradient" and norms.get(c.name, math.inf) < most)
    ]
    if not suspected:
        return []
    own = compare(expected, in_other_order(), learning_rate)
    if not all(c.agrees for c in own if c.kind == "loss"):
        return []
    error_of = {(c.kind, c.name): c.error for c in own}
    return [c for c in suspected if c.error <= ORDERS * error_of[c.kind, c.name]]


def in_reverse(
    batch: Any, leaves: Mapping[str, Tensor], graph: OpGraph, sizes: Sequence[int], model: nn.Module
) -> tuple[Any, dict[str, Tensor]]:
    """Return ``batch`` and its leaves with the samples of each micro-batch in reverse order."""
    turned = {}
    for name, leaf in leaves.items():
        dim = graph.batch.batch_dims.get(name)
        turned[name] = leaf
        if dim is not None:
            turned[name] = torch.cat([piece.flip(dim) for piece in torch.split(leaf, list(sizes), dim)], dim)
    return rebuilt(batch, turned, model), turned


def _pairs(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]
) -> list[tuple[str, Tensor | None, Tensor | None]]:
    names = list(expected) + [name for name in actual if name not in expected]
    return [(name, expected.get(name), actual.get(name)) for name in names]


def _compare(
    kind: str,
    name: str,
    expected: Tensor | None,
    actual: Tensor | None,
    scale: Callable[[float, int], float],
    tolerance: float,
) -> Comparison:
    if expected is None or actual is None or expected.shape != actual.shape:
        return Comparison(kind, name, math.inf, 0.0)
    e, a = _wide(expected), _wide(actual)
    same = (e == a) | (e.isnan() & a.isnan())
    error = float((e - a).masked_fill(same, 0.0).norm())
    return Comparison(kind, name, error, tolerance * scale(float(_finite(e).norm()), e.numel()))


def _at_least_one(norm: float, _: int) -> float:
    return max(norm, 1.0)


def _number(loss: float | None) -> Tensor | None:
    return None if loss is None else torch.tensor(loss, dtype=torch.float64)


def _finite(tensor: Tensor) -> Tensor:
    """Return the tensor with zeros for what is NaN or infinite."""
    return tensor.masked_fill(~tensor.isfinite(), 0.0)


def _wide(tensor: Tensor) -> Tensor:
    """Make a tensor dense and double. (Gradients of embeddings may be sparse; if ranks share one, their sum is dense.)"""
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)
