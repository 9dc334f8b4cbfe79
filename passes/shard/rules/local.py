"""Ops on shards, made from ops on whole tensors: sizes and counts among their arguments, and what must divide.

    view(x, [8, 16, 4, 8])      output S0 on an axis of 2, S2 on an axis of 4  ->  view(x, [4, 16, 1, 8])
    group_norm(x, 32, w, b)     channels S1 on an axis of 4                    ->  group_norm(x, 8, w, b)
    squeeze(x), x (4, 1)        S0 on an axis of 4                             ->  squeeze(x, [1])

``passes.shard.sizes`` says which arguments these are; here they become numbers, for ops on real tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from cost_models.errors import InternalError
from cost_models.layout import Mesh, Placement, Shard
from passes.graph.graph import tensor_specs
from passes.graph.nodes import argument, replaced, tensors_of
from passes.shard.rules.shapes import operands_shapes, plain, shape
from passes.shard.sizes import COUNTS, SIZE_ARGUMENTS, ways
from passes.shard.words import Choice, Placements, are_nested, operands
from runtime.mesh.ranks_along import JOINT
from runtime.ops.local import run_local
from runtime.segment.code import Dim, TensorSpec

aten = torch.ops.aten

_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


def has_local_sizes(node: fx.Node) -> bool:
    """Tell whether some argument of the op depends on how its output is sharded."""
    return node.target in SIZE_ARGUMENTS


def local_op(
    node: fx.Node, choices: Sequence[Choice], mesh_shape: Sequence[int]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the op to run on shards and its arguments with local sizes; ``choices``: one per mesh axis. Nodes stay."""
    args, kwargs = tuple(node.args), dict(node.kwargs)
    if node.target in SIZE_ARGUMENTS:
        name, new_sizes = SIZE_ARGUMENTS[node.target]
        taken = [
            _local(sizes, tuple(choice.inputs[i].placement for choice in choices), mesh_shape)
            for i, sizes in enumerate(operands_shapes(node))
        ]
        made = _local(shape(tensors_of(node)[0]), tuple(choice.outputs[0] for choice in choices), mesh_shape)
        sizes = [int(size) for size in new_sizes(node, taken, made)]
        args, kwargs = replaced(node, args, kwargs, name, sizes)
    ranks = math.prod(n for choice, n in zip(choices, mesh_shape, strict=True) if choice.divides)
    if ranks > 1:
        name = next(name for name in COUNTS if argument(node, name) is not None)
        args, kwargs = replaced(node, args, kwargs, name, int(plain(argument(node, name))) // ranks)
    target, args = explicit(node, args)
    return target, args, kwargs


def explicit(node: fx.Node, args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Let ``squeeze`` name the dimensions that it takes away: a shard may have one element where the whole has several."""
    assert callable(node.target)
    if node.target not in _SQUEEZES or node.kwargs:
        return node.target, args
    sizes = operands_shapes(node)[0]
    dim = argument(node, "dim")
    named = range(len(sizes)) if dim is None else [dim] if isinstance(dim, int) else dim
    return aten.squeeze.dims, (args[0], [d % len(sizes) for d in named if sizes and sizes[d] == 1])


def _local(sizes: Sequence[int], placements: Placements, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size // ways(placements, dim, len(sizes), mesh_shape) for dim, size in enumerate(sizes))


def fits(
    node: fx.Node,
    choices: Sequence[Choice],
    mesh_shape: Sequence[int],
    symbols: Mapping[sympy.Symbol, int] | None = None,
) -> bool:
    """Tell whether every dimension and count that the choices shard is divided by the ranks that share it, and axes nest.

    ``symbols``: sizes of a micro-batch; without a size an open dimension divides by anything its factors allow.
    """
    sources = [spec for source in operands(node) for spec in tensor_specs(source)]
    for i, spec in enumerate(sources):
        if not _divides(spec, [choice.inputs[i].placement for choice in choices], mesh_shape, symbols):
            return False
    for i, spec in enumerate(tensor_specs(node)):
        if not _divides(spec, [choice.outputs[i] for choice in choices], mesh_shape, symbols):
            return False
    ranks = math.prod(n for choice, n in zip(choices, mesh_shape, strict=True) if choice.divides)
    return all(count % ranks == 0 for choice in choices for count in choice.divides) and are_nested(choices)


def _divides(
    spec: TensorSpec,
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    symbols: Mapping[sympy.Symbol, int] | None,
) -> bool:
    parts: dict[int, int] = {}
    for placement, ranks in zip(placements, mesh_shape, strict=True):
        if isinstance(placement, Shard):
            parts[placement.dim] = parts.get(placement.dim, 1) * ranks
    return all(_divisible(spec.shape[dim], count, symbols) for dim, count in parts.items())


def _divisible(size: Dim, parts: int, symbols: Mapping[sympy.Symbol, int] | None) -> bool:
    if isinstance(size, int):
        return size % parts == 0
    if symbols is not None:
        return int(size.subs(symbols)) % parts == 0
    # 16·s0 is a multiple of 4 for some s0, and so is s0; 2·s0 + 1 is of no even number.
    return any(int(size.subs(dict.fromkeys(size.free_symbols, n))) % parts == 0 for n in range(1, parts + 1))


def local_form(
    node: fx.Node, args: tuple[Any, ...], choices: Sequence[Choice], mesh: Mesh
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the op and its arguments, or what stands for it if its shards need more than their own numbers."""
    roles: dict[str, str] = {}
    functions: set[str] = set()
    for axis, choice in enumerate(choices):
        if choice.local and mesh.shape[axis] > 1:
            function, _, role = choice.local.partition(":")
            functions.add(function)
            name = mesh.axes[axis]
            roles[role] = f"{roles[role]}{JOINT}{name}" if role in roles else name
    if not functions:
        return explicit(node, args)
    if len(functions) > 1:
        raise InternalError(f"shard {node.name}", [f"it has two local forms: {', '.join(sorted(functions))}"])
    return run_local, (functions.pop(), str(node.target), roles, *args)
