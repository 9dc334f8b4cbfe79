"""The memory in which a tensor lies, and whether two tensors have elements in common.

A place is a space (a device's memory; a tensor without values has that of its storage alone) and the bytes in it.
Storages are compared by address, so that two of them over one NumPy array are one memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from passes.trace.view_steps import StridedLayout

MOST_COMPARED = 2**26
"""The most elements that are compared one by one; larger tensors with gaps count as overlapping where their extents do."""


@dataclass(frozen=True)
class MemoryPlace:
    """The bytes from ``start`` to ``end`` of ``space``, which elements of ``dtype`` are read from by ``layout``."""

    space: tuple[str, int]
    start: int
    dtype: torch.dtype
    layout: StridedLayout

    @property
    def end(self) -> int:
        return self.start + self.layout.extent * self.dtype.itemsize

    @property
    def is_injective(self) -> bool:
        """True if no two elements are one number in memory."""
        if self.layout.is_injective:
            return True
        found = self._elements(self.start)
        return found is not None and len(set(found.tolist())) == found.numel()

    def offset_in(self, owner: MemoryPlace) -> int | None:
        """Return the first element's distance from the owner's, in elements; None if that is no whole number."""
        distance = self.start - owner.start
        return distance // self.dtype.itemsize if distance % self.dtype.itemsize == 0 else None

    def overlaps(self, other: MemoryPlace) -> bool:
        """Tell whether some number belongs to both."""
        if self.space != other.space or self.start >= other.end or other.start >= self.end:
            return False
        if self.layout.is_dense and other.layout.is_dense:
            return True
        first = min(self.start, other.start)
        mine, theirs = self._elements(first), other._elements(first)
        if self.dtype.itemsize != other.dtype.itemsize or mine is None or theirs is None:
            return True
        return bool(torch.isin(mine, theirs).any())

    def _elements(self, start: int) -> Tensor | None:
        """Number the elements from byte ``start`` on; None if that is too much work or no whole number."""
        distance = self.start - start
        if self.layout.elements > MOST_COMPARED or distance % self.dtype.itemsize:
            return None
        numbers = torch.tensor([distance // self.dtype.itemsize])
        for size, stride in zip(self.layout.size, self.layout.stride, strict=True):
            numbers = (numbers.unsqueeze(1) + torch.arange(size) * stride).reshape(-1)
        return numbers


def memory_place(tensor: Tensor) -> MemoryPlace | None:
    """Return the place of a tensor; None if it has no elements, or no memory that addresses count in."""
    if tensor.layout != torch.strided or not tensor.numel() or tensor.is_quantized:
        return None
    if not all(isinstance(number, int) for number in (*tensor.size(), *tensor.stride())):
        return None
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # a subclass that wraps other tensors
        return None
    offset_bytes = int(tensor.storage_offset()) * tensor.dtype.itemsize
    layout = StridedLayout.of(tensor)
    has_address = not tensor.is_meta and not isinstance(tensor, FakeTensor) and storage.data_ptr()
    if has_address:
        space = str(tensor.device), 0
        return MemoryPlace(space, storage.data_ptr() + offset_bytes, tensor.dtype, layout)
    return MemoryPlace(("storage", int(storage._cdata)), offset_bytes, tensor.dtype, layout)
