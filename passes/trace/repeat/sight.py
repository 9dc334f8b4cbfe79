"""Everything that a run of a block can see: its modules' attributes, its arguments, globals, torch's modes, who called it.

Two runs that see the same do the same, so the second need not be made. Of attributes that differ (a layer's number) it is
enough that the first run has not read them: ``watch_reads``.
"""

from __future__ import annotations

import dis
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import sympy
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from passes.trace.draws import states_of_generators
from passes.trace.held_parameters import HeldParameters
from passes.trace.noted import same
from passes.trace.python_state import names_in
from passes.trace.repeat.values import UNREAD, ByIdentity, Describer, Description, UnknownError, tensor_words
from runtime.user_code import OURS, TORCH

_STANDARD = sysconfig.get_paths()["stdlib"]
_SITE = "site-packages"
_SYMPY = str(Path(sympy.__file__ or "").parent)
_STRUCTURE = ("_parameters", "_buffers", "_modules")
_COMPARED = (*_STRUCTURE, "__class__")
"""Names under which a module's class, children, parameters and buffers are described: equal in all blocks of a kind."""
_ALL = "__dict__"
"""The name under which a read of all attributes is noted."""

Place: TypeAlias = tuple[str, str]
"""A module's path in its block, and the name of an attribute, a parameter or a buffer."""
Codes: TypeAlias = Mapping[types.CodeType, Mapping[str, Any]]
"""Functions that ran, with their globals."""


@dataclass(frozen=True)
class Sight:
    """Everything that one run of a block can see."""

    attributes: Mapping[Place, Description]
    """Descriptions by the module's path in the block and the attribute's name."""
    call: Description
    """The arguments, torch's modes, and the calls that lead here."""
    tensors: tuple[Tensor, ...]
    """The tensors among the arguments, in order."""
    state: Mapping[Place, Tensor]
    """Parameters and buffers, by the module's path in the block and their names."""

    def as_seen_by(self, other: Sight, reads: frozenset[Place]) -> bool:
        """Tell whether a run that saw this and read ``reads`` would have done the same with ``other`` before it."""
        if not self.alike(other):
            return False
        differ = {place for place, value in self.attributes.items() if value != other.attributes[place]}
        return not any(place in reads or (place[0], _ALL) in reads for place in differ)

    def alike(self, other: Sight) -> bool:
        """Tell whether these are blocks of equal structure, called in the same way from the same place."""
        if self.call != other.call or self.attributes.keys() != other.attributes.keys():
            return False
        return all(
            value == other.attributes[place]
            for place, value in self.attributes.items()
            if place[1] in _COMPARED
        )


def sight(block: nn.Module, args: object, kwargs: object, modes: Description) -> Sight:
    """Look at everything that a run of ``block`` can see now. Raises UnknownError where that cannot be told."""
    describer = Describer(block)
    call = (describer.describe(args), describer.describe(kwargs), modes, _callers())
    tensors = tuple(describer.tensors)
    describer.tensors_by_identity()
    attributes, state = _attributes(block, describer)
    return Sight(attributes, call, tensors, state)


def _attributes(
    block: nn.Module, describer: Describer
) -> tuple[dict[tuple[str, str], Description], dict[tuple[str, str], Tensor]]:
    """Describe the modules of a block, their attributes, parameters and buffers."""
    found: dict[tuple[str, str], Description] = {}
    state: dict[tuple[str, str], Tensor] = {}
    classes: dict[type, Description] = {}
    for path, module in block.named_modules():
        kind = type(module)
        if any("__getattribute__" in vars(base) for base in kind.__mro__ if base not in (object, nn.Module)):
            raise UnknownError(f"how {kind.__name__} reads its attributes")
        if kind not in classes:
            classes[kind] = _class(kind, describer)
        children = tuple((name, child is None) for name, child in module._modules.items())
        found[path, "__class__"] = ByIdentity(kind), classes[kind], children
        for name, value in vars(module).items():
            if name not in _STRUCTURE:
                found[path, name] = describer.describe(value)
        for kept in _STRUCTURE[:2]:
            table: Mapping[str, Tensor | None] = vars(module)[kept]
            found[path, kept] = tuple((n, None if t is None else tensor_words(t)) for n, t in table.items())
            state.update({(path, n): t for n, t in table.items() if t is not None})
        if any(
            getattr(module, hooks, None)
            for hooks in vars(module)
            if hooks.endswith("hooks") and hooks.startswith("_")
        ):
            raise UnknownError(f"a hook of {path or 'the block'}")
    return found, state


