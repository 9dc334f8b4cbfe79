"""From an op on whole tensors to the op on shards: which sizes among its arguments become local, and what must divide.

    view(x, [s0, 16, 4, 8])     output S0 on an axis of 2, S2 on an axis of 4  ->  view(x, [s0 / 2, 16, 1, 8])
    group_norm(x, 32, w, b)     channels S1 on an axis of 4                    ->  group_norm(x, 8, w, b)

Sizes in the graph (``sym_size`` of a batch leaf, and expressions of it) are those of the whole micro-batch; lowering
makes them so where the leaf itself arrives sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from cost_models.layout import Placement, Shard
from passes.graph import tensor_specs
from passes.node_tools import argument
from passes.shard_rules.shapes import operands_shapes, plain, shape, tensors_of
from passes.sharding import Choice, operands
from runtime.segment_code import Dim, TensorSpec

aten = torch.ops.aten

Divide: TypeAlias = Callable[[fx.Node, int], Any]
"""Makes the node of a size divided by a number."""

_SIZES: Mapping[object, str] = {
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.expand.default), "size"),
    **dict.fromkeys(
        (aten.zeros.default, aten.ones.default, aten.full.default, aten.broadcast_to.default), "size"
    ),
    **dict.fromkeys((aten.new_zeros.default, aten.new_ones.default, aten.new_full.default), "size"),
    **dict.fromkeys((aten.empty.memory_format, aten.new_empty.default), "size"),
    aten.reshape.default: "shape",
}
"""Arguments that are the output's whole shape."""

_GROUPS: Mapping[object, str] = {
    aten.group_norm.default: "num_groups",
    **dict.fromkeys(
        (
            aten.conv1d.default,
            aten.conv2d.default,
            aten.conv3d.default,
            aten.conv1d.padding,
            aten.conv2d.padding,
            aten.conv3d.padding,
            aten.conv_transpose1d.default,
            aten.conv_transpose2d.input,
            aten.conv_transpose3d.input,
            aten.convolution.default,
        ),
        "groups",
    ),
}
"""Counts that are divided among the axes whose choices name them (``Choice.divides``)."""


def has_local_sizes(node: fx.Node) -> bool:
    """Whether some argument of the op depends on how its output is sharded."""
    return node.target in _SIZES or node.target in _LIKE_SIZES


def local_op(
    node: fx.Node, choices: Sequence[Choice], mesh_shape: Sequence[int], divide: Divide
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The op to run on shards, its arguments with local sizes; ``choices``: one per mesh axis. Nodes stay as they are.

    ``squeeze`` names the dimensions that it takes away: a shard may have a single element where the whole has several.
    """
    assert callable(node.target)
    if node.target in _SQUEEZES:
        return aten.squeeze.dims, (node.args[0], _squeezed(node)), {}
    changed: dict[str, Any] = {}
    name = _SIZES.get(node.target)
    if name is not None:
        changed[name] = _divided(_given(node, name), _divisors(node, choices, mesh_shape), divide)
    elif node.target in _LIKE_SIZES:
        name, local = _LIKE_SIZES[node.target]
        changed[name] = local(node, _divisors(node, choices, mesh_shape), divide)
    elif node.target in _GROUPS:
        ranks = math.prod(n for choice, n in zip(choices, mesh_shape, strict=True) if choice.divides)
        if ranks > 1:
            name = _GROUPS[node.target]
            changed[name] = int(plain(argument(node, name))) // ranks
    return node.target, *_replaced(node, changed)


_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


def _squeezed(node: fx.Node) -> list[int]:
    sizes = operands_shapes(node)[0]
    dim = argument(node, "dim")
    named = range(len(sizes)) if dim is None else [dim] if isinstance(dim, int) else dim
    return [d % len(sizes) for d in named if sizes[d] == 1] if sizes else []


def _given(node: fx.Node, name: str) -> list[Any]:
    return list(argument(node, name))


def _divisors(node: fx.Node, choices: Sequence[Choice], mesh_shape: Sequence[int]) -> list[int]:
    """Of each dimension of the output, how many parts it is in."""
    found = [1] * tensors_of(node)[0].dim()
    for choice, ranks in zip(choices, mesh_shape, strict=True):
        placement = choice.outputs[0]
        if isinstance(placement, Shard):
            found[placement.dim] *= ranks
    return found


def _divided(sizes: Sequence[Any], divisors: Sequence[int], divide: Divide) -> list[Any]:
    return [_part(size, parts, divide) for size, parts in zip(sizes, divisors, strict=True)]


def _part(size: Any, parts: int, divide: Divide) -> Any:
    """-1 (what is left) stays -1."""
    if parts == 1 or size == -1:
        return size
    return divide(size, parts) if isinstance(size, fx.Node) else int(size) // parts


def _unflattened(node: fx.Node, divisors: Sequence[int], divide: Divide) -> list[Any]:
    """``sizes`` are those of the new dimensions only."""
    sizes = _given(node, "sizes")
    first = int(argument(node, "dim")) % len(operands_shapes(node)[0])
    return _divided(sizes, divisors[first : first + len(sizes)], divide)


def _repeats(node: fx.Node, divisors: Sequence[int], divide: Divide) -> list[Any]:
    """Where one element is repeated the number of repeats is the size; else the input brings its share."""
    name = "repeats" if node.target is aten.repeat.default else "dims"
    repeats = _given(node, name)
    before, after = operands_shapes(node)[0], shape(tensors_of(node)[0])
    repeats = [1] * (len(after) - len(repeats)) + repeats
    old = (1,) * (len(after) - len(before)) + before
    return [
        _part(count, parts if was == 1 else 1, divide)
        for count, parts, was in zip(repeats, divisors, old, strict=True)
    ]


_LIKE_SIZES: Mapping[object, tuple[str, Callable[[fx.Node, Sequence[int], Divide], list[Any]]]] = {
    aten.unflatten.int: ("sizes", _unflattened),
    aten.repeat.default: ("repeats", _repeats),
    aten.tile.default: ("dims", _repeats),
}


def _replaced(node: fx.Node, changed: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The op's arguments with some of them replaced, each where it was given."""
    if not changed:
        return node.args, dict(node.kwargs)
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [declared.name for declared in node.target._schema.arguments]
    args = tuple(changed.get(name, value) for name, value in zip(names, node.args, strict=False))
    return args, {name: changed.get(name, value) for name, value in node.kwargs.items()}


def fits(
    node: fx.Node,
    choices: Sequence[Choice],
    mesh_shape: Sequence[int],
    symbols: Mapping[sympy.Symbol, int] | None = None,
) -> bool:
    """Whether every dimension and count that the choices shard is divided by the ranks that share it.

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
    return all(count % ranks == 0 for choice in choices for count in choice.divides)


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
