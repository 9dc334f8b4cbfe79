"""The tensors that a hook on a parameter reads beside the gradient it is given, found by reading its code.

    w.register_hook(lambda g: g + 0.1 * w.detach())              its own parameter: live while the hook runs
    w.register_hook(lambda g: g * mask)                          a tensor of its own: as in a plain loop
    w.register_hook(lambda g: g + 0.1 * m.other.weight)          another parameter of the model: refused

A plan trains every parameter on the ranks that hold it; those of the user's module stay as they were deployed. So a hook
would go on with numbers of the first step. Names are followed through closures, globals, defaults, bound objects and
``functools.partial``, through attributes and constant indices, and into other functions of the user. A module that goes
to other code as a whole counts as all of its tensors.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from cost_models.errors import ModelError
from passes.graph.nodes import storage_key
from runtime.user_code import TORCH

_HARMLESS = ("shape", "dtype", "device", "ndim", "size", "numel", "dim", "is_cuda", "requires_grad")
"""Attributes of a tensor that training does not change."""
_LIBRARIES = (TORCH, sysconfig.get_path("stdlib"))
_CALLED = (functools.partial, types.MethodType, types.FunctionType)
_INDEXED = (list, tuple, dict, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList)
_DEEPEST = 8
"""Functions in functions, and containers in containers, are looked into so far."""
_NOTHING = object()


@dataclass(frozen=True)
class Read:
    """A tensor, or a module as a whole, that a hook reads. ``text``: how the code writes it; ``place``: the line."""

    value: Tensor | nn.Module
    text: str
    place: str


def hook_tables(parameter: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return a parameter's hooks: functions of the gradient, which may return another one (``register_hook``), and then
    functions of the parameter with its gradient in place (``register_post_accumulate_grad_hook``).
    """
    after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return parameter._backward_hooks or {}, after or {}


def hooks_of(parameter: Tensor) -> list[Callable[..., Any]]:
    """Return the hooks on the gradient of a parameter, in the order in which they run."""
    return [hook for table in hook_tables(parameter) for hook in table.values()]


def register_hooks(
    parameter: Tensor, before: Iterable[Callable[..., Any]], after: Iterable[Callable[..., Any]]
) -> None:
    """Register hooks as ``hook_tables`` tells them apart."""
    for hook in before:
        parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in after:
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def refuse_hooks_that_read_others(model: nn.Module, model_name: str) -> None:
    """Raise ModelError for a hook on a parameter that reads another tensor of the model."""
    state = dict((*model.named_parameters(), *model.named_buffers()))
    names = {id(tensor): name for name, tensor in state.items()}
    memory = {key: name for name, t in state.items() if (key := storage_key(t)) is not None}
    lines = []
    for name, parameter in model.named_parameters():
        for hook in hooks_of(parameter):
            for read in reads_of(hook):
                if read.value is parameter:
                    continue
                other = _in_model(read.value, names, memory)
                if other:
                    lines.append(f"{read.place}: a hook of {name} reads {read.text}, {other}")
    if lines:
        raise ModelError(
            f"a hook on a parameter of {model_name} reads other tensors of the model, which a plan keeps elsewhere",
            [*dict.fromkeys(lines)][:5],
            [
                "use the gradient, and the parameter that the hook is on: that one is up to date while the hook runs",
                "a penalty on weights belongs into the loss, or into the optimizer (weight_decay)",
                "of a buffer that never changes (a mask), read a copy: mask = module.mask.clone()",
            ],
        )


def reads_own(parameter: nn.Parameter) -> bool:
    """Tell whether a hook on ``parameter`` reads it other than as its argument."""
    return any(read.value is parameter for hook in hooks_of(parameter) for read in reads_of(hook))


def _in_model(value: Tensor | nn.Module, names: Mapping[int, str], memory: Mapping[int, str]) -> str:
    """Say what of the model a value is; "" if training does not change it."""
    if isinstance(value, nn.Module):
        inner = next((t for t in (*value.parameters(), *value.buffers()) if id(t) in names), None)
        return "" if inner is None else f"a module with {names[id(inner)]}"
    if id(value) in names:
        return f"which is {names[id(value)]}"
    key = storage_key(value)
    if key is not None and key in memory:
        return f"a view of {memory[key]}"
    return "which was computed from tensors that are trained" if value.grad_fn is not None else ""


def reads_of(hook: Callable[..., Any]) -> list[Read]:
    """List the tensors that a hook's code reads, but for its argument."""
    return list(_CodeWalk().callable(hook, "the hook", "", 0))