def _class(kind: type, describer: Describer) -> Description:
    """Describe what classes of a module keep, and what their methods close over."""
    return tuple(
        (name, describer.describe(value))
        for base in kind.__mro__
        if base is not object and not _of_torch(base)
        for name, value in list(vars(base).items())
        if name not in UNREAD
    )


def _of_torch(cls: type) -> bool:
    return cls.__module__ == "torch" or cls.__module__.startswith("torch.")


def globals_seen(block: nn.Module, codes: Codes) -> Description:
    """Describe the globals that functions name, and what they may read of the classes and modules among these."""
    describer = Describer(block)
    describer.tensors_by_identity()
    found: list[tuple[types.CodeType, str, Description]] = []
    seen: set[tuple[int, str]] = set()
    for code, table in codes.items():
        names = tuple(dict.fromkeys(names_in(code)))
        pending: list[tuple[Mapping[str, Any], str]] = [(table, name) for name in globals_in(code)]
        pending += [(vars(module), name) for module in _imported(code, table) for name in names]
        while pending:
            holder, name = pending.pop()
            if name not in holder or (id(holder), name) in seen:
                continue
            seen.add((id(holder), name))
            value = holder[name]
            found.append((code, name, describer.describe(value)))
            for inside in value.__mro__ if isinstance(value, type) else (value,):
                if isinstance(inside, type | types.ModuleType) and not _is_torch(inside):
                    pending += [(vars(inside), attribute) for attribute in names]
    return tuple(found)


@lru_cache(maxsize=4096)
def globals_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of the globals that code reads, that of functions inside it included."""
    own = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for c in code.co_consts if isinstance(c, types.CodeType) for name in globals_in(c)]
    return tuple(dict.fromkeys([*own, *inner]))


@lru_cache(maxsize=4096)
def _imports_in(code: types.CodeType) -> tuple[str, ...]:
    own = [i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"]
    inner = [name for c in code.co_consts if isinstance(c, types.CodeType) for name in _imports_in(c)]
    return tuple(dict.fromkeys([*own, *inner]))


def _imported(code: types.CodeType, table: Mapping[str, Any]) -> list[types.ModuleType]:
    """Return the modules that code imports when it runs, torch's excepted."""
    names = [full for name in _imports_in(code) for full in (name, f"{table.get('__package__')}.{name}")]
    found = [sys.modules[name] for name in names if name in sys.modules]
    return [module for module in found if not _is_torch(module)]


def _is_torch(value: object) -> bool:
    name = value.__module__ if isinstance(value, type) else getattr(value, "__name__", "")
    return str(name).split(".")[0] == "torch"


def modes_now() -> Description:
    """Describe torch's switches of this thread that change what an operation is."""
    devices = ("cpu", "cuda")
    hooks = (
        torch_modules._global_forward_hooks,
        torch_modules._global_forward_pre_hooks,
        torch_modules._global_backward_hooks,
        torch_modules._global_backward_pre_hooks,
    )
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple(torch.is_autocast_enabled(device) for device in devices),
        tuple(torch.get_autocast_dtype(device) for device in devices),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_deterministic_algorithms(),
        tuple(map(ByIdentity, _get_current_dispatch_mode_stack())),
        tuple(map(ByIdentity, _function_modes())),
        tuple(tuple(table) for table in hooks),
    )


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(n) for n in range(torch._C._len_torch_function_stack())]


