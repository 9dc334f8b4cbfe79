"""The ranks that hold parts of one tensor, as the local ops see them."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor


class Peers(Protocol):
    """Ranks that hold parts of one tensor, and which of them this is (``runtime.mesh.axis``, or threads in proofs).

    Collectives take no part in autograd.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Return the sum or maximum over the ranks, in a tensor of its own."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return everybody's tensors, stacked: (ranks, *shape)."""

    def exchange(self, x: Tensor, cut: int, join: int) -> Tensor:
        """Cut ``x``, which is whole along ``cut``, and make it whole along ``join`` instead."""
