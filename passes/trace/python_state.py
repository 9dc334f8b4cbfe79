"""The Python state of a model: everything beside its tensors that its code can read and write, noted and put back.

    before = PythonState.of({"": model, "loss_fn": loss_fn})
    …                                     forward runs: self.calls += 1, self.seen.append(x), cache[n] = …
    before.changes()                      ("calls: 0 -> 1", "seen: 0 -> 1 items")
    before.restore()                      every object is what it was, and the same object

    with unchanged({"": model}): …        the same, with all generators of random numbers

Reached are attributes of modules and of whatever they hold, containers, generators of random numbers, hooks, what
functions close over, numbers and containers that a class or a module of the user's own code keeps, and cached results of
functions. Only what code outside of these (a C extension, a library's globals) remembers stays unseen.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from passes.trace.draws import draws_restored
from passes.trace.noted import (
    PLAIN,
    TENSOR_HOOKS,
    Change,
    Noted,
    NotedDict,
    NotedTensor,
    NotedValue,
    Sequence,
    Set,
    joined,
)

MOST_ELEMENTS = 10_000
"""Containers with more elements are noted as they are, without looking into their elements."""
_CACHED = functools._lru_cache_wrapper
_STRUCTURE = ("_parameters", "_buffers", "_modules")
_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = ("site-packages", str(Path(random.__file__).parent))


class PythonState:
    """The objects that were reached, in order."""

    def __init__(self, values: bool, parameters: bool) -> None:
        self._values_too, self._parameters_too = values, parameters
        self._noted: list[Noted] = []
        self._seen: dict[int, object] = {}
        self._globals: set[tuple[int, str]] = set()
        self._caches: set[int] = set()

    @classmethod
    def of(cls, roots: Mapping[str, object], *, values: bool = True, parameters: bool = True) -> PythonState:
        """Note all that can be reached from ``roots``, which are named by their keys ("" for the model itself).

        ``values``: copy the values of tensors, too; ``parameters``: those of parameters among them.
        """
        state = cls(values, parameters)
        registered = {
            id(tensor)
            for root in roots.values()
            if isinstance(root, nn.Module)
            for tensor in (*root.parameters(), *root.buffers())
        }
        pending: list[tuple[str, object, object]] = [
            (path, root, root) for path, root in reversed(list(roots.items()))
        ]
        while pending:
            path, found, owner = pending.pop()
            if isinstance(found, PLAIN) or id(found) in state._seen:
                continue
            state._seen[id(found)] = found  # kept alive, or another object might get its id
            pending += reversed(list(state._note(path, found, owner, registered)))
        for function in cached_functions():
            state._note_cache(function)
        return state

    def restore(self) -> None:
        """Make every object what it was."""
        for noted in self._noted:
            noted.restore()

    def restore_registered(self) -> None:
        """Put back the values of parameters and buffers alone."""
        for noted in self._noted:
            if isinstance(noted, NotedTensor) and noted.registered:
                noted.restore_values()

    def changes(self) -> tuple[Change, ...]:
        """Return everything that differs now, but for values of parameters and buffers."""
        return tuple(change for noted in self._noted for change in noted.changes())

    def written(self) -> tuple[str, ...]:
        """Name the parameters that have other values now."""
        return tuple(
            noted.path
            for noted in self._noted
            if isinstance(noted, NotedTensor) and isinstance(noted.found, nn.Parameter) and noted.changed
        )

    def _note(
        self, path: str, found: Any, owner: object, registered: set[int]
    ) -> Iterator[tuple[str, object, object]]:
        """Note one object; yield what it holds, as (path, object, the object that holds it)."""
        numpy = sys.modules.get("numpy")
        if isinstance(found, nn.Module):
            self._noted.append(NotedDict(path, vars(found), found))
            for key, value in vars(found).items():
                yield (path if key in _STRUCTURE else joined(path, key)), value, found
            yield from self._note_class(type(found))
        elif isinstance(found, Tensor):
            copied = self._values_too and (self._parameters_too or not isinstance(found, nn.Parameter))
            self._noted.append(NotedTensor(path, found, id(found) in registered, copied))
            for name in TENSOR_HOOKS:
                yield path, list((getattr(found, name) or {}).values()), found
        elif isinstance(found, dict):
            self._noted.append(NotedDict(path, found, owner))
            if len(found) <= MOST_ELEMENTS:
                yield from ((joined(path, key), value, owner) for key, value in found.items())
        elif isinstance(found, list | deque):
            self._noted.append(Sequence(path, found, owner))
            if len(found) <= MOST_ELEMENTS:
                yield from ((f"{path}[{at}]", value, owner) for at, value in enumerate(found))
        elif isinstance(found, set):
            self._noted.append(Set(path, found, owner))
        elif isinstance(found, tuple):
            yield from ((f"{path}[{at}]", value, owner) for at, value in enumerate(found[:MOST_ELEMENTS]))
        elif isinstance(found, torch.Generator):
            self._values(path, found.get_state, found.set_state, owner, "drew random numbers")
        elif isinstance(found, random.Random):
            self._values(path, found.getstate, found.setstate, owner, "drew random numbers")
        elif numpy is not None and isinstance(found, numpy.random.Generator):
            bits = found.bit_generator
            self._values(
                path,
                lambda: bits.state,
                lambda state: setattr(bits, "state", state),
                owner,
                "drew random numbers",
            )
        elif numpy is not None and isinstance(found, numpy.random.RandomState):
            self._values(path, found.get_state, found.set_state, owner, "drew random numbers")
        elif numpy is not None and isinstance(found, numpy.ndarray):
            if found.flags.writeable:
                self._values(
                    path, found.copy, lambda saved: found.__setitem__(..., saved), owner, "other values"
                )
        elif isinstance(found, functools._lru_cache_wrapper):
            self._note_cache(found)
            yield path, found.__wrapped__, owner
        elif isinstance(found, types.FunctionType):
            yield from self._note_function(path, found)
        elif isinstance(found, types.MethodType):
            yield path, found.__self__, owner
            yield path, found.__func__, owner
        elif isinstance(found, functools.partial):
            yield path, found.func, owner
            yield path, [*found.args, *found.keywords.values()], owner
        elif not isinstance(found, type | types.ModuleType) and not _is_torchs(type(found)):
            attributes = getattr(found, "__dict__", None)
            if isinstance(attributes, dict):
                self._noted.append(NotedDict(path, attributes, found))
                yield from ((joined(path, key), value, found) for key, value in attributes.items())

    def _note_cache(self, function: functools._lru_cache_wrapper[Any]) -> None:
        if id(function) not in self._caches:
            self._caches.add(id(function))
            self._noted.append(Cached(function))

    def _values(
        self,
        path: str,
        read: Callable[[], Any],
        write: Callable[[Any], object],
        owner: object,
        word: str = "",
    ) -> None:
        self._noted.append(NotedValue(path, read, write, owner, word))

    def _note_function(self, path: str, function: types.FunctionType) -> Iterator[tuple[str, object, object]]:
        """Note what a function closes over, its defaults, and the globals that its code reads."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # a name that is not bound yet
                continue
            where = f"{name} of {function.__qualname__}"
            if isinstance(value, PLAIN):
                self._values(
                    where,
                    lambda cell=cell: cell.cell_contents,  # type: ignore[misc]
                    lambda saved, cell=cell: setattr(cell, "cell_contents", saved),  # type: ignore[misc]
                    function,
                )
            yield where, value, function
        yield path, list(function.__defaults__ or ()), function
        yield path, list((function.__kwdefaults__ or {}).values()), function
        if outside_libraries(function.__code__.co_filename):
            yield from self._note_globals(function)

    def _note_globals(self, function: types.FunctionType) -> Iterator[tuple[str, object, object]]:
        """Note what code reads of its own module, and of the user's modules that it names."""
        names = tuple(dict.fromkeys(names_in(function.__code__)))
        modules = [value for name in names if _is_users_module(value := function.__globals__.get(name))]
        for table in (function.__globals__, *map(vars, modules)):
            for name in names:
                yield from self._note_global(function, table, name)

    def _note_global(
        self, function: types.FunctionType, table: dict[str, Any], name: str
    ) -> Iterator[tuple[str, object, object]]:
        if name not in table or (id(table), name) in self._globals:
            return
        self._globals.add((id(table), name))
        value = table[name]
        where = f"{name} of {table.get('__name__', 'the code')}"
        if isinstance(value, (*PLAIN, Tensor)):
            self._values(
                where,
                lambda: table.get(name),
                lambda saved: table.__setitem__(name, saved),
                function,
            )
        if isinstance(
            value, list | dict | set | deque | Tensor | torch.Generator | random.Random | _CACHED
        ) or (isinstance(value, types.FunctionType) and outside_libraries(value.__code__.co_filename)):
            yield where, value, function
        elif isinstance(value, type) and _is_users_module(sys.modules.get(value.__module__)):
            yield from self._note_class(value)

    def _note_class(self, cls: type) -> Iterator[tuple[str, object, object]]:
        """Note numbers and containers that the classes of a module keep, and what their methods read."""
        for base in cls.__mro__:
            if _is_torchs(base) or base is object or id(base) in self._seen:
                continue
            self._seen[id(base)] = base
            for name, value in vars(base).items():
                if name.startswith("__") and name not in ("__init__", "__call__"):
                    continue
                where = f"{base.__qualname__}.{name}"
                if isinstance(value, PLAIN):
                    self._values(
                        where,
                        lambda base=base, name=name: vars(base).get(name),  # type: ignore[misc]
                        lambda saved, base=base, name=name: setattr(base, name, saved),  # type: ignore[misc]
                        base,
                    )
                elif isinstance(value, list | dict | set | deque | Tensor | types.FunctionType | _CACHED):
                    yield where, value, base