def _callers() -> Description:
    """Return where in which functions the calls stand that lead to the block."""
    calls = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(OURS):
            calls.append((ByIdentity(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(calls)


@contextmanager
def watch_code() -> Iterator[dict[types.CodeType, Mapping[str, Any]]]:
    """Note which functions of the model's run, and with which globals: torch's own, Python's and ours excepted."""
    if sys.getprofile() is not None:
        raise UnknownError("a profiler that looks at every call already")
    codes: dict[types.CodeType, Mapping[str, Any]] = {}

    def called(frame: types.FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code not in codes:
            codes[frame.f_code] = frame.f_globals

    found: dict[types.CodeType, Mapping[str, Any]] = {}
    with _TorchUnwatched(called):
        sys.setprofile(called)
        try:
            yield found
        finally:
            sys.setprofile(None)
            found.update({c: table for c, table in codes.items() if _is_models(c.co_filename)})


class _TorchUnwatched(TorchFunctionMode):
    """A mode in which ``called`` is not told of the calls inside torch's own functions, thousands for every operation.

    None of them is the model's, unless it is registered as an operation, reached through an argument, or a mode.
    """

    def __init__(self, called: Callable[[types.FrameType, str, Any], None]) -> None:
        super().__init__()
        self._called = called

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        code = getattr(func, "__code__", None)
        modes = (*_get_current_dispatch_mode_stack(), *_function_modes())
        if (
            isinstance(func, torch._ops.OperatorBase | torch._ops.OpOverloadPacket)
            or (code is not None and not code.co_filename.startswith(TORCH))
            or not all(map(_of_torch, types))
            or not all(_of_torch(type(mode)) or type(mode) is HeldParameters for mode in modes)
            or not all(map(_calls_nothing, (*args, *options.values())))
        ):
            return func(*args, **options)
        sys.setprofile(None)
        try:
            return func(*args, **options)
        finally:
            sys.setprofile(self._called)


def _calls_nothing(value: object) -> bool:
    """Tell whether an argument is a tensor, a number, or the like: nothing that has code of the model's."""
    if type(value) in (tuple, list):
        return all(map(_calls_nothing, value))  # type: ignore[call-overload]
    kind = type(value)
    return (kind.__module__ == "builtins" or _of_torch(kind)) and not callable(value)


def _is_models(file: str) -> bool:
    tools = (TORCH, *OURS, _SYMPY, "<")
    return not file.startswith(tools) and (_SITE in file or not file.startswith(_STANDARD))


@contextmanager
def watch_reads(block: nn.Module) -> Iterator[set[tuple[str, str]]]:
    """Note which attributes of the block's modules are read, by module and name."""
    paths = {id(vars(module)): path for path, module in block.named_modules()}
    reads: set[tuple[str, str]] = set()
    plain = object.__getattribute__

    def read(module: nn.Module, name: str) -> Any:
        path = paths.get(id(plain(module, "__dict__")))
        if path is not None and not (
            name == _ALL and sys._getframe(1).f_code.co_filename.startswith((TORCH, *OURS))
        ):
            reads.add((path, name))
        return plain(module, name)

    with mock.patch.object(nn.Module, "__getattribute__", read, create=True):
        yield reads


@contextmanager
def watch_rest() -> Iterator[list[str]]:
    """Note what a run does that a graph does not show: hooks on tensors, random numbers drawn by Python."""
    done: list[str] = []
    before = states_of_generators()
    registering = ("register_hook", "register_post_accumulate_grad_hook")
    originals = {name: getattr(Tensor, name) for name in registering}

    def noting(name: str) -> Any:
        def register(tensor: Tensor, hook: Any) -> Any:
            done.append(f"calls {name}")
            return originals[name](tensor, hook)

        return register

    with (
        mock.patch.object(Tensor, registering[0], noting(registering[0])),
        mock.patch.object(Tensor, registering[1], noting(registering[1])),
    ):
        yield done
    if not same(before, states_of_generators()):
        done.append("draws random numbers in Python")
