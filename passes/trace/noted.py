"""One piece of a model's Python state as it was found: a dictionary, list, tensor or generator, which can be put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Types of values that are compared by value."""
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a tensor that hold its hooks."""
_GONE = object()


@dataclass(frozen=True)
class Change:
    """A piece of Python state that is not what it was. ``owner``: the object whose attribute or element it is."""

    path: str
    text: str
    owner: object

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


class Noted:
    """One object as it was found. Subclasses know one kind of object each."""

    def __init__(self, path: str, found: Any) -> None:
        self.path, self.found = path, found

    def restore(self) -> None:
        """Make the object what it was."""
        raise NotImplementedError

    def changes(self) -> Iterator[Change]:
        """Yield what differs now."""
        raise NotImplementedError


class NotedDict(Noted):
    """A dictionary: attributes of an object, or a dictionary that some object holds."""

    def __init__(self, path: str, found: dict[Any, Any], owner: object) -> None:
        super().__init__(path, found)
        self.saved, self.owner = dict(found), owner

    def restore(self) -> None:
        now = self.found
        if len(now) != len(self.saved) or any(
            a is not b or now[a] is not value for (a, value), b in zip(self.saved.items(), now, strict=True)
        ):
            now.clear()
            now.update(self.saved)

    def changes(self) -> Iterator[Change]:
        for key, old in self.saved.items():
            new = self.found.get(key, _GONE)
            if new is not old and not (isinstance(old, PLAIN) and type(new) is type(old) and new == old):
                yield Change(joined(self.path, key), _step(old, new), self.owner)
        added = [key for key in self.found if key not in self.saved]
        if added and isinstance(self.owner, nn.Module | type):
            for key in added:
                yield Change(joined(self.path, key), f"new, {_shown(self.found[key])}", self.owner)
        elif added:
            yield Change(self.path, f"{len(self.saved)} -> {len(self.found)} items", self.owner)


class Sequence(Noted):
    """A list or a deque."""

    def __init__(self, path: str, found: Any, owner: object) -> None:
        super().__init__(path, found)
        self.saved, self.owner = list(found), owner

    def restore(self) -> None:
        now = self.found
        if len(now) != len(self.saved) or any(a is not b for a, b in zip(now, self.saved, strict=True)):
            now.clear()
            now.extend(self.saved)

    def changes(self) -> Iterator[Change]:
        now = list(self.found)
        if len(now) != len(self.saved):
            yield Change(self.path, f"{len(self.saved)} -> {len(now)} items", self.owner)
        elif any(
            a is not b and not (isinstance(a, PLAIN) and a == b) for a, b in zip(now, self.saved, strict=True)
        ):
            yield Change(self.path, "other items", self.owner)


class Set(Noted):
    """A set."""

    def __init__(self, path: str, found: set[Any], owner: object) -> None:
        super().__init__(path, found)
        self.saved, self.owner = set(found), owner

    def restore(self) -> None:
        if self.found != self.saved:
            self.found.clear()
            self.found.update(self.saved)

    def changes(self) -> Iterator[Change]:
        if self.found != self.saved:
            yield Change(self.path, f"{len(self.saved)} -> {len(self.found)} items", self.owner)


class NotedValue(Noted):
    """An object whose state can be read and set as one value: a generator, a cell of a closure, an array, a class."""

    def __init__(
        self,
        path: str,
        read: Callable[[], Any],
        write: Callable[[Any], object],
        owner: object,
        word: str = "",
    ) -> None:
        super().__init__(path, None)
        self.read, self.write, self.owner, self.word = read, write, owner, word
        self.saved = read()

    def restore(self) -> None:
        if not same(self.read(), self.saved):
            self.write(self.saved)

    def changes(self) -> Iterator[Change]:
        now = self.read()
        if not same(now, self.saved):
            yield Change(self.path, self.word or _step(self.saved, now), self.owner)


class NotedTensor(Noted):
    """A tensor: its memory, its values, its gradient and its hooks."""

    def __init__(self, path: str, found: Tensor, registered: bool, values: bool) -> None:
        super().__init__(path, found)
        self.registered = registered
        real = not (found.is_meta or isinstance(found, FakeTensor) or found.is_inference())
        self.memory = found.detach()
        self.saved = self.memory.clone() if real and values else None
        self.grad = found.grad if found.is_leaf else None
        self.requires_grad = found.requires_grad
        self.hooks = [(name, dict(getattr(found, name) or {})) for name in TENSOR_HOOKS]

    def restore(self) -> None:
        self.restore_values()
        now = self.found
        if now.is_leaf:
            if now.requires_grad != self.requires_grad:
                now.requires_grad_(self.requires_grad)
            now.grad = self.grad
        for name, saved in self.hooks:
            table = getattr(now, name)
            if table is not None and dict(table) != saved:
                table.clear()
                table.update(saved)

    def restore_values(self) -> None:
        """Put back the memory that the tensor had, and the values in it."""
        if self.saved is None:
            return
        with torch.no_grad():
            if self.found.is_leaf and not alike(self.found, self.memory):
                self.found.data = self.memory
            if not equal(self.memory, self.saved):
                self.memory.copy_(self.saved)

    @property
    def changed(self) -> bool:
        """True if it has other values now."""
        return self.saved is not None and not equal(self.found.detach(), self.saved)

    def changes(self) -> Iterator[Change]:
        if not self.registered and self.changed:
            yield Change(self.path, "other values", self.found)
        for name, saved in self.hooks:
            now = len(getattr(self.found, name) or {})
            if now != len(saved):
                yield Change(self.path, f"{len(saved)} -> {now} hooks", self.found)


def joined(path: str, key: object) -> str:
    """Return the path of an attribute or element."""
    if not isinstance(key, str):
        return f"{path}[{key!r}]"
    return f"{path}.{key}".lstrip(".")


def alike(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are the same memory, seen in the same way."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return True
    return (
        a.dtype == b.dtype
        and a.device == b.device
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.data_ptr() == b.data_ptr()
    )


def equal(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors have the same values; a nan is equal to itself."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout or a.device != b.device:
        return False
    if a.layout is not torch.strided:  # few kernels take such tensors
        a, b = a.to_dense(), b.to_dense()
    if a.is_quantized:
        return torch.equal(a, b)
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def same(a: Any, b: Any) -> bool:
    """Tell whether two values of whatever kind are the same, tensors and arrays inside them included."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return equal(a.detach(), b.detach())
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    answer = a == b
    return bool(answer.all()) if hasattr(answer, "all") else bool(answer)


def _step(old: object, new: object) -> str:
    if new is _GONE:
        return f"{_shown(old)} -> gone"
    before, after = _shown(old), _shown(new)
    return f"{before} -> {after}" if before != after else f"another {after}"


def _shown(value: object) -> str:
    """Return a value in a few words."""
    if isinstance(value, PLAIN):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:37]}..."
    if isinstance(value, Tensor):
        return f"tensor of shape {tuple(value.shape)}"
    return type(value).__name__
