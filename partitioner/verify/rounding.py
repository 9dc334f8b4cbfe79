"""Rounding: differences that are the model's own, in float64 and in its own types, measured on the model itself.

In float64 a bias before a batch norm has no gradient: what backward leaves there is rounding, other rounding for every
order of adding. Adam divides a gradient by as little as 1e-8, so that a parameter may differ by rounding whose gradient is
small and agrees. So where such a gradient or any parameter differs, the unpartitioned step is made once more with the
samples of each micro-batch in reverse order, which changes nothing but that order. What differs as little between these two
steps is the model's own doing; the report names it.

Two computations that round in the same types, and add in other orders, differ as a step differs from the same step in
which the results of every op are rounded once more: each number moves by less than the spacing u of its type, up or down
at random (Monte Carlo arithmetic; Parker, "Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic",
UCLA CSD-970002, 1997). How much of that reaches a loss or a gradient, and which parameter Adam moves by a whole step for
it, is the model's own doing and is measured. For a quantity x of size ‖x‖, as in ``passes.fidelity.agree``:

    ‖d‖ ≤ max(ORDERS · ‖x rounded once more - x‖, u · ‖x‖)

A single number, such as a loss, may be hardly moved by chance: of ``DRAWS`` steps, the one that moves x furthest counts.
``ORDERS`` stands for what other orders move further. Integers stay: indices, masks and counts that code keeps as floats are
exact in every order of adding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from cost_models.precision import Precision
from passes.fidelity.agree import ComparedQuantity, StepResult, compare, norm
from passes.graph.graph import OpGraph

ROUNDING = 1e-12
"""A gradient below this part of all gradients together is rounding: float64 has 16 digits."""
ORDERS = 16.0
"""The factor by which another order may round more than the one that was tried."""
DRAWS = 3
_MOVED = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


class RoundedOnceMore(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Within it, the results of every op, in forward and backward, move by up to the spacing of their type."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)
        if schema is None or any(result.alias_info for result in schema.returns):
            return results  # views and what is written in place: moved where their contents were made
        return tree_map_only(Tensor, self._moved, results)

    def _moved(self, made: Tensor) -> Tensor:
        if made.dtype not in _MOVED or made.layout != torch.strided:
            return made
        up = torch.rand(made.shape, generator=self._generator, dtype=made.dtype) * 2 - 1
        moved = made * (1 + torch.finfo(made.dtype).eps * up)
        return torch.where(made == made.round(), made, moved)


def own_types(graph: OpGraph, precision: Precision) -> str:
    """Return the types that a plan of ``graph`` trains in, in words."""
    if precision != Precision():
        return str(precision)
    return ", ".join(sorted({str(s.dtype).removeprefix("torch.") for s in graph.parameters.values()}))


def spacing(graph: OpGraph, precision: Precision) -> float:
    """Return the spacing at 1 of the widest-spaced type that a plan of ``graph`` computes in."""
    types = [graph.types_of(name, precision).leaf for name in graph.parameters]
    types += [node.meta["val"].dtype for node in graph.ops if isinstance(node.meta.get("val"), Tensor)]
    return max(torch.finfo(d).eps for d in types if d.is_floating_point or d.is_complex)


def without_gradient(norms: Mapping[str, float]) -> set[str]:
    """Name the parameters whose gradients, of these norms, are rounding."""
    most = ROUNDING * math.hypot(*norms.values())
    return {name for name, size in norms.items() if size < most}


def rounding_only(
    differences: Sequence[ComparedQuantity],
    expected: StepResult,
    in_other_order: Callable[[], StepResult],
    learning_rate: float,
) -> list[ComparedQuantity]:
    """Return those of ``differences`` that are about as large as between the unpartitioned step and ``in_other_order``.

    Where the loss itself depends on the order of samples, the other step is another computation and explains nothing.
    """
    small = without_gradient({name: norm(gradient) for name, gradient in expected.gradients.items()})
    suspected = [
        c for c in differences if c.kind == "parameter" or (c.kind == "gradient" and c.name in small)
    ]
    if not suspected:
        return []
    own = compare(expected, in_other_order(), learning_rate)
    if not all(c.agrees for c in own if c.kind == "loss"):
        return []
    error_of = {(c.kind, c.name): c.error for c in own}
    return [c for c in suspected if c.error <= ORDERS * error_of[c.kind, c.name]]


def allowed_by_rounding(
    compared: Sequence[ComparedQuantity],
    expected: StepResult,
    rounded: Sequence[StepResult],
    learning_rate: float,
) -> list[ComparedQuantity]:
    """Allow for what rounding once more changes. ``compared``: with the types' spacing as its tolerance."""
    moved: dict[tuple[str, str], float] = {}
    for step in rounded:
        for c in compare(expected, step, learning_rate):
            moved[c.kind, c.name] = max(c.error, moved.get((c.kind, c.name), 0.0))
    return [replace(c, allowed=max(c.allowed, ORDERS * moved.get((c.kind, c.name), 0.0))) for c in compared]
