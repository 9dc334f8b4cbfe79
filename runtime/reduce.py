"""Sum the gradients of parameters that several ranks hold, in one collective per dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.precision import gradient_dtype


class Works:
    """Several pending works, waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, *timeout: Any) -> None:
        for work in self._works:
            work.wait(*timeout)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _in_memory(parameter: Tensor) -> Tensor:
    """The gradient as plain numbers, as a collective reads them: dense, conjugated where it says so."""
    if parameter.grad is None:
        return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return gradient.resolve_conj() if gradient.is_complex() else gradient


class GradientReduction:
    """The reduction at one ``position`` of the program. A missing gradient counts as zeros."""

    def __init__(self, position: int, parameters: Sequence[Tensor]) -> None:
        self.position = position
        self._by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            self._by_dtype.setdefault(gradient_dtype(parameter), []).append(parameter)
        self._pending: list[tuple[Tensor, list[Tensor]]] = []

    def start(self, all_reduce: Callable[[Tensor], Any]) -> Works:
        """Start summing; ``finish`` puts the sums into ``.grad`` once the work is done."""
        works = []
        for parameters in self._by_dtype.values():
            gradients = [_in_memory(parameter) for parameter in parameters]
            flat = (
                gradients[0].contiguous().view(-1)
                if len(gradients) == 1
                else torch.cat([g.reshape(-1) for g in gradients])
            )
            works.append(all_reduce(flat))
            self._pending.append((flat, parameters))
        return Works(works)

    def finish(self) -> None:
        """Replace the gradients by their sums."""
        for flat, parameters in self._pending:
            sums = torch.split(flat, [p.numel() for p in parameters])
            for parameter, total in zip(parameters, sums, strict=True):
                parameter.grad = total.view_as(parameter)
        self._pending = []

    def discard(self) -> None:
        """Forget a reduction that failed."""
        self._pending = []
