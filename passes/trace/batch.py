"""Batches: naming their tensors, finding the batch dimension, handing forward its share.

A batch is what the user's data loader yields: a tensor, a tuple or list, any mapping (a tokenizer's
``BatchEncoding`` too), a dataclass, nested as deep as they like. Everything else in the compiler knows a batch as ``{leaf
name: tensor}``.

    {"input_ids": x, "extra": {"mask": m}}      ->  {"input_ids": x, "extra.mask": m}
    (x, y) with forward(self, image)            ->  {"image": x, "batch.1": y}
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from cost_models.errors import ModelError, UsageError

__all__ = [
    "batch_dim_candidates",
    "flatten_batch",
    "forward_arguments",
    "forward_constants",
    "forward_names",
    "forward_part",
    "map_tensors",
]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
MAX_CANDIDATES = 4
"""The most dimensions of the first leaf that are tried as the batch dimension before we give up."""


def map_tensors(batch: object, visit: Callable[[tuple[str, ...], Tensor], Tensor]) -> Any:
    """Rebuild the structure with ``visit(path, tensor)`` for every tensor, in a fixed order; never in place."""
    return _map(batch, (), visit)


def _map(value: Any, path: tuple[str, ...], visit: Callable[[tuple[str, ...], Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return visit(path, value)
    if isinstance(value, Mapping):
        items = {key: _map(item, (*path, str(key)), visit) for key, item in value.items()}
        return _like_mapping(value, items)
    if isinstance(value, list | tuple):
        values = [_map(item, (*path, str(index)), visit) for index, item in enumerate(value)]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*values)
        return values if isinstance(value, list) else tuple(values)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(value, **{f: _map(getattr(value, f), (*path, f), visit) for f in fields})
    return value


def _like_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Put ``items`` into the user's own mapping type, so that a loss may write ``batch.labels`` if that works."""
    if type(original) is dict or not isinstance(original, MutableMapping):
        return items
    twin = _twin(original)
    for key, item in items.items():
        twin[key] = item
    return twin


