"""The lines of the user's code that a refusal names: where a hook is written, and where an attribute is changed."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import nn

from passes.trace.noted import Change


def line_of(function: Callable[..., object]) -> str:
    """Return "name (file.py:line)" of a function; its name alone if it is not written in Python."""
    inner: object = function
    while isinstance(inner, functools.partial | types.MethodType):
        inner = inner.func if isinstance(inner, functools.partial) else inner.__func__
    if not isinstance(inner, types.FunctionType):
        inner = vars(type(function)).get("__call__")  # an object that is called
    code = getattr(inner, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__).replace("<locals>.", "")
    if not isinstance(code, types.CodeType):
        return str(name)
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def with_line(change: Change) -> str:
    """Return the text of a change, with the line that most likely makes it."""
    place = _place(change)
    return f"{change}, in {place}" if place else str(change)


def _place(change: Change) -> str:
    """Find the code that stores the attribute, or else the first that reads it."""
    name = change.path.split(" of ", 1)[0].rsplit(".", 1)[-1].split("[", 1)[0]
    read = ""
    for code in _codes_of(change.owner):
        for instruction in dis.get_instructions(code):
            if instruction.argval != name or instruction.positions is None:
                continue
            line = instruction.positions.lineno
            if instruction.opname.startswith("STORE"):
                return f"{Path(code.co_filename).name}:{line}"
            if instruction.opname.startswith("LOAD") and not read:
                read = f"{Path(code.co_filename).name}:{line}"
    return read


def _codes_of(owner: object) -> Iterator[types.CodeType]:
    """Yield the code that belongs to an object: methods of its class, forward first, or the function that it is."""
    if isinstance(owner, types.FunctionType):
        yield from _with_inner(owner.__code__)
        return
    cls = owner if isinstance(owner, type) else type(owner)
    for base in cls.__mro__:
        if base in (nn.Module, object):
            continue
        functions = {n: getattr(f, "__func__", f) for n, f in vars(base).items() if n != "__init__"}
        methods = {n: f for n, f in functions.items() if isinstance(f, types.FunctionType)}
        for name in sorted(methods, key=lambda n: n != "forward"):
            yield from _with_inner(methods[name].__code__)


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)
