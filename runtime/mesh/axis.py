"""A rank's place on one axis of a mesh, and the collectives along it: plain tensors in, plain tensors out.

    mesh (2, 2), axes ("data", "tensor"), ranks 0 1 / 2 3
    rank 3 on "tensor": index 1 of 2, with rank 2                on "data": index 1 of 2, with rank 1

Along an axis of n ranks, for a dimension d:
    part       this rank's n-th of d                        gather     the n parts joined along d
    sum        added up                                     sum_part   added up, then this rank's n-th of d
    exchange   cut along one dimension, joined along another

Nothing is written into, unless ``reuse`` says so. n divides d: shardings are planned so.

On Gloo, ``gather`` and ``sum_part`` are made of messages (``runtime.mesh.gloo``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.errors import InternalError
from runtime.mesh.gloo import start_gather, start_sum_part

# torch 2.13 renamed both.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

WaitFor = Callable[[Any], None]
"""A function that waits for the pending work of a collective."""


def plainly(work: Any) -> None:
    """Wait without a time limit of its own."""
    work.wait()


@dataclass(frozen=True)
class Axis:
    """A rank's place on an axis of a mesh, and the collectives along it."""

    name: str
    size: int
    index: int
    group: Any = field(repr=False, compare=False)
    order: tuple[int, ...] | None = None
    """The rank in ``group`` of each place; None: place i is rank i."""
    wait: WaitFor = field(default=plainly, repr=False, compare=False)

    @property
    def rank(self) -> int:
        """This rank's place, by the name that ``runtime.ops.local`` gives it."""
        return self.index

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Return the sum or maximum over the axis, for ``runtime.ops.local``."""
        if op == "sum":
            return self.sum(tensor)
        highest = _plain(tensor).clone()
        self.wait(dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group, async_op=True))
        return highest

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return everybody's tensors, stacked (places, *shape), for ``runtime.ops.local``."""
        return self.gather(tensor.unsqueeze(0), 0)

    def part(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part of ``x`` along ``dim``: contiguous where ``x`` is."""
        return _chunks(x, dim, self)[self.index].contiguous()

    def sum(self, x: Tensor, *, reuse: bool = False) -> Tensor:
        """Return the sum over the axis. ``reuse``: ``x`` may be written into."""
        return self.start_sum(x, reuse=reuse)()

    def start_sum(self, x: Tensor, *, reuse: bool = False) -> Callable[[], Tensor]:
        """Start ``sum`` and return a function that waits for it."""
        total = _plain(x)
        if total is x or total.data_ptr() == x.data_ptr():
            total = (
                x.detach() if reuse and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
            )
        work = dist.all_reduce(total, group=self.group, async_op=True)
        return lambda: self._waited_for(work, total)

    def _waited_for(self, work: Any, result: Tensor) -> Tensor:
        self.wait(work)
        return result

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the parts of all ranks joined along ``dim``."""
        return self.start_whole(x, dim)()

    def start_whole(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        """Start ``gather`` and return a function that waits for it."""
        parts = x.new_empty((self.size, *x.shape))
        work = self.start_gather(parts, x)
        return partial(self._whole, work, parts, dim)

    def start_wholes(self, xs: Sequence[Tensor], dims: Sequence[int]) -> list[Callable[[], Tensor]]:
        """Start to gather several tensors at once, as one collective where the backend can; see ``start_whole``."""
        if len(xs) > 1 and self._sends(xs):
            return self._start_packed_wholes([_plain(x) for x in xs], dims)
        if len(xs) < 2 or not self._coalesces:
            return [self.start_whole(x, dim) for x, dim in zip(xs, dims, strict=True)]
        xs = [_plain(x) for x in xs]
        parts = [x.new_empty((self.size, *x.shape)) for x in xs]
        start = self.group.allgather_into_tensor_coalesced
        work = start(_flat(parts), _flat(xs))
        return [partial(self._whole, work, own, dim) for own, dim in zip(parts, dims, strict=True)]

    def _start_packed_wholes(self, xs: Sequence[Tensor], dims: Sequence[int]) -> list[Callable[[], Tensor]]:
        """Start to gather contiguous tensors, those of a data type as one."""
        found: dict[int, Callable[[], Tensor]] = {}
        for own in _by_type(xs):
            packed = torch.cat([xs[n].view(-1) for n in own])
            rows = packed.new_empty((self.size, len(packed)))
            work = self.start_gather(rows, packed)
            for n, columns in zip(own, torch.split(rows, [xs[n].numel() for n in own], 1), strict=True):
                found[n] = partial(self._whole, work, columns.view(self.size, *xs[n].shape), dims[n])
        return [found[n] for n in range(len(xs))]

    def _start_packed_sums(self, parts: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
        """Start to sum this rank's row of each of ``parts`` [n, …], those of a data type as one."""
        found: dict[int, Callable[[], Tensor]] = {}
        for own in _by_type(parts):
            packed = torch.cat([parts[n].flatten(1) for n in own], 1)
            total = packed.new_empty(packed.shape[1])
            work = self.start_sum_part(total, packed)
            for n, piece in zip(own, torch.split(total, [parts[n][0].numel() for n in own]), strict=True):
                found[n] = partial(self._waited_for, work, piece.view(parts[n].shape[1:]))
        return [found[n] for n in range(len(parts))]

    def _whole(self, work: Any, parts: Tensor, dim: int) -> Tensor:
        return self.joined(self._waited_for(work, parts), dim)

    def start_gather(self, parts: Tensor, x: Tensor) -> Any:
        """Start to fill ``parts`` [n, …] with ``x`` of every rank of the group; return the pending work."""
        x = _plain(x)
        if self._sends([x]):
            return start_gather(self.group, self._here, parts, x)
        return _all_gather(parts.view(-1), x.view(-1), group=self.group, async_op=True)

    def joined(self, parts: Tensor, dim: int) -> Tensor:
        """Join what ``start_gather`` has filled along ``dim`` of a part, in the order of places."""
        return _joined(parts, dim % (parts.dim() - 1), self.order)

    def sum_part(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part of the sum over the axis."""
        return self.start_sum_of_parts(x, dim)()

    def start_sum_of_parts(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        """Start ``sum_part`` and return a function that waits for it."""
        parts = self.stacked(x, dim)
        result = parts.new_empty(parts.shape[1:])
        work = self.start_sum_part(result, parts)
        return lambda: self._waited_for(work, result)

    def start_sums_of_parts(self, xs: Sequence[Tensor], dims: Sequence[int]) -> list[Callable[[], Tensor]]:
        """Start several ``sum_part`` at once, as one collective where the backend can; results may share a storage."""
        if len(xs) > 1 and self._sends(xs):
            return self._start_packed_sums([self.stacked(x, dim) for x, dim in zip(xs, dims, strict=True)])
        if len(xs) < 2 or not self._coalesces:
            return [self.start_sum_of_parts(x, dim) for x, dim in zip(xs, dims, strict=True)]
        parts = [self.stacked(x, dim).contiguous() for x, dim in zip(xs, dims, strict=True)]
        results = [own.new_empty(own.shape[1:]) for own in parts]
        start = self.group.reduce_scatter_tensor_coalesced
        work = start(_flat(results), _flat(parts))
        return [partial(self._waited_for, work, result) for result in results]

    @cached_property
    def _coalesces(self) -> bool:
        """NCCL makes one collective of several; those made of messages are packed into one."""
        return self.size > 1 and bool(dist.get_backend(self.group) == "nccl")

    def stacked(self, x: Tensor, dim: int) -> Tensor:
        """Stack the parts of ``x`` along ``dim``, [n, …], in the order of the group's ranks."""
        return _stacked(_plain(x), dim, self)

    def start_sum_part(self, part: Tensor, parts: Tensor) -> Any:
        """Start to fill ``part`` […] with this rank's row of the sum of ``parts`` [n, …]; return the pending work."""
        if self._sends([parts]):
            return start_sum_part(self.group, self._here, part, parts)
        return _reduce_scatter(part.view(-1), parts.view(-1), group=self.group, async_op=True)

    def _sends(self, tensors: Sequence[Tensor]) -> bool:
        """Collectives of these tensors are made of messages (``runtime.mesh.gloo``)."""
        return self._of_messages and all(tensor.device.type == "cpu" for tensor in tensors)

    @cached_property
    def _of_messages(self) -> bool:
        return self.size > 1 and bool(dist.get_backend(self.group) == "gloo")

    @property
    def _here(self) -> int:
        """This rank in ``group``."""
        return self.index if self.order is None else self.order[self.index]

    def exchange(self, x: Tensor, cut: int, join: int) -> Tensor:
        """Cut ``x``, which is whole along ``cut``, and make it whole along ``join`` instead."""
        sent = _stacked(_plain(x), cut, self)
        received = torch.empty_like(sent)
        self.wait(dist.all_to_all_single(received.view(-1), sent.view(-1), group=self.group, async_op=True))
        return _joined(received, join % x.dim(), self.order)

    def first(self, x: Tensor) -> Tensor:
        """Return ``x`` on the first rank of the axis, zeros elsewhere."""
        return x if self.index == 0 else torch.zeros_like(x)


def _plain(x: Tensor) -> Tensor:
    """Return ``x`` as a collective reads it: contiguous numbers in memory, no conjugation or sign pending."""
    return x.detach().resolve_conj().resolve_neg().contiguous()


def _chunks(x: Tensor, dim: int, axis: Axis) -> tuple[Tensor, ...]:
    size = x.shape[dim]
    if size % axis.size:
        raise InternalError(
            f"cannot part a tensor over the mesh axis {axis.name}",
            [f"dimension {dim} of {tuple(x.shape)} does not divide by {axis.size}"],
        )
    return x.chunk(axis.size, dim)


def _by_type(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group the numbers of tensors by data type."""
    found: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(number)
    return list(found.values())


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    """View tensors as one-dimensional ones; complex ones as real, since NCCL has no complex type."""
    return [(torch.view_as_real(t) if t.is_complex() else t).view(-1) for t in tensors]


def _stacked(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Stack what goes to each rank of the group: [n, …]."""
    dim %= x.dim()
    chunks = _chunks(x, dim, axis)
    if dim == 0 and axis.order is None:
        return x.view(axis.size, *chunks[0].shape)
    if axis.order is not None:
        place_of = {rank: place for place, rank in enumerate(axis.order)}
        chunks = tuple(chunks[place_of[rank]] for rank in range(axis.size))
    return torch.stack(chunks)


def _joined(parts: Tensor, dim: int, order: tuple[int, ...] | None) -> Tensor:
    """Join the rows of ``parts`` [n, …] along ``dim`` of a row."""
    if dim == 0 and order is None:
        return parts.flatten(0, 1)
    places = parts.unbind(0)
    return torch.cat(places if order is None else [places[rank] for rank in order], dim)
