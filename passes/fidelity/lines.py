"""The lines of the user's code that a refusal names: of a hook, of what changes an attribute, of a backward that fails."""

from __future__ import annotations

import contextlib
import dis
import functools
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from passes.graph.graph import OpGraph
from passes.trace.hook_reads import hooks_of
from passes.trace.noted import Change
from passes.trace.python_state import outside_libraries
from runtime.user_code import OURS, TORCH, caller

_CLOCKS = ("time", "datetime", "secrets", "uuid")
"""Modules whose numbers nobody can set."""


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


def why_backward_fails(graph: OpGraph, error: BaseException) -> list[str]:
    """Name the op and the line at which a step's own ``loss.backward()`` raised; [] where forward did."""
    frames = traceback.extract_tb(error.__traceback__)
    called = [at for at, frame in enumerate(frames) if frame.name == "eager_step"]
    after = frames[called[0] + 1] if called and called[0] + 1 < len(frames) else None
    if after is None or after.name != "backward" or not after.filename.startswith(TORCH):
        return []
    said = str(error).strip().splitlines() or ["no message"]
    users = [f for f in frames[called[0] + 1 :] if not f.filename.startswith((TORCH, *OURS))]
    if users:  # a backward of the user's own
        return [f"{Path(users[-1].filename).name}:{users[-1].lineno}: {type(error).__name__}: {said[0]}"]
    nodes = [
        node
        for node in graph.ops
        if isinstance(node.target, torch._ops.OpOverload)
        and any(name in said[0] for name in (str(node.target), node.target._schema.name))
    ]
    places = [f"{node.target}, called in {node.meta['source']}" for node in nodes if node.meta.get("source")]
    return [f"{type(error).__name__}: {said[0]}", *dict.fromkeys(places)]


@contextlib.contextmanager
def watch_switched_gradients() -> Iterator[dict[str, str]]:
    """Yield the lines of forward that choose what gets gradients, which no graph holds, each with what to write instead."""
    found: dict[str, str] = {}
    reentrant = torch.utils.checkpoint.CheckpointFunction
    module, tensor = nn.Module.requires_grad_, Tensor.requires_grad_
    apply: Any = reentrant.apply
    attribute: Any = torch._C.TensorBase.requires_grad

    def checkpointed(*args: Any) -> Any:
        found.setdefault(
            f"{caller()}: a checkpoint with use_reentrant=True, which has no gradients inside where nothing that enters it "
            "needs one",
            "use_reentrant=False, which trains the same inside and outside of a checkpoint (or freeze that block for good)",
        )
        return apply(*args)

    def switched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(owner: Any, requires_grad: bool = True) -> Any:
            if isinstance(owner, nn.Module | nn.Parameter):
                found.setdefault(
                    f"{caller()}: forward sets requires_grad to {requires_grad}; a plan keeps what it was before the step",
                    "leave requires_grad alone in forward, and use detached parameters where none are to be trained: "
                    "torch.func.functional_call(module, {n: p.detach() for n, p in module.named_parameters()}, x)",
                )
            return original(owner, requires_grad)

        return call

    with (
        mock.patch.object(reentrant, "apply", checkpointed),
        mock.patch.object(nn.Module, "requires_grad_", switched(module)),
        mock.patch.object(Tensor, "requires_grad_", switched(tensor)),
        mock.patch.object(
            Tensor, "requires_grad", property(attribute.__get__, switched(attribute.__set__)), create=True
        ),
    ):
        yield found


def with_line(change: Change) -> str:
    """Return the text of a change, with the line that most likely makes it."""
    place = _place(change)
    return f"{change}, in {place}" if place else str(change)


def clock_lines(model: nn.Module) -> list[str]:
    """Name the lines of the model's own code that read a clock, or other numbers that nobody can set."""
    found: dict[str, None] = {}
    for module in model.modules():
        held = [value for part in (*type(module).__mro__, module) for value in vars(part).values()]
        for function in held:
            if not isinstance(function, types.FunctionType) or not outside_libraries(
                function.__code__.co_filename
            ):
                continue
            for instruction in dis.get_instructions(function):
                if instruction.opname != "LOAD_GLOBAL":
                    continue
                value = function.__globals__.get(instruction.argval)
                source = value.__name__ if isinstance(value, types.ModuleType) else _module_of(value)
                if source in _CLOCKS and instruction.positions is not None:
                    line = f"{Path(function.__code__.co_filename).name}:{instruction.positions.lineno}"
                    found.setdefault(f"{instruction.argval} is read in {line}")
    return list(found)


def _module_of(value: object) -> object:
    return getattr(value, "__module__", None) if callable(value) else None


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


def module_hooks(model: nn.Module) -> list[str]:
    """Name the hooks on the gradients of modules, with the lines where they are written."""
    return [
        f"{line_of(hook)}, a backward hook of module {path or '(root)'}"
        for path, module in model.named_modules()
        for table in (module._backward_hooks, module._backward_pre_hooks)
        for hook in table.values()
    ]


def hook_lines(model: nn.Module) -> list[str]:
    """Name the hooks on parameters, with the lines where they are written."""
    return [
        f"{line_of(hook)}, a hook of parameter {name}"
        for name, parameter in model.named_parameters()
        for hook in hooks_of(parameter)
    ][:3]
