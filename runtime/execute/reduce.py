"""Sums of the gradients of parameters that several ranks hold, in one collective per dtype.

They may begin while the last backward still runs:

    last backward      … linear_9 ─ linear_8 ─ … ─ linear_0        a bucket starts when its last gradient is there,
    sums                   └─ bucket 0      └─ bucket 1            in the program's order on every rank

Ranks run the same graph, so their gradients come in the same order. ``runtime.program.early`` says which sums may start so,
and why the one order of communications that was proved still holds.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from runtime.mesh.axis import Axis
from runtime.program.early import early_sums
from runtime.program.program import Instruction, SegmentGraph
from runtime.state.precision import gradient_dtype


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
    """Return the gradient as plain numbers, as a collective reads them: dense, conjugated where it says so."""
    if parameter.grad is None:
        return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return gradient.resolve_conj() if gradient.is_complex() else gradient


Sums: TypeAlias = MutableMapping[str, Tensor]
"""This rank's part of each gradient's sum, by parameter, where ranks keep parts only."""


class GradientReduction:
    """The reduction at one ``position`` of the program. A missing gradient counts as zeros.

    sums    parts of sums that were scattered before; where a parameter has one, that part is summed
    fresh   parameters whose gradients may be written into (``SegmentCode.fresh``)
    """

    def __init__(
        self,
        position: int,
        parameters: Mapping[str, Tensor],
        sums: Sums | None = None,
        fresh: Container[str] = (),
    ) -> None:
        self.position, self.parameters = position, parameters
        self._fresh = fresh
        self._sums: Sums = {} if sums is None else sums
        self._by_dtype: dict[torch.dtype, list[str]] = {}
        for name, parameter in parameters.items():
            self._by_dtype.setdefault(gradient_dtype(parameter), []).append(name)
        self._pending: list[tuple[Tensor, list[str], list[torch.Size]]] = []

    @property
    def started(self) -> bool:
        """True if it is under way, or done and not yet finished."""
        return bool(self._pending)

    def start(self, all_reduce: Callable[[Tensor], Any]) -> Works:
        """Start summing; ``finish`` puts the sums into ``.grad`` once the work is done."""
        works = []
        for names in self._by_dtype.values():
            gradients = [self._gradient(name) for name in names]
            flat = (
                self._writable(names[0], gradients[0]).view(-1)
                if len(gradients) == 1
                else torch.cat([g.reshape(-1) for g in gradients])
            )
            works.append(all_reduce(flat))
            self._pending.append((flat, names, [g.shape for g in gradients]))
        return Works(works)

    def finish(self) -> None:
        """Replace the gradients by their sums."""
        for flat, names, shapes in self._pending:
            sums = torch.split(flat, [shape.numel() for shape in shapes])
            for name, shape, total in zip(names, shapes, sums, strict=True):
                self._put(name, total.view(shape))
        self._pending = []

    def discard(self) -> None:
        """Forget a reduction that failed."""
        self._pending = []

    def _gradient(self, name: str) -> Tensor:
        found = self._sums.get(name)
        return _in_memory(self.parameters[name]) if found is None else found

    def _writable(self, name: str, gradient: Tensor) -> Tensor:
        """Return the gradient in memory where it may be summed."""
        if gradient is self.parameters[name].grad and name not in self._fresh:
            return gradient.clone(memory_format=torch.contiguous_format)
        return gradient.contiguous()

    def _put(self, name: str, total: Tensor) -> None:
        if name in self._sums:
            self._sums[name] = total
        else:
            self.parameters[name].grad = total


class ScatteredReduction(GradientReduction):
    """A reduction of which each rank keeps its part of every sum, in ``sums``; the gradients themselves are freed.

    dims    dimension along which each parameter's gradient is cut
    axis    the ranks
    """

    def __init__(
        self, position: int, parameters: Mapping[str, Tensor], sums: Sums, dims: Mapping[str, int], axis: Axis
    ) -> None:
        super().__init__(position, parameters, sums)
        self._kept, self._dims, self._axis = sums, dims, axis

    def start(self, all_reduce: Callable[[Tensor], Any]) -> Works:
        """Start summing and scattering."""
        works = []
        for names in self._by_dtype.values():
            stacks = [self._axis.stacked(self._gradient(name), self._dims[name]) for name in names]
            flat = (
                stacks[0].flatten(1)
                if len(stacks) == 1
                else torch.cat([stack.flatten(1) for stack in stacks], 1)
            )
            part = flat.new_empty(flat.shape[1])
            works.append(self._axis.start_sum_part(part, flat))
            self._pending.append((part, names, [stack.shape[1:] for stack in stacks]))
            for name in names:
                self.parameters[name].grad = None
        return Works(works)

    def _put(self, name: str, total: Tensor) -> None:
        self._kept[name] = total


def overlap(
    instructions: Sequence[Instruction],
    handlers: list[Callable[[], None]],
    reductions: Sequence[GradientReduction],
    graph: SegmentGraph,
    held: Callable[[int], Container[str]],
) -> None:
    """Let the last backward among ``handlers`` start the sums that it may. ``reductions`` are in the program's order.

    held    tells which parameters a segment reads: sums of others start after it
    """
    last, early = early_sums(instructions, graph)
    if last < 0:
        return
    own = held(instructions[last].segment)  # type: ignore[union-attr]  # it is a backward
    count = next(
        (n for n, r in enumerate(reductions[: len(early)]) if any(p not in own for p in r.parameters)),
        len(early),
    )
    if count:
        parameters = [list(r.parameters.values()) for r in reductions[:count]]
        beside = Overlap(parameters, [handlers[position] for position in early[:count]])
        handlers[last] = partial(beside.around, handlers[last])


class Overlap:
    """Sums beside a backward: ``starts[i]()`` starts sum i, of ``parameters[i]``."""

    def __init__(self, parameters: Sequence[Sequence[Tensor]], starts: Sequence[Callable[[], None]]) -> None:
        self._parameters = [[p for p in group if p.requires_grad] for group in parameters]
        self._starts = starts
        self._missing: list[int] = []
        self._next = 0

    def around(self, backward: Callable[[], None]) -> None:
        """Run ``backward``, starting each sum as soon as its gradients and the sums before it allow."""
        self._missing, self._next = [len(group) for group in self._parameters], 0
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))  # type: ignore[no-untyped-call]
            for number, group in enumerate(self._parameters)
            for parameter in group
        ]
        try:
            backward()
        finally:
            for hook in hooks:
                hook.remove()

    def _arrived(self, number: int, _: Any) -> None:
        self._missing[number] -= 1
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._starts[self._next]()
            self._next += 1
