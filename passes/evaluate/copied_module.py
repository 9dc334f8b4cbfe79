"""A model copied, or converted to other types, with what shares memory still sharing it.

``copy.deepcopy`` gives each parameter a memory of its own, and so does ``module.to``: a buffer that is a view of a
parameter would no longer follow it, and what is compared with such a copy would be another model.

Here the tensors of one storage are taken together: their part of the storage is converted once, and each is the same view
of the result that it was of the storage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from passes.evaluate.copied_function import copied_function
from passes.graph.nodes import storage_key
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
