"""A tensor of the model that has no memory of its own: it is read from its owner, step by step.

    self.register_buffer("rows", self.a.weight.data[2:4])      StateView("a.weight", (("slice", (0, 2, 4, 1)),), (2, 8))

Ranks hold the owner only. What leaves a process (state dicts, reports) has the view under its own name, with the owner's
current values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

ViewStep: TypeAlias = tuple[str, tuple[int, ...]]
"""One op that takes a view, and its numbers: a key of ``STEPS``."""

STEPS: Mapping[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "reshape": lambda tensor, shape: tensor.reshape(shape),
    "permute": lambda tensor, dims: tensor.permute(dims),
    "slice": lambda tensor, n: tensor[(slice(None),) * n[0] + (slice(n[1], n[2], n[3]),)],
    "select": lambda tensor, n: tensor.select(n[0], n[1]),
    "unsqueeze": lambda tensor, n: tensor.unsqueeze(n[0]),
    "expand": lambda tensor, shape: tensor.expand(shape),
}
"""The steps: (dim, start, end, step) of a slice, (dim, index) of a selection, the dims of a permutation, shapes."""


@dataclass(frozen=True)
class StateView:
    """The view of ``owner``, a parameter or buffer, that another name of the model stands for."""

    owner: str
    steps: tuple[ViewStep, ...]
    shape: tuple[int, ...]
    persistent: bool = True
    """True for a buffer that the state dict has."""

    def of(self, owner: Tensor) -> Tensor:
        """Take the view of the owner's values."""
        return taken(self.steps, owner)

    def __str__(self) -> str:
        return self.owner + "".join(_text(*step) for step in self.steps)


def taken(steps: tuple[ViewStep, ...], owner: Any) -> Tensor:
    """Take ``steps`` one after another."""
    for name, numbers in steps:
        owner = STEPS[name](owner, numbers)
    result: Tensor = owner
    return result


def _text(name: str, numbers: tuple[int, ...]) -> str:
    before = ":, " * numbers[0] if numbers else ""
    if name == "slice":
        start, end, step = numbers[1:]
        return f"[{before}{start}:{end}{f':{step}' if step != 1 else ''}]"
    if name == "select":
        return f"[{before}{numbers[1]}]"
    return f".{name}({', '.join(map(str, numbers))})"
