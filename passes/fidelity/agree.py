"""Agreement of two steps of one model: the one definition that the fidelity check, verification, tests and docs use.

With d the difference of two tensors, ‖·‖ the 2-norm and t a tolerance (1e-9 in float64), these agree:

    loss, norm of gradients     |d| ≤ t · max(|x|, 1)
    gradient g                  ‖d‖ ≤ t · max(‖g‖, 1e-6 · ‖all gradients‖)    some (ViT's key bias) are zero but for
                                                                              rounding
    parameter p                 ‖d‖ ≤ t · max(‖p‖, lr · √n)                   after a step at rate lr, n elements
    buffer b                    ‖d‖ ≤ t · max(‖b‖, 1)
    optimizer state s, key k    ‖d‖ ≤ t · max(‖s‖, 1e-6 · ‖all of key k‖)
    samples, rates, steps       equal

NaN agrees with NaN in the same place, and so does an infinity with itself; norms are those of the finite numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

TOLERANCE = 1e-9
TOLERANCES = {torch.float64: TOLERANCE, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Part of a tensor's norm by which two runs of the same kernels may differ, by the type they run in."""
OF_ALL = 1e-6
"""Part of the norm of all gradients, or of all state of one key, below which one of them is rounding."""


@dataclass(frozen=True)
class StepResult:
    """Everything that a step computed, by the model's own names. ``loss``: None if it is not known here.

    ``gradients``: before clipping; ``parameters``, ``buffers``, ``optimizer``: after the optimizer's step. Of several steps
    in a row some have kept their numbers alone, without tensors.
    """

    loss: float | None
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """The optimizer's state: name of a parameter -> key -> value."""
    norm: float = math.nan
    """The norm of all gradients; infinite where they overflowed."""
    gradient_norms: Mapping[str, float] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    """The learning rates that it used, by group."""


@dataclass(frozen=True)
class ComparedQuantity:
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


def tolerance(dtypes: set[torch.dtype]) -> float:
    """Return the tolerance of the narrowest type among ``dtypes``."""
    return max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=TOLERANCE) or TOLERANCE


def compare(
    expected: StepResult,
    actual: StepResult,
    learning_rate: float = 0.0,
    *,
    whole: Mapping[str, Tensor] | None = None,
    tolerance: float = TOLERANCE,
) -> list[ComparedQuantity]:
    """Compare every quantity. A name that only one side has counts as a difference, but for gradients: none means zero.

    ``whole``: all gradients of the model, where ``expected`` holds only a part of them.
    """
    norms = {name: norm(g) for name, g in (expected.gradients if whole is None else whole).items()}
    of_all = math.hypot(*norms.values())
    kinds: tuple[tuple[str, Mapping[str, Tensor], Mapping[str, Tensor]], ...] = (
        ("loss", {"loss": _number(expected.loss)}, {"loss": _number(actual.loss)}),
        ("gradient", *_with_zeros(expected.gradients, actual.gradients)),
        ("parameter", expected.parameters, actual.parameters),
        ("buffer", expected.buffers, actual.buffers),
    )
    compared = []
    for kind, mine, theirs in kinds:
        for name in dict.fromkeys((*mine, *theirs)):
            e, a = mine.get(name), theirs.get(name)
            if e is None or a is None or e.shape != a.shape:
                compared.append(ComparedQuantity(kind, name, math.inf, 0.0))
                continue
            size = norms.get(name, 0.0) if kind == "gradient" else norm(e)
            allowed = tolerance * size_of(kind, size, e.numel(), learning_rate, of_all)
            compared.append(ComparedQuantity(kind, name, distance(e, a), allowed))
    return compared


def difference(expected: StepResult, actual: StepResult, allowed: float) -> str:
    """Name the first kind of number that differs, with the worst of its kind; "" if all agree up to ``allowed``.

    A gradient or buffer that only one side has counts as zeros on the other.
    """
    before, after = _with_zeros(expected.buffers, actual.buffers)
    compared = compare(replace(expected, buffers=before), replace(actual, buffers=after), tolerance=allowed)
    different = [quantity for quantity in compared if not quantity.agrees]
    if not different:
        return ""
    kind = different[0].kind
    if kind == "loss":
        return f"the loss is {actual.loss:.6g} instead of {expected.loss:.6g}"
    errors = {q.name: math.inf if math.isnan(q.error) else q.error for q in different if q.kind == kind}
    worst = max(errors, key=errors.__getitem__)
    value = (expected.gradients if kind == "gradient" else expected.buffers).get(worst)
    size = 0.0 if value is None else float(dense_double(value).norm())
    return f"the {kind} of {worst} is off by {errors[worst]:.3g} of {size:.3g}"


def size_of(kind: str, norm: float, elements: int, learning_rate: float, of_all: float) -> float:
    """Return the size that an error is measured by, of a tensor with this norm. ``of_all``: the norm of all of its kind."""
    if kind in ("gradient", "optimizer state"):
        return max(norm, OF_ALL * of_all)
    if kind.startswith("parameter"):
        return max(norm, learning_rate * math.sqrt(elements))
    return max(norm, 1.0)


def distance(expected: Tensor, actual: Tensor) -> float:
    """Return the norm of the difference of two tensors of one shape."""
    e, a = dense_double(expected), dense_double(actual)
    error = float((e - a).norm())
    if math.isfinite(error):
        return error
    same = (e == a) | (e.isnan() & a.isnan())
    return float((e - a).masked_fill(same, 0.0).norm())


def norm(tensor: Tensor) -> float:
    """Return the norm of the finite numbers of ``tensor``."""
    double = dense_double(tensor)
    whole = float(double.norm())
    return whole if math.isfinite(whole) else float(double.masked_fill(~double.isfinite(), 0.0).norm())


def dense_double(tensor: Tensor) -> Tensor:
    """Make a tensor dense and double. (Gradients of embeddings may be sparse; if ranks share one, their sum is dense.)"""
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def _number(loss: float | None) -> Tensor:
    """Make a number a tensor; one without numbers, which has another shape, where it is not known."""
    return torch.tensor([] if loss is None else loss, dtype=torch.float64)


def _with_zeros(
    mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Give both sides zeros for what only the other one has."""
    return (
        {
            **mine,
            **{name: torch.zeros_like(dense_double(t)) for name, t in theirs.items() if name not in mine},
        },
        {
            **theirs,
            **{name: torch.zeros_like(dense_double(t)) for name, t in mine.items() if name not in theirs},
        },
    )