@contextlib.contextmanager
def unchanged(roots: Mapping[str, object], *, parameters: bool = True) -> Iterator[PythonState]:
    """Note the state of ``roots`` and of all generators of random numbers; put everything back afterwards.

    ``parameters``: copy their values, too; code that runs no backward and no optimizer leaves them alone.
    """
    state = PythonState.of(roots, parameters=parameters)
    modules = [root for root in roots.values() if isinstance(root, nn.Module)]
    devices = {p.device.index or 0 for m in modules for p in m.parameters() if p.device.type == "cuda"}
    with draws_restored(), torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield state
        finally:
            state.restore()


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that code mentions, that of functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def outside_libraries(file: str) -> bool:
    """Tell whether a file is the user's own code: no installed library's, no part of Python."""
    return not any(library in file for library in _LIBRARIES) and not file.startswith((_TORCH, "<frozen"))


def _is_users_module(value: object) -> bool:
    file = getattr(value, "__file__", None)
    return isinstance(value, types.ModuleType) and isinstance(file, str) and outside_libraries(file)


def _is_torchs(cls: type) -> bool:
    return cls.__module__ == "torch" or cls.__module__.startswith("torch.")


_TOOLS = frozenset(sys.stdlib_module_names) | {"torch", "sympy", "mpmath", "triton"}
_TOOLS |= {"cost_models", "partitioner", "passes", "runtime"}
"""Packages whose caches hold no tensors."""