def _twin(original: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """Copy a mapping, to be written without the original noticing; the values are the same objects.

    Dictionaries, ``UserDict`` and types with a ``__copy__`` of their own copy what they store. Any other type may keep
    its items in an attribute that a shallow copy shares, so everything but the values is copied deeply.
    """
    if isinstance(original, dict | UserDict) or hasattr(type(original), "__copy__"):
        return copy.copy(original)
    return copy.deepcopy(original, {id(value): value for value in original.values()})


def flatten_batch(batch: object, names: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return every tensor of the batch by its leaf name, in order of appearance.

    ``names``: names of a tuple's elements (``forward_names(model)``); those beyond are called ``batch.N``.
    """
    leaves: dict[str, Tensor] = {}

    def visit(path: tuple[str, ...], leaf: Tensor) -> Tensor:
        name = _leaf_name(path, batch, names)
        if name in leaves:
            raise ModelError(
                f"two tensors of the batch are both called {name!r}",
                ["nested keys are joined with dots"],
                ["rename one of the keys"],
            )
        leaves[name] = leaf
        return leaf

    map_tensors(batch, visit)
    return leaves


def forward_constants(
    model: nn.Module, batch: object, has_loss_fn: bool, *, partial: bool = False
) -> dict[str, object]:
    """Return the numbers, words and Nones that ``forward`` gets of the batch, by path, defaults too: a trace bakes them in.

    ``partial``: the batch may lack arguments that forward needs (a rank loads what its own segments read).
    """
    args, kwargs = forward_arguments(model, batch, has_loss_fn, partial=partial)
    named = _named(_signature(model))
    kwargs = {
        **{p.name: p.default for p in named[len(args) :] if p.default is not inspect.Parameter.empty},
        **kwargs,
    }
    found: dict[str, object] = {}

    def visit(path: str, value: object) -> None:
        if value is None or isinstance(value, bool | int | float | complex | str):
            found[path] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                visit(f"{path}.{key}", item)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                visit(f"{path}.{index}", item)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                visit(f"{path}.{field.name}", getattr(value, field.name))

    for name, value in (*zip(forward_names(model), args, strict=False), *kwargs.items()):
        visit(name, value)
    return found


def _leaf_name(path: tuple[str, ...], batch: object, names: Sequence[str]) -> str:
    if isinstance(batch, Tensor):
        path = ("0",)
    if isinstance(batch, Tensor | list | tuple):
        index = int(path[0])
        root = names[index] if index < len(names) else f"batch.{index}"
        return ".".join((root, *path[1:]))
    return ".".join(path)


def _signature(model: nn.Module) -> list[inspect.Parameter]:
    """Return the parameters of ``model.forward`` without self."""
    if not inspect.ismethod(model.forward):
        return list(inspect.signature(model.forward).parameters.values())
    first, *rest = _parameters(model.forward.__func__)
    return [first, *rest] if first.kind is inspect.Parameter.VAR_POSITIONAL else rest


@lru_cache(maxsize=256)
def _parameters(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of ``forward``: asked for every batch of a training run, and slow to find."""
    return tuple(inspect.signature(function).parameters.values())


def forward_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional parameters of ``model.forward``."""
    return tuple(p.name for p in _signature(model) if p.kind in _POSITIONAL)


def forward_arguments(
    model: nn.Module, batch: object, has_loss_fn: bool, *, partial: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) that ``forward`` gets of a batch.

    Mapping: the keys that forward takes (all of them if it has ``**kwargs``), or the mapping itself (``takes_whole``). A
    dataclass with a field for everything
    that forward needs: its fields, likewise; any other is forward's one argument. Tuple: everything, or with a
    loss function as many as forward takes; the loss function sees the whole batch. A bare tensor: that one.
    ``partial``: required arguments may be missing.
    """
    parameters = _signature(model)
    fields = None if not partial and takes_whole(model, batch) else _fields(parameters, batch)
    if fields is not None:
        return (), _keyword_arguments(model, parameters, fields, partial)
    items = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    required = sum(p.default is inspect.Parameter.empty for p in positional)
    unlimited = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    accepted = len(items) if unlimited else len(positional)
    call = f"{type(model).__name__}.forward({', '.join(map(str, parameters))})"
    if len(items) < required or (len(items) > accepted and not has_loss_fn):
        raise ModelError(
            f"the batch does not fit {call}",
            [f"the batch has {len(items)} positional elements, forward takes {required} to {accepted}"],
            [
                "pass example_inputs as a mapping {parameter name: tensor}",
                "pass loss_fn(output, batch) for the rest",
            ],
        )
    if has_loss_fn and max(required, 1) < len(items) <= accepted:
        raise ModelError(
            f"cannot tell which elements of the batch are for {call} and which for the loss only",
            [f"the batch has {len(items)} positional elements, forward takes {required} to {accepted}"],
            ["pass example_inputs as a mapping; keys that forward does not take go to the loss only"],
        )
    return items[:accepted], {}


def forward_part(model: nn.Module, batch: object, has_loss_fn: bool, *, partial: bool = False) -> Any:
    """Return what ``forward`` gets of a batch, as a batch: its leaves have the same names."""
    args, kwargs = forward_arguments(model, batch, has_loss_fn, partial=partial)
    return batch if len(args) == 1 and args[0] is batch else kwargs or args


def takes_whole(model: nn.Module, batch: object) -> bool:
    """Tell whether a mapping is the one argument that ``forward(self, batch)`` needs: no key of it names an argument."""
    named = _named(_signature(model))
    return (
        isinstance(batch, Mapping)
        and all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in _signature(model))
        and [p.kind in _POSITIONAL for p in named if p.default is inspect.Parameter.empty] == [True]
        and not any(p.name in batch for p in named)
    )


def misnamed(model: nn.Module, batch: Any, error: Exception) -> ModelError | None:
    """Make the error for a forward that was given a mapping whole and wanted a tensor; None for another error."""
    if not (isinstance(error, TypeError | AttributeError) and takes_whole(model, batch)):
        return None
    if type(batch).__name__ not in str(error):
        return None
    (wanted,) = (p.name for p in _named(_signature(model)) if p.default is inspect.Parameter.empty)
    return ModelError(
        f"{type(model).__name__}.forward needs {wanted}, which the batch does not have",
        [
            f"the batch has the keys {', '.join(map(str, batch))}",
            f"with all of it as {wanted}, forward ends with {type(error).__name__}: {str(error).splitlines()[0]}",
        ],
        ["name the keys of example_inputs like forward's parameters"],
    )


def _named(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    return [p for p in parameters if p.kind in (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)]


def _fields(parameters: list[inspect.Parameter], batch: object) -> Mapping[Any, Any] | None:
    """Return the batch by key if its keys are forward's arguments; None if it is an argument, or several, itself."""
    if isinstance(batch, Mapping):
        return batch
    if not dataclasses.is_dataclass(batch) or isinstance(batch, type):
        return None
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    needed = [p.name for p in _named(parameters) if p.default is inspect.Parameter.empty]
    return fields if needed and all(name in fields for name in needed) else None


def _keyword_arguments(
    model: nn.Module, parameters: list[inspect.Parameter], batch: Mapping[Any, Any], partial: bool
) -> dict[str, Any]:
    named = [p for p in parameters if p.kind in (*_POSITIONAL[1:], inspect.Parameter.KEYWORD_ONLY)]
    accepted = {p.name for p in named}
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        accepted |= {str(key) for key in batch}
    missing = [p.name for p in named if p.default is inspect.Parameter.empty and p.name not in batch]
    if missing and not partial:
        raise ModelError(
            f"{type(model).__name__}.forward needs {', '.join(missing)}, which the batch does not have",
            [f"the batch has the keys {', '.join(map(str, batch))}"],
            [
                "name the keys of example_inputs like forward's parameters",
                "forward(self, batch), with no other argument that has no default, gets the whole mapping",
            ],
        )
    return {str(key): value for key, value in batch.items() if str(key) in accepted}


# --------------------------------------------------------------------------------------------------
# The batch dimension


@dataclass(frozen=True)
class BatchDims:
    """One guess: the batch dimension per leaf (None: the leaf has none), and the batch size it implies."""

    dims: Mapping[str, int | None]
    size: int

    @property
    def leading(self) -> str:
        """The first leaf that has a batch dimension: the guess stands and falls with it."""
        return next(name for name, dim in self.dims.items() if dim is not None)


def batch_dim_candidates(
    leaves: Mapping[str, Tensor], overrides: Mapping[str, int | None] | None = None
) -> Iterator[BatchDims]:
    """Yield guesses, best first: dimension 0 of the first leaf, and of all leaves of that size; then its other dimensions.

    With ``overrides`` there is one guess: the given dimensions, and dimension 0 of every other leaf of that size.
    """
    given = _checked(leaves, overrides or {})
    if any(dim is not None for dim in given.values()):
        size = next(leaves[name].shape[dim] for name, dim in given.items() if dim is not None)
        yield _guess(leaves, given, size, 0)
        return
    first = next((t for name, t in leaves.items() if name not in given and t.dim() > 0), None)
    if first is None:
        raise ModelError(
            "no tensor of the batch has a batch dimension",
            [f"{name} has shape {tuple(leaf.shape)}" for name, leaf in leaves.items()],
            ["pass example_inputs whose tensors have a batch dimension", "batch_dims={leaf name: dim}"],
        )
    for dim in range(min(first.dim(), MAX_CANDIDATES)):
        yield _guess(leaves, given, first.shape[dim], dim)


def _guess(leaves: Mapping[str, Tensor], given: Mapping[str, int | None], size: int, dim: int) -> BatchDims:
    def of(name: str, leaf: Tensor) -> int | None:
        if name in given:
            return given[name]
        return next((d for d in (dim, 0) if d < leaf.dim() and leaf.shape[d] == size), None)

    return BatchDims({name: of(name, leaf) for name, leaf in leaves.items()}, size)


def _checked(leaves: Mapping[str, Tensor], overrides: Mapping[str, int | None]) -> dict[str, int | None]:
    problems = [
        f"{name!r} is no tensor of the batch; it has {', '.join(leaves)}"
        for name in overrides
        if name not in leaves
    ]
    result: dict[str, int | None] = {}
    for name, dim in overrides.items():
        if name not in leaves or dim is None:
            result[name] = None
        elif not -leaves[name].dim() <= dim < leaves[name].dim():
            problems.append(f"{name} has shape {tuple(leaves[name].shape)}: there is no dimension {dim}")
        else:
            result[name] = dim % leaves[name].dim()
    if not problems:
        sizes = {name: leaves[name].shape[dim] for name, dim in result.items() if dim is not None}
        if len(set(sizes.values())) > 1:
            problems.append(f"the batch dimensions differ in size: {sizes}")
    if problems:
        raise UsageError(
            "batch_dims does not fit the batch", problems, ["give one dimension, or None, per leaf name"]
        )
    return result


def tile(leaf: Tensor, dim: int) -> Tensor:
    """Repeat the leaf twice along ``dim``: export bakes sizes of 1 in, so a batch of one sample is traced as two."""
    return torch.cat([leaf, leaf], dim)


def private_copy(example_inputs: object, model: nn.Module) -> Any:
    """Copy the batch, with a tensor of its own for every leaf, on the model's device (CPU for a meta model).

    Leaves that are one object (``labels=input_ids``) would be traced as one input: a silently wrong loss.
    """
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))

    def clone(path: tuple[str, ...], leaf: Tensor) -> Tensor:
        if leaf.is_meta or isinstance(leaf, FakeTensor):
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
        return leaf.detach().to(device, copy=True)

    return map_tensors(example_inputs, clone)


def open_dims(
    leaves: Mapping[str, Tensor], dynamic_dims: Mapping[str, Sequence[int]]
) -> dict[str, frozenset[int]]:
    """Check ``dynamic_dims``, and count negative dimensions from the front."""
    problems = []
    for name, dims in dynamic_dims.items():
        if name not in leaves:
            problems.append(f"{name!r} is no tensor of the batch; it has {', '.join(leaves)}")
            continue
        rank = leaves[name].dim()
        problems += [f"{name} has {rank} dimensions: there is no {d}" for d in dims if not -rank <= d < rank]
        problems += [
            f"{name} has size 1 in dimension {d}"
            for d in dims
            if -rank <= d < rank and leaves[name].shape[d] == 1
        ]
    if problems:
        raise UsageError(
            "dynamic_dims does not fit the batch", problems, ["dynamic_dims={leaf name: [dim, ...]}"]
        )
    return {name: frozenset(d % leaves[name].dim() for d in dims) for name, dims in dynamic_dims.items()}