@dataclass
class _CodeWalk:
    """A walk through code. ``seen``: functions with what they are bound to, containers and objects."""

    seen: set[tuple[int, ...]] = field(default_factory=set)

    def callable(self, function: Any, text: str, place: str, depth: int) -> Iterator[Read]:
        """Search what is called: a function, a method, a partial, or an object that has ``__call__``."""
        if isinstance(function, functools.partial):
            for value in (*function.args, *function.keywords.values()):
                yield from self.value(value, f"an argument of {text}", place or _place(function), depth + 1)
            yield from self.callable(function.func, text, place, depth)
            return
        if isinstance(function, types.MethodType) and _is_library(function.__func__):
            # such as ``parameters`` of a module
            yield from self.value(function.__self__, text, place, depth + 1)
        elif isinstance(function, types.MethodType):
            yield from self.code_of(function.__func__, function.__self__, depth)
        elif isinstance(function, types.FunctionType):
            yield from self.code_of(function, _NOTHING, depth)
        elif isinstance(call := vars(type(function)).get("__call__"), types.FunctionType):
            yield from self.code_of(call, function, depth)

    def code_of(self, function: Any, bound: Any, depth: int) -> Iterator[Read]:
        """Search a function of the user. ``bound``: its first argument, if that is known."""
        function = inspect.unwrap(function)
        key = id(function), id(bound)
        if not isinstance(function, types.FunctionType) or key in self.seen or depth > _DEEPEST:
            return
        if _is_library(function):
            return
        code = function.__code__
        self.seen.add(key)
        known: dict[str, Any] = {}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                known[name] = cell.cell_contents
            except ValueError:  # an empty cell
                continue
        positional = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ or ()
        known.update(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
        known.update(function.__kwdefaults__ or {})
        if bound is not _NOTHING and positional:
            known[positional[0]] = bound
        yield from self.code(code, known, function.__globals__, depth)

    def code(
        self, code: types.CodeType, known: Mapping[str, Any], names: Mapping[str, Any], depth: int
    ) -> Iterator[Read]:
        """Search the instructions of a function. ``known``: values of its variables; ``names``: its globals."""
        value, text, place = cast("Any", _NOTHING), "", ""
        line = code.co_firstlineno
        instructions = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
        for at, instruction in enumerate(instructions):
            line = (instruction.positions and instruction.positions.lineno) or line
            name, op = instruction.argval, instruction.opname
            if value is not _NOTHING:
                found = self._followed(value, instruction, instructions[at + 1 : at + 2])
                if found is not _NOTHING:
                    value, text = (
                        found,
                        f"{text}{f'.{name}' if 'ATTR' in op or 'METHOD' in op else f'[{name!r}]'}",
                    )
                    continue
                if op.startswith("BINARY_SUBSCR"):
                    continue
                harmless = isinstance(value, Tensor) and name in _HARMLESS
                if not harmless:
                    yield from self.value(value, text, place, depth)
                value = _NOTHING
            loaded = name if isinstance(name, tuple) else (name,)
            for item in (
                loaded if op.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")) else ()
            ):
                if value is not _NOTHING:
                    yield from self.value(value, text, place, depth)
                is_global = op.startswith(("LOAD_GLOBAL", "LOAD_NAME"))
                value = (
                    names.get(item, vars(builtins).get(item, _NOTHING))
                    if is_global
                    else known.get(item, _NOTHING)
                )
                text, place = str(item), f"{Path(code.co_filename).name}:{line}"
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                inner = {name: known[name] for name in constant.co_freevars if name in known}
                yield from self.code(constant, inner, names, depth)

    @staticmethod
    def _followed(value: Any, instruction: dis.Instruction, after: list[dis.Instruction]) -> Any:
        """Return the attribute or item of ``value`` that the next instructions take, if that is known without a call."""
        name = instruction.argval
        if isinstance(value, Tensor):
            return _NOTHING
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if isinstance(inspect.getattr_static(type(value), name, None), property):
                return _NOTHING
            return getattr(value, name, _NOTHING)
        subscripted = bool(after) and after[0].opname.startswith("BINARY_SUBSCR")
        if instruction.opname == "LOAD_CONST" and subscripted and isinstance(value, _INDEXED):
            try:
                return cast("Any", value)[name]
            except (KeyError, IndexError, TypeError):
                return _NOTHING
        return _NOTHING

    def value(self, value: Any, text: str, place: str, depth: int) -> Iterator[Read]:
        """Yield the tensors that code reaches by a value that it uses."""
        if depth > _DEEPEST or isinstance(value, types.ModuleType | type):
            return
        if isinstance(value, Tensor | nn.Module):
            yield Read(value, text, place)
        elif isinstance(value, types.BuiltinMethodType):  # such as ``values`` of a dict
            yield from self.value(value.__self__, text, place, depth + 1)
        elif isinstance(value, _CALLED) or isinstance(vars(type(value)).get("__call__"), types.FunctionType):
            yield from self.callable(value, text, place, depth + 1)
        elif (id(value),) not in self.seen:
            self.seen.add((id(value),))
            for key, item in _items(value):
                yield from self.value(item, f"{text}{key}", place, depth + 1)


def _is_library(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return isinstance(code, types.CodeType) and code.co_filename.startswith(_LIBRARIES)


def _items(value: Any) -> list[tuple[str, Any]]:
    """List what a container or an object holds, with how code writes it."""
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"[{at}]", item) for at, item in enumerate(value)]
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if type(value).__module__.startswith(("torch.", "logging")):
        return []
    return [(f".{key}", item) for key, item in getattr(value, "__dict__", {}).items()]


def _place(partial: functools.partial[Any]) -> str:
    code = getattr(inspect.unwrap(partial.func), "__code__", None)
    return "?" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"
