"""Python values as descriptions: equal ones where code that reads the values cannot tell them apart.

A description is made of types, plain values and objects that count by identity. ``UnknownError`` is raised for what cannot
be described (an iterator, a generator of random numbers): code that reads it may do something else every time.
"""

from __future__ import annotations

import enum
import functools
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

Description: TypeAlias = Any
"""Nested tuples, compared with ``==``."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_WORDS = (slice, range, type(...), torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_BY_IDENTITY = (
    type,
    enum.Enum,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    type(threading.Lock()),
    type(threading.RLock()),
)
_CHANGE_UNSEEN = (Iterator, torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_LIBRARIES = ("typing", "typing_extensions", "logging", "re", "operator", "torch._ops")
"""Modules whose objects count by identity: types, loggers, patterns, ops. None is a switch that a model's code turns."""
MOST_VALUES = 20_000
"""The most values in one description; what reaches more (a vocabulary) is not worth comparing at every block."""


UNREAD = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "_abc_impl"})
"""Entries of classes that say nothing about what their code does."""


class UnknownError(Exception):
    """A value that cannot be described."""


@dataclass(frozen=True, eq=False)
class ByIdentity:
    """An object that equals itself alone."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Describer:
    """The values that one block's code may read, as descriptions; tensors are numbered in the order in which they come."""

    def __init__(self, block: nn.Module) -> None:
        # By the table of attributes: a tracer may show a module as a stand-in that shares it.
        self._paths = {id(vars(module)): path for path, module in block.named_modules()}
        self._within: dict[int, int] = {}
        """The depths of the objects whose description is being made."""
        self._outermost = MOST_VALUES
        """The least depth of an object that the description being made refers to."""
        self._left = MOST_VALUES
        self.tensors: list[Tensor] = []
        """The tensors that were described, each once."""
        self._known: dict[int, tuple[Any, Description]] = {}
        """Descriptions of objects, which are kept so that no other gets their ``id``."""
        self._by_identity = False

    def tensors_by_identity(self) -> None:
        """Let every tensor count by identity from now on."""
        self._by_identity = True
        self._known.clear()

    def path(self, module: nn.Module) -> str:
        """Return a module's path in the block."""
        path: str | None = self._paths.get(id(object.__getattribute__(module, "__dict__")))
        if path is None:
            raise UnknownError(f"a {type(module).__name__} outside of the block")
        return path

    def describe(self, value: Any) -> Description:
        """Return the description of a value. Raises UnknownError."""
        self._left -= 1
        if self._left < 0:
            raise UnknownError("too many values")
        kind = type(value)
        if kind in PLAIN or kind in _WORDS:
            return kind, value
        if isinstance(value, _BY_IDENTITY):
            return self._builtin(value)
        if isinstance(value, _CHANGE_UNSEEN):
            raise UnknownError(f"a {kind.__name__}")
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return kind, size_word(value)
        if isinstance(value, nn.Module):
            return nn.Module, self.path(value)
        if id(value) in self._within:
            self._outermost = min(self._outermost, self._within[id(value)])
            return "again", self._within[id(value)]
        if id(value) in self._known:
            return self._known[id(value)][1]
        depth = self._within[id(value)] = len(self._within)
        outermost, self._outermost = self._outermost, depth
        try:
            description = kind, self._parts(value)
        finally:
            del self._within[id(value)]
            below, self._outermost = self._outermost, min(outermost, self._outermost)
        if below >= depth:  # it says nothing about objects around it
            self._known[id(value)] = value, description
        return description

    def table(self, table: Mapping[Any, Any]) -> Description:
        """Describe a dictionary's items, in order."""
        return tuple((self.describe(key), self.describe(item)) for key, item in table.items())

    def _builtin(self, value: Any) -> Description:
        owner = getattr(value, "__self__", None)
        if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType) and not isinstance(
            owner, types.ModuleType | type | None
        ):
            return value.__name__, self.describe(owner)
        return ByIdentity(value)

    def _parts(self, value: Any) -> Description:
        """Describe what makes up a container, a function, or an object with attributes."""
        if type(value) is object:
            return ByIdentity(value)
        if isinstance(value, (int, float, complex, str, bytes)):
            base = next(base for base in (int, float, complex, str, bytes) if isinstance(value, base))
            return base.__repr__(value), self._attributes(value)
        if isinstance(value, Mapping):
            return self.table(value), self._attributes(value)
        if isinstance(value, list | tuple | deque | set | frozenset):
            return tuple(map(self.describe, value)), self._attributes(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return self.describe(value.__func__), self.describe(value.__self__)
        if isinstance(value, staticmethod | classmethod | functools._lru_cache_wrapper):
            return self.describe(value.__wrapped__)
        if isinstance(value, property):
            return self.describe(value.fget), self.describe(value.fset)
        if isinstance(value, functools.partial):
            return self.describe(value.func), self.describe(value.args), self.describe(value.keywords)
        if isinstance(value, ContextVar):
            return ByIdentity(value), self.describe(value.get(None))
        if isinstance(value, weakref.ref):
            return self.describe(value())
        if isinstance(value, np.ndarray):
            return (
                value.shape,
                value.dtype,
                value.tobytes() if value.size < MOST_VALUES else ByIdentity(value),
            )
        if isinstance(value, np.generic):
            return value.item()
        if type(value).__module__ in _LIBRARIES:
            return ByIdentity(value)
        if not hasattr(value, "__dict__") and not _slots(value):
            raise UnknownError(f"a {type(value).__name__}")
        return self._attributes(value), self._defaults(type(value))

    def _function(self, function: types.FunctionType) -> Description:
        cells = (cell.cell_contents for cell in function.__closure__ or () if _is_set(cell))
        defaults = (function.__defaults__, function.__kwdefaults__)
        return (
            ByIdentity(function.__code__),
            tuple(map(self.describe, cells)),
            tuple(map(self.describe, defaults)),
        )

    def _attributes(self, value: Any) -> Description:
        slots = ((name, self.describe(getattr(value, name))) for name in _slots(value))
        return self.table(getattr(value, "__dict__", {})), tuple(slots)

    def _defaults(self, kind: type) -> Description:
        """Describe the plain values that a class keeps for its objects."""
        return tuple(
            (name, self.describe(item))
            for base in kind.__mro__
            for name, item in vars(base).items()
            if isinstance(item, PLAIN) and name not in UNREAD
        )

    def _tensor(self, tensor: Tensor) -> Description:
        if self._by_identity:
            return ByIdentity(tensor), tensor._version
        number = next((n for n, known in enumerate(self.tensors) if known is tensor), None)
        if number is not None:
            return Tensor, number
        self.tensors.append(tensor)
        return Tensor, len(self.tensors) - 1, tensor_words(tensor)


def own_attributes(tensor: Tensor) -> set[str]:
    """Return the names of attributes that somebody has given a tensor."""
    return vars(tensor).keys() - _fakes_attributes()


@functools.cache
def _fakes_attributes() -> frozenset[str]:
    with FakeTensorMode() as mode:
        return frozenset({*vars(mode.from_tensor(torch.empty(0))), "_is_param"})


def tensor_words(tensor: Tensor) -> Description:
    """Describe all of a tensor but its values and its memory."""
    if own := own_attributes(tensor):
        raise UnknownError(f"{', '.join(own)} of a tensor")
    if tensor.layout is not torch.strided:
        raise UnknownError(f"a tensor in layout {tensor.layout}")
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    flags = (tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg())
    hooks = tuple(getattr(tensor, "_backward_hooks", None) or ())
    return type(tensor), tuple(map(size_word, sizes)), tensor.dtype, tensor.device, flags, hooks


def size_word(size: Any) -> Description:
    """Describe a size: a symbol by identity, as the tracer knows it, and what is computed from symbols by its formula."""
    if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
        return size
    expression = size.node.expr
    return (expression, ByIdentity(size.node)) if getattr(expression, "is_symbol", False) else expression


def _is_set(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _slots(value: Any) -> Iterable[str]:
    kind: Any = type(value)
    return [name for name in _slot_names(kind) if hasattr(value, name)]


@functools.lru_cache(maxsize=4096)
def _slot_names(kind: Any) -> tuple[str, ...]:
    named = (vars(cls).get("__slots__", ()) for cls in kind.__mro__)
    slots = (name for names in named for name in ([names] if isinstance(names, str) else names))
    return tuple(name for name in slots if name not in ("__dict__", "__weakref__"))
