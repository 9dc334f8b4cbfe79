"""Counts what a piece of code makes a device do: arithmetic, memory traffic, kernel launches.

A dispatch mode sees each kernel after composite ops have fallen apart. FLOPs come from formulas
(``passes.costs.arithmetic``); bytes are the operands read and the results written, except for kernels that touch only part
of an operand.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models.compute import MOST_ALIGNED_SHARE, OpClass
from passes.costs.arithmetic import arithmetic, is_uncounted

aten = torch.ops.aten

_FREE = frozenset(
    {
        aten._unsafe_view,
        aten.empty,
        aten.empty_like,
        aten.empty_strided,
        aten.new_empty,
        aten.new_empty_strided,
        aten.lift_fresh,
        aten.scalar_tensor,
    }
)
"""Ops that neither read nor write memory but are not declared views."""

_GATHER = frozenset(
    {aten.embedding, aten.index_select, aten.gather, aten.index, aten.take, aten.nll_loss_forward}
)
"""Read of their first operand as much as they write (a row per index), not all of it."""
_BAGS = frozenset({aten._embedding_bag, aten._embedding_bag_forward_only})
"""Read a row of their first operand per index, and write one per bag."""

_SCATTER = frozenset({aten.index_put_, aten.index_add_, aten.scatter_, aten.scatter_add_, aten.copy_})
"""Write of their first operand as much as the values they are given."""

_WRITE_ONLY = frozenset({aten.fill_, aten.zero_, aten.bernoulli_, aten.uniform_, aten.normal_, aten.random_})
"""Overwrite their operand without reading it."""

_READ_TWICE: Mapping[Any, int] = {
    aten.native_batch_norm: 1,
    aten._native_batch_norm_legit: 1,
    aten.native_group_norm: 1,
    aten.native_batch_norm_backward: 2,
    aten.native_group_norm_backward: 2,
}
"""Norms over more than a row read their first operands twice, so many of them: for the sums, then with them.

Not in 16 bits, where cuDNN's kernels hold them meanwhile. Measured on an H100: ResNet-50's in float32 take 6.0 ms of a step
(``make gpu``, docs/10), read once they would take 3.5, read twice 5.1.
"""

_CONVOLUTIONS = frozenset({aten.convolution, aten._convolution, aten.convolution_backward})


@dataclass(frozen=True)
class KernelCounts:
    """Sums over kernels."""

    flops: int = 0
    bytes: int = 0
    launches: int = 0
    peak_bytes: int = 0
    """The most bytes alive at once of tensors made meanwhile."""


class AliveStorages:
    """The bytes of storages that are alive, each counted once from when it is added until nothing refers to it."""

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._current_bytes = self._base_bytes = self._peak_bytes = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor``, if it is not counted yet."""
        storage = tensor.untyped_storage()
        key, size_bytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def ended(_: object) -> None:
            del self._alive[key]
            self._current_bytes -= size_bytes

        self._alive[key] = weakref.ref(storage, ended)
        self._current_bytes += size_bytes
        self._peak_bytes = max(self._peak_bytes, self._current_bytes)

    def take_peak(self) -> int:
        """Return the most bytes alive since the last call, beside those that were alive then."""
        most = self._peak_bytes - self._base_bytes
        self._base_bytes = self._peak_bytes = self._current_bytes
        return most


class KernelCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the kernels dispatched inside it. Enter it inside a ``FakeTensorMode``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flops = self._bytes = self._launches = 0
        self._alive = AliveStorages()
        self.op_class: OpClass = "memory"
        """The class of the arithmetic that was seen so far."""
        self.uncounted: dict[str, None] = {}
        """Names of kernels that may do arithmetic and have no formula."""
        self._flops_of_share: dict[float, int] = {}

    @property
    def share(self) -> float:
        """Arithmetic that a GPU seems to do over that which is counted, where factors of products are not aligned."""
        counted = sum(self._flops_of_share.values())
        if len(self._flops_of_share) < 2 or not counted:
            return max(self._flops_of_share, default=1.0)
        return round(sum(share * flops for share, flops in self._flops_of_share.items()) / counted, 6)

    def take(self) -> KernelCounts:
        """Return the counts since the last call."""
        counts = KernelCounts(self._flops, self._bytes, self._launches, self._alive.take_peak())
        self._flops = self._bytes = self._launches = 0
        return counts

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view:
            for tensor in _tensors(result):
                self._alive.add(tensor)
        if not func.is_view and func.namespace != "prim" and func._overloadpacket not in _FREE:
            self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        op, written = func._overloadpacket, sum(map(_bytes, _tensors(result)))
        if op in _WRITE_ONLY:
            moved = written
        elif op in _GATHER:
            moved = 2 * written + sum(map(_bytes, _tensors(args[1:])))
        elif op in _BAGS:
            table, indices = args[:2]
            moved = written + indices.numel() * table.shape[1] * table.element_size()
            moved += sum(map(_bytes, _tensors((*args[1:], *kwargs.values()))))
        elif op in _SCATTER:
            moved = 2 * sum(map(_bytes, _tensors(args[1:])))
        elif op is aten.nll_loss_backward:
            moved = written + sum(map(_bytes, _tensors(args[2:])))
        else:
            moved = written + sum(map(_bytes, _tensors((*args, *kwargs.values()))))
            moved += sum(map(_bytes, filter(_is_wide, _tensors(args[: _READ_TWICE.get(op, 0)]))))
        self._bytes += moved
        self._launches += 1
        work = arithmetic(func, args, kwargs, result)
        if work is None:
            if is_uncounted(func):
                self.uncounted[func._schema.name] = None
            return
        self._flops += work.flops
        if op in _CONVOLUTIONS:
            self.op_class = "conv"
        elif self.op_class == "memory":
            self.op_class = "attention" if "attention" in op.__name__ else "matmul"
        if self.op_class == "matmul":
            share = max(map(_misaligned, work.factors), default=1.0)
            self._flops_of_share[share] = self._flops_of_share.get(share, 0) + work.flops


def _misaligned(tensor: torch.Tensor) -> float:
    """Return how many times as long a product takes whose operand or result is ``tensor``, for where its rows begin.

    Tensor cores load 16 bytes at a time. Measured on an A100 in float16, 8,192 x 14,336 by 51,136 to 51,216 columns, over
    the time with a multiple of 16 columns (EleutherAI/cookbook, sizing/results, vocabulary sweep): 0.29 of the speed
    with odd, 0.55 with even numbers, 0.89 with multiples of 8. Types of 32 bits are taken as they are.
    """
    if tensor.dim() < 2 or tensor.dtype.itemsize != 2:
        return 1.0
    between = max(tensor.stride()[-2:])
    if between % 16 == 0 or 1 in tensor.shape[-2:]:
        return 1.0
    return MOST_ALIGNED_SHARE if between % 8 == 0 else 1 / 0.55 if between % 2 == 0 else 1 / 0.29


def _is_wide(tensor: torch.Tensor) -> bool:
    return tensor.dtype.itemsize > 2


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _bytes(tensor: torch.Tensor) -> int:
    """Count bytes a kernel touches: an expanded tensor is read once from memory, then from cache."""
    return min(tensor.numel() * tensor.dtype.itemsize, tensor.untyped_storage().nbytes())
