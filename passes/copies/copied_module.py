"""A model copied, or converted to other types, with what shares memory still sharing it.

``copy.deepcopy`` gives each parameter a memory of its own, and so does ``module.to``: a buffer that is a view of a
parameter would no longer follow it, and what is compared with such a copy would be another model.

Here the tensors of one storage are taken together: their part of the storage is converted once, and each is the same view
of the result that it was of the storage.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from passes.graph.nodes import storage_key
from passes.trace.python_state import names_in
from passes.trace.view_steps import StridedLayout

Convert: TypeAlias = Callable[[Tensor], Tensor]
OptionalFunctionT = TypeVar("OptionalFunctionT", bound=Callable[..., Any] | None)


def copied_module(model: nn.Module) -> nn.Module:
    """Copy a model deeply, with tensors that the last forward computed and left in a module (``weight_norm`` does)."""
    return copied_with(model, None)[0]


def copied_with(model: nn.Module, loss_fn: OptionalFunctionT) -> tuple[nn.Module, OptionalFunctionT]:
    """Copy a model, and a loss function that reads the copy wherever it read the model (``copied_function``)."""
    memo = _tensor_copies(model)
    copied = copy.deepcopy(model, memo)
    return copied, copied_function(loss_fn, memo)


def _tensor_copies(model: nn.Module) -> dict[int, Any]:
    """Copy the tensors of a model. Returns the memory of ``copy.deepcopy``: the copy of each, by its ``id``."""
    tensors = list(_tensors(model))
    together = _together(tensors, torch.clone)
    memo: dict[int, Any] = {}
    for tensor in tensors:
        if isinstance(tensor, nn.Parameter) and id(tensor) in together:
            memo[id(tensor)] = _same_kind(tensor, together[id(tensor)])
        elif (
            isinstance(tensor, nn.Parameter)
            and type(tensor).__deepcopy__ is nn.Parameter.__deepcopy__
            and vars(tensor)
        ):
            memo[id(tensor)] = _same_kind(tensor, tensor.detach().clone())
    for tensor in tensors:
        if id(tensor) in memo:
            continue
        if tensor._base is not None and tensor.requires_grad and id(tensor._base) in memo:
            memo[id(tensor)] = _viewed_again(
                tensor, memo[id(tensor._base)], int(tensor._base.storage_offset())
            )
        elif id(tensor) in together:
            memo[id(tensor)] = together[id(tensor)].requires_grad_(tensor.requires_grad and tensor.is_leaf)
        elif not tensor.is_leaf:
            memo[id(tensor)] = tensor.detach().clone()
    return memo


def _same_kind(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """Make a parameter of ``data``, of the class of another and with its attributes; torch's own copy drops these."""
    made: nn.Parameter = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
    vars(made).update(copy.deepcopy(vars(parameter)))
    return made


def convert_module(model: nn.Module, convert: Convert) -> nn.Module:
    """Replace the values of all tensors of ``model`` by their ``convert``, in place: another type or device.

    These are its parameters, its buffers, and tensors in plain attributes, be it in lists, tuples and dicts.
    """
    tensors = list(_tensors(model))
    together = _together(tensors, convert)
    starts = {
        id(tensor): int(tensor.storage_offset()) for tensor in model.parameters() if id(tensor) in together
    }
    made: dict[int, Tensor] = {}
    for parameter in model.parameters():
        parameter.data = together.get(id(parameter), convert(parameter.data))
        made[id(parameter)] = parameter
    for tensor in tensors:
        if id(tensor) not in made:
            base = tensor._base if tensor.requires_grad else None
            if base is not None and id(base) in starts:
                made[id(tensor)] = _viewed_again(tensor, base, starts[id(base)])
            else:
                made[id(tensor)] = together[id(tensor)] if id(tensor) in together else convert(tensor)
    for module in model.modules():
        for table in (module._buffers, vars(module)):
            for name in _attributes(module) if table is vars(module) else list(table):
                table[name] = _mapped(table[name], lambda tensor: made[id(tensor)])
    return model._apply(convert)  # type: ignore[no-untyped-call, no-any-return]  # gradients, and what modules override


def _attributes(module: nn.Module) -> list[str]:
    """List the names of plain attributes."""
    return [name for name in vars(module) if name not in vars(_BARE)]


_BARE = nn.Module()
"""A module that has nothing of its own: the tables that every module has are its attributes."""


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield each tensor that the model holds once: parameters first."""
    found: dict[int, Tensor] = {id(tensor): tensor for tensor in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        return found.setdefault(id(tensor), tensor)

    for module in model.modules():
        _mapped(module._buffers, note)
        _mapped([vars(module)[name] for name in _attributes(module)], note)
    yield from found.values()


_DEEPEST = 8
"""Containers in containers are looked into so far: one that holds itself has no end."""


def _mapped(value: Any, function: Convert, depth: int = 0) -> Any:
    """Replace the tensors in a value, or in the lists, tuples and dicts in it; lists and dicts stay the same objects."""
    if isinstance(value, Tensor):
        return function(value)
    if depth == _DEEPEST:
        return value
    if type(value) is tuple:
        return tuple(_mapped(item, function, depth + 1) for item in value)
    if isinstance(value, list):
        value[:] = [_mapped(item, function, depth + 1) for item in value]
    elif isinstance(value, dict):
        value.update({key: _mapped(item, function, depth + 1) for key, item in value.items()})
    return value


def _together(tensors: list[Tensor], convert: Convert) -> dict[int, Tensor]:
    """Convert the tensors that share a storage with others of their type, by ``id``; no gradients."""
    groups: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        key = storage_key(tensor)
        if key is not None and tensor.numel() and not (tensor.is_conj() or tensor.is_neg()):
            groups.setdefault(key, []).append(tensor)
    made: dict[int, Tensor] = {}
    for members in groups.values():
        if len(members) < 2 or len({member.dtype for member in members}) > 1:
            continue
        start = min(int(member.storage_offset()) for member in members)
        end = max(int(member.storage_offset()) + StridedLayout.of(member).extent for member in members)
        with torch.no_grad():
            memory = convert(members[0].detach().as_strided((end - start,), (1,), start))
            for member in members:
                offset = int(member.storage_offset()) - start + int(memory.storage_offset())
                made[id(member)] = memory.as_strided(member.size(), member.stride(), offset)
    return made


def _viewed_again(view: Tensor, owner: Tensor, start: int) -> Tensor:
    """Take a view of ``owner`` with autograd on, as ``view`` is one of a tensor that begins at ``start`` of its storage."""
    offset = int(owner.storage_offset()) + int(view.storage_offset()) - start
    with torch.enable_grad():
        return owner.as_strided(view.size(), view.stride(), offset)


FunctionT = TypeVar("FunctionT")

DEEPEST = 8
"""Objects in objects, and functions that functions call, are looked into so far. By hand."""


def copied_function(function: FunctionT, copies: Mapping[int, Any]) -> FunctionT:
    """Return ``function`` with ``copies`` in place of what it holds, or ``function`` itself where it holds none of them.

        def loss(output, batch):                                          the same code, with the copy
            return mse(output, batch) + sum(p.square().sum()     ─►       of ``model`` in its closure,
                                            for p in model.parameters())  or among its globals

    ``copy.deepcopy`` leaves functions as they are: a copied model would be trained with a loss of the other one.

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
