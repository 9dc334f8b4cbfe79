"""The user's code of an opaque part, taken out of the model: a module without its tensors, a function, a Function."""

from __future__ import annotations

import copy
import hashlib
import inspect
import io
import os
import pickle
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from passes.trace.opaque.sizes import UnfitError
from runtime.ops.opaque_code import Code

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, type)


@dataclass(frozen=True)
class OpaqueCode:
    """A part's code, and what is said of it. ``text``: the same for equal code in every process."""

    name: str
    code: Code
    source: str
    text: str


def of_module(name: str, module: nn.Module, model: nn.Module) -> OpaqueCode:
    """Copy a module of ``model`` without its tensors: they become arguments of the op."""
    own = _names(module)
    twins: dict[int, Any] = {id(tensor): _twin(tensor) for tensor, _ in own}
    for inner in module.modules():  # left there by a forward before, as the old weight_norm does
        for value in vars(inner).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                twins[id(value)] = value.detach().clone()
    others = {
        id(tensor): path
        for path, tensor in (*model.named_parameters(), *model.named_buffers())
        if id(tensor) not in twins
    }
    try:
        skeleton = copy.deepcopy(module, twins)
    except (TypeError, RuntimeError, AttributeError, ValueError) as error:
        raise UnfitError(f"it cannot be copied ({type(error).__name__}: {error})") from error
    foreign = [path for key, path in others.items() if key in twins]
    if foreign:
        raise UnfitError(f"it uses {foreign[0]}, which belongs to another module")
    state = tuple(tuple(names) for _, names in own)
    text = (
        f"{_module_name(type(module))}.{type(module).__qualname__} {_ADDRESS.sub('', repr(module))} {state}"
    )
    return OpaqueCode(name, Code(skeleton, state), source_of(type(module).forward), text)


def state_of(code: Code, module: nn.Module) -> list[Tensor]:
    """Return the tensors that the live module holds in the places of the code's state."""
    tables: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tables.update(module.named_buffers(remove_duplicate=False))
    return [tables[names[0]] for names in code.state]


def of_function(name: str, function: Any) -> OpaqueCode:
    """Take a function of tensors, or a class of ``torch.autograd.Function``."""
    for held in _captured(function):
        if isinstance(held, nn.Module) and any(True for _ in held.parameters()):
            raise UnfitError(f"it uses the module {type(held).__name__} that is not among its arguments")
        if isinstance(held, Tensor) and held.requires_grad:
            raise UnfitError("it uses a tensor with a gradient that is not among its arguments")
    called = getattr(function, "forward", function) if isinstance(function, type | nn.Module) else function
    module = type(function) if isinstance(function, nn.Module) else function
    where = getattr(module, "__qualname__", type(module).__qualname__)
    text = f"{_module_name(module)}.{where}"
    if isinstance(function, nn.Module):
        function = copy.deepcopy(function)
    return OpaqueCode(name, Code(function), source_of(called), text)


def _module_name(defined: Any) -> str:
    """Return the name of the module that defines a class or function; of a script, the one that importing it would give.

    A process that is spawned from a script knows it as ``__mp_main__``.
    """
    name: str = getattr(defined, "__module__", None) or ""
    if name not in ("__main__", "__mp_main__"):
        return name
    file = getattr(sys.modules.get(name), "__file__", None)
    return "__main__" if file is None else Path(file).stem


def _captured(function: Any) -> Iterable[Any]:
    if isinstance(function, type):
        return
    yield getattr(function, "__self__", function if isinstance(function, nn.Module) else None)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue


def _names(module: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """List every parameter, then every buffer, with all its names."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    parameters = module.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *module.named_buffers(remove_duplicate=False)):
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def _twin(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta").detach()
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def checked_argument(value: Any) -> Any:
    """Return an argument that is no tensor, if it hides none; else raise UnfitError."""
    if not isinstance(value, _PLAIN) and _holds_tensors(value, set()):
        raise UnfitError(f"it is given a {type(value).__name__}, which holds tensors")
    return value


def _holds_tensors(value: Any, seen: set[int]) -> bool:
    if isinstance(value, _PLAIN) or id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, Tensor):
        return True
    if isinstance(value, nn.Module):
        return any(True for _ in (*value.parameters(), *value.buffers()))
    if isinstance(value, Mapping):
        return any(_holds_tensors(item, seen) for item in value.values())
    if isinstance(value, list | tuple | set):
        return any(_holds_tensors(item, seen) for item in value)
    return any(_holds_tensors(item, seen) for item in getattr(value, "__dict__", {}).values())


def without_addresses(text: str) -> str:
    """Return a text of objects as every process would write it."""
    return _ADDRESS.sub("", text)


def identity_of(name: str, *content: Any) -> str:
    """Return a key that equal parts share: a digest of their pickled code, or its name where it cannot be pickled."""
    written = io.BytesIO()
    pickler = pickle.Pickler(written)
    pickler.fast = True  # no references: equal contents are equal bytes, whichever objects they share
    try:
        pickler.dump(content)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError, ValueError):
        return f"{name} {id(content[0])}"
    return hashlib.sha256(written.getvalue()).hexdigest()


def source_of(function: Any) -> str:
    """Return "file.py:line" of a function's definition; "?" if Python does not know."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}" if code is not None else "?"
