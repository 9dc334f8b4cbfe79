"""The tensors of a model that share memory: which are kept as views of an owner, and which cannot be.

    self.register_buffer("mirror", self.a.weight.data)        a view of a.weight: kept
    self.register_buffer("rows", self.table[2:4])             a view of the buffer table: kept
    self.b.weight = nn.Parameter(self.a.weight.data[:2])      two parameters over the same numbers: refused
    flat[:6], flat[6:]                                        parameters beside each other: nothing is shared

The owner is the parameter, or the buffer that holds all elements of the others. What reads the owner's numbers in another
data type, or in an order that no view op makes, cannot be kept. Buffers that overlap and cannot be kept are refused only
if forward writes one of them; else they are what they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from cost_models.errors import ModelError
from passes.trace.view_steps import StridedLayout, view_steps
from runtime.state.state_view import StateView

__all__ = ["OwnerView", "SharedStorage", "shared_storage"]

_WAYS_OUT = [
    "assign the one Parameter to both modules, and take slices or reshapes of it in forward",
    "give each a memory of its own: tensor.clone()",
]


@dataclass(frozen=True)
class StateTensor:
    """A parameter or buffer, and its memory."""

    name: str
    tensor: Tensor
    place: MemoryPlace

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    @property
    def is_trained(self) -> bool:
        return self.is_parameter and self.tensor.requires_grad


@dataclass(frozen=True)
class OwnerView:
    """A tensor's ``view`` of its owner, or None, and why there is none."""

    owner: str
    view: StateView | None
    differentiable: bool = False
    """True if gradients of the view are the owner's: it was taken of it with autograd on."""
    why: str = ""


@dataclass(frozen=True)
class SharedStorage:
    """The memory of a model's state. ``views``: buffers that are read from an owner, by each of their names."""

    views: Mapping[str, OwnerView] = field(default_factory=dict)
    loose: tuple[tuple[str, str, str], ...] = ()
    """Pairs of tensors that overlap and cannot be kept if one is written, and why."""
    owners: tuple[StateTensor, ...] = ()
    """The tensors with a memory of their own, in the order of their addresses."""

    def owner_of(self, tensor: Tensor) -> OwnerView | None:
        """Return how ``tensor``, which is no parameter or buffer, is read from the state; None if it shares nothing."""
        place = memory_place(tensor)
        if place is None:
            return None
        sharing = [own for own in self.owners if own.place.overlaps(place)]
        return next((_found(own, tensor, place) for own in sharing), None)


def shared_storage(model: nn.Module, not_saved: Collection[str] = ()) -> SharedStorage:
    """Group the model's parameters and buffers by memory; raise ModelError for parameters that cannot be kept.

    ``not_saved``: the buffers that the state dict leaves out.
    """
    state = list(_state_of(model))
    names = _names_of_buffers(model)
    problems = [
        f"{own.name}: several of its elements are one number in memory (expand): an optimizer would train them apart"
        for own in state
        if own.is_trained and not own.place.is_injective
    ]
    views: dict[str, OwnerView] = {}
    loose: list[tuple[str, str, str]] = []
    taken: set[str] = set()
    for group in _groups(state):
        owner = max(group, key=lambda own: (own.is_trained, own.is_parameter, own.place.layout.elements))
        for other in group:
            if other is owner:
                continue
            found = _found(owner, other.tensor, other.place)
            if other.is_parameter and (owner.is_trained or other.is_trained):
                problems.append(f"{owner.name} and {other.name}: a plan would train two copies")
            elif found.view is not None and not other.is_parameter:
                for name in names[id(other.tensor)]:
                    view = replace(found.view, persistent=name not in not_saved)
                    views[name] = replace(found, view=view)
                taken.add(other.name)
            elif owner.is_trained and other.place.overlaps(owner.place):
                problems.append(f"{owner.name} and {other.name}: {found.why}")
            else:
                loose += [
                    (third.name, other.name, found.why)
                    for third in group
                    if third is not other and third.place.overlaps(other.place)
                ]
    if problems:
        raise ModelError(
            "two parameters or buffers share their memory without being one", problems, _WAYS_OUT
        )
    return SharedStorage(views, tuple(loose), tuple(own for own in state if own.name not in taken))


def _state_of(model: nn.Module) -> Iterator[StateTensor]:
    """Yield the parameters and buffers that have memory, each once."""
    seen: set[int] = set()
    for source in (model.named_parameters(), model.named_buffers()):
        for name, tensor in source:
            place = memory_place(tensor)
            if place is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield StateTensor(name, tensor, place)


def _names_of_buffers(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each buffer, by its ``id``."""
    names: dict[int, list[str]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    return names


def _groups(state: list[StateTensor]) -> Iterator[list[StateTensor]]:
    """Yield the tensors that share numbers, two or more each, in the model's order."""
    order = {own.name: number for number, own in enumerate(state)}
    reaching: list[StateTensor] = []
    end = 0
    space: tuple[str, int] | None = None
    for own in (*sorted(state, key=lambda own: (own.place.space, own.place.start)), None):
        if own is not None and own.place.space == space and own.place.start < end:
            reaching.append(own)
            end = max(end, own.place.end)
            continue
        for group in _connected(reaching):
            if len(group) > 1:
                yield sorted(group, key=lambda member: order[member.name])
        if own is not None:
            reaching, end, space = [own], own.place.end, own.place.space


def _connected(candidates: list[StateTensor]) -> list[list[StateTensor]]:
    """Part tensors whose extents meet into those that are connected by common numbers."""
    groups: list[list[StateTensor]] = []
    for own in candidates:
        touching = [g for g in groups if any(own.place.overlaps(member.place) for member in g)]
        groups = [g for g in groups if g not in touching]
        groups.append([own, *(member for g in touching for member in g)])
    return groups


def _found(owner: StateTensor, tensor: Tensor, place: MemoryPlace) -> OwnerView:
    """Return the view of ``owner`` that ``tensor`` is, or why it is none."""
    if place.dtype != owner.place.dtype:
        return OwnerView(
            owner.name, None, why=f"one memory is read as {owner.place.dtype} and as {place.dtype}"
        )
    offset = place.offset_in(owner.place)
    layout = StridedLayout(place.layout.size, place.layout.stride, offset or 0)
    inside = offset is not None and offset >= 0 and place.end <= owner.place.end
    steps = view_steps(owner.place.layout, layout) if inside else None
    if steps is None:
        reason = (
            "its elements are in an order that no view takes" if inside else "neither holds all of the other"
        )
        return OwnerView(owner.name, None, why=reason)
    # Autograd knows the view's base by a tensor of its own making: memory tells that it is the owner.
    base = tensor._base if tensor.requires_grad else None
    differentiable = owner.is_trained and (
        tensor is owner.tensor or (base is not None and base is owner.tensor)
    )
    view = StateView(owner.name, steps, tuple(tensor.shape), persistent=False)
    return OwnerView(owner.name, view, differentiable)


MOST_COMPARED = 2**26
"""The most elements that are compared one by one; larger tensors with gaps count as overlapping where their extents do."""


@dataclass(frozen=True)
class MemoryPlace:
    """The bytes from ``start`` to ``end`` of ``space``, which elements of ``dtype`` are read from by ``layout``.

    A space is a device's memory; a tensor without values has that of its storage alone. Storages are compared by address,
    so that two of them over one NumPy array are one memory.
    """

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
