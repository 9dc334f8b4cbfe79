"""The steps that take one tensor's memory layout from another's: slices, selections, permutations, at most one reshape.

    owner                         view                          steps
    size (4, 8), stride (8, 1)    size (2, 8), stride (8, 1)    slice(0, 1, 3)
                                  offset 8
    size (4, 8), stride (8, 1)    size (8, 4), stride (1, 8)    permute(1, 0)
    size (4, 4), stride (4, 1)    size (4,), stride (5,)        reshape(16), slice(0, 0, 16, 5)

A view that takes each of its dimensions from one dimension of the owner needs no more than indexing. Other views are
taken of the owner reshaped: flat, or with dimensions that end where the view's strides ask for it. What is found is
applied to tensors without memory and compared with the view, so that a wrong list of steps is never returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from runtime.state.state_view import ViewStep, taken


@dataclass(frozen=True)
class StridedLayout:
    """The elements of a memory that a tensor reads: counted from its owner's first one."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, tensor: Tensor, offset: int = 0) -> StridedLayout:
        return cls(tuple(tensor.size()), tuple(tensor.stride()), offset)

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """(stride, size) of the dimensions that matter, from the smallest stride on."""
        return tuple(sorted((t, n) for n, t in zip(self.size, self.stride, strict=True) if n != 1))

    @property
    def extent(self) -> int:
        """The number of elements from the first to the last one."""
        return 1 + sum((n - 1) * t for n, t in zip(self.size, self.stride, strict=True))

    @property
    def elements(self) -> int:
        return math.prod(self.size)

    @property
    def is_dense(self) -> bool:
        """True if the elements fill their extent, each of them once."""
        return self.is_injective and self.extent == self.elements

    @property
    def is_injective(self) -> bool:
        """True if no two elements are one number in memory, as far as strides that grow show it."""
        reach = 1
        for stride, size in self.steps:
            if stride < reach:
                return False
            reach += (size - 1) * stride
        return True

    def meta(self) -> Tensor:
        """Make a tensor of this layout without memory."""
        empty = torch.empty(self.offset + self.extent, device="meta")
        return empty.as_strided(self.size, self.stride, self.offset)


def view_steps(owner: StridedLayout, view: StridedLayout) -> tuple[ViewStep, ...] | None:
    """Return the steps from ``owner`` to ``view``; None if there are none of this kind."""
    if view.offset < 0 or not view.elements:
        return None
    for before, shaped in _shapes(owner, view):
        steps = _indexed(shaped, view)
        if steps is None:
            continue
        found = (*before, *steps)
        if _same(taken(found, owner.meta()), view):
            return found
    return None


def _same(tensor: Tensor, view: StridedLayout) -> bool:
    """Tell whether ``tensor`` reads the elements of ``view`` in its order."""
    own = StridedLayout.of(tensor, int(tensor.storage_offset()))
    strides = zip(view.size, view.stride, own.stride, strict=True) if own.size == view.size else None
    return strides is not None and own.offset == view.offset and all(n == 1 or a == b for n, a, b in strides)


def _shapes(
    owner: StridedLayout, view: StridedLayout
) -> Iterator[tuple[tuple[ViewStep, ...], StridedLayout]]:
    """Yield layouts of the owner's whole memory to index, with the steps that lead to them."""
    yield (), owner
    if not owner.is_dense:
        return
    order = sorted(range(len(owner.size)), key=lambda d: -owner.stride[d] * (owner.size[d] != 1))
    sorted_already = order == list(range(len(order)))
    before: tuple[ViewStep, ...] = () if sorted_already else (("permute", tuple(order)),)
    for ends in _divisions(owner, view):
        shape = tuple(large // small for large, small in pairwise(ends))
        yield (*before, ("reshape", shape)), StridedLayout(shape, ends[1:])


def _divisions(owner: StridedLayout, view: StridedLayout) -> Iterator[tuple[int, ...]]:
    """Yield descending strides to cut the owner's memory at, each a divisor of the one before, beginning with all of it."""
    elements = owner.elements
    yield (elements, 1)
    own = {edge for stride, size in view.steps if stride for edge in (stride, stride * size)}
    both = own | {edge for stride, size in owner.steps for edge in (stride, stride * size)}
    for edges in (both, own, {stride for stride, _ in view.steps if stride}):
        chain = [elements]
        for edge in sorted((edge for edge in edges if 1 < edge < elements), reverse=True):
            if chain[-1] % edge == 0:
                chain.append(edge)
        yield (*chain, 1)


def _indexed(owner: StridedLayout, view: StridedLayout) -> tuple[ViewStep, ...] | None:
    """Take each dimension of ``view`` from one of ``owner``: its beginning from the offset, its step from the stride."""
    starts = _starts(owner, view.offset)
    if starts is None:
        return None
    taken_from: dict[int, int] = {}  # dimension of the owner → of the view
    for dim, (size, stride) in enumerate(zip(view.size, view.stride, strict=True)):
        if size == 1 or stride == 0:
            continue
        source = next(
            (
                d
                for d, (n, t) in enumerate(zip(owner.size, owner.stride, strict=True))
                if d not in taken_from
                and n > 1
                and t
                and stride % t == 0
                and starts[d] + (size - 1) * (stride // t) < n
            ),
            None,
        )
        if source is None:
            return None
        taken_from[source] = dim
    steps: list[ViewStep] = []
    for d in reversed(range(len(owner.size))):  # from the last, so that selections leave the others' numbers
        if d not in taken_from:
            steps.append(("select", (d, starts[d])))
            continue
        dim = taken_from[d]
        step = view.stride[dim] // owner.stride[d]
        end = starts[d] + (view.size[dim] - 1) * step + 1
        end = owner.size[d] if step > 1 and end + step > owner.size[d] else end
        if (starts[d], end, step) != (0, owner.size[d], 1):
            steps.append(("slice", (d, starts[d], end, step)))
    kept = [taken_from[d] for d in sorted(taken_from)]
    order = tuple(kept.index(dim) for dim in sorted(kept))
    if order != tuple(range(len(order))):
        steps.append(("permute", order))
    steps += [("unsqueeze", (dim,)) for dim in range(len(view.size)) if dim not in kept]
    if any(view.size[dim] != 1 for dim in range(len(view.size)) if dim not in kept):
        steps.append(("expand", view.size))
    return tuple(steps)


def _starts(owner: StridedLayout, offset: int) -> list[int] | None:
    """Return the index in ``owner`` of the element at ``offset``."""
    starts = [0] * len(owner.size)
    for d in sorted(range(len(owner.size)), key=lambda d: -owner.stride[d]):
        if owner.size[d] > 1 and owner.stride[d]:
            starts[d] = min(offset // owner.stride[d], owner.size[d] - 1)
            offset -= starts[d] * owner.stride[d]
    return None if offset else starts
