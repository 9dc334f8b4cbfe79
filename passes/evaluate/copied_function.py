"""A function copied for a copied model: what it reads of the model, it reads of the copy.

    def loss(output, batch):                                          the same code, with the copy
        return mse(output, batch) + sum(p.square().sum()     ─►       of ``model`` in its closure,
                                        for p in model.parameters())  or among its globals

``copy.deepcopy`` leaves functions as they are: a copied model would be trained with a loss of the other one.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from passes.trace.python_state import names_in

FunctionT = TypeVar("FunctionT")

DEEPEST = 8
"""Objects in objects, and functions that functions call, are looked into so far. By hand."""


def copied_function(function: FunctionT, copies: Mapping[int, Any]) -> FunctionT:
    """Return ``function`` with ``copies`` in place of what it holds, or ``function`` itself where it holds none of them.

    ``copies``: by the ``id`` of what each is a copy of, as ``copy.deepcopy`` fills its memory. What is looked into:
    closures, globals that the code names, defaults, ``functools.partial``, methods, and objects that hold any of these.
    """
    found: FunctionT = _Copier(copies).copied(function)
    return found


class _Copier:
    """One copy of one function. ``_seen``: what was looked into already, by ``id``."""

    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies = copies
        self._seen: dict[int, Any] = {}
        self._depth = 0

    def copied(self, value: Any) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)]
        if id(value) in self._seen or self._depth == DEEPEST:
            return self._seen.get(id(value), value)
        self._seen[id(value)] = value  # until it is known: one may hold itself
        self._depth += 1
        self._seen[id(value)] = self._changed(value)
        self._depth -= 1
        return self._seen[id(value)]

    def _changed(self, value: Any) -> Any:
        match value:
            case types.FunctionType():
                return self._function(value)
            case types.MethodType():
                return self._rebuilt(value, [value.__func__, value.__self__], types.MethodType)
            case functools.partial():
                parts = [value.func, value.args, value.keywords]
                return self._rebuilt(value, parts, lambda f, args, kw: functools.partial(f, *args, **kw))
            case tuple() if type(value) is tuple:
                return self._rebuilt(value, list(value), lambda *items: items)
            case list() if type(value) is list:
                return self._rebuilt(value, value, lambda *items: list(items))
            case dict() if type(value) is dict:
                items = list(value.values())
                return self._rebuilt(value, items, lambda *new: dict(zip(value, new, strict=True)))
            case nn.Module() | type() | types.ModuleType():
                return value
        return self._object(value)

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells = function.__closure__ or ()
        held = [cell.cell_contents for cell in cells if _filled(cell)]
        names = [name for name in dict.fromkeys(names_in(function.__code__)) if name in function.__globals__]
        read = [function.__globals__[name] for name in names]
        if not self._differ([*held, *read, function.__defaults__, function.__kwdefaults__]):
            return function
        new = types.FunctionType(
            function.__code__,
            function.__globals__
            | {name: self.copied(value) for name, value in zip(names, read, strict=True)},
            function.__name__,
            self.copied(function.__defaults__),
            tuple(types.CellType(self.copied(c.cell_contents)) if _filled(c) else c for c in cells),
        )
        new.__kwdefaults__ = self.copied(function.__kwdefaults__)
        functools.update_wrapper(new, function)
        return new

    def _object(self, value: Any) -> Any:
        """Copy an object with attributes, if one of them holds a copied thing."""
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or not self._differ(attributes.values()):
            return value
        new = copy.copy(value)
        vars(new).update({name: self.copied(item) for name, item in attributes.items()})
        return new

    def _rebuilt(self, value: Any, parts: list[Any], make: Any) -> Any:
        return make(*map(self.copied, parts)) if self._differ(parts) else value

    def _differ(self, values: Iterable[Any]) -> bool:
        return any(self.copied(value) is not value for value in values)


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a variable that is assigned later
        return False
    return True