class Cached(Noted):
    """A function with a cache of its results (``functools.lru_cache``, ``functools.cache``), which forgets new ones.

    A function that forward calls while it is traced leaves tensors without values in its cache; in float64, wide ones. No
    single result can be taken out of such a cache, so one with new results is emptied: the function computes them again.
    """

    def __init__(self, found: functools._lru_cache_wrapper[Any]) -> None:
        code = getattr(found.__wrapped__, "__code__", None)
        where = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
        super().__init__(f"the cache of {found.__wrapped__.__qualname__}{where}", found)
        self.computed, self.size = found.cache_info().misses, found.cache_info().currsize

    def restore(self) -> None:
        if self._has_new():
            self.found.cache_clear()
            self.computed, self.size = 0, 0

    def changes(self) -> Iterator[Change]:
        if self._has_new():
            now = self.found.cache_info().currsize
            yield Change(self.path, f"{self.size} -> {now} results", self.found.__wrapped__)

    def _has_new(self) -> bool:
        now = self.found.cache_info()
        return bool(now.currsize > 0 and now.misses != self.computed)


def cached_functions() -> Iterator[functools._lru_cache_wrapper[Any]]:
    """Yield the functions with a cache that loaded modules define, but for torch's and other tools'."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _TOOLS and module is not None:
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    yield value
