"""Autocast regions become explicit casts.

Before: ``wrap_with_autocast("cpu", bfloat16, body=linear(x, w, b))``
After:  ``linear(to(x, bfloat16), to(w, bfloat16), to(b, bfloat16))``

Which inputs an op casts, and to what, is not read from a list that could age but asked of torch's own dispatcher: the
op runs on its fake inputs once with and once without autocast, and the casts of its inputs that appear only with it are
autocast's. A composite op that casts *inside* (``einsum``, ``cross_entropy_loss``) is replaced by its parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from passes.graph.nodes import call, origin, quiet

aten = torch.ops.aten


@dataclass(frozen=True)
class Autocast:
    """An enabled autocast: the device type and the low precision."""

    device: str
    dtype: torch.dtype


@dataclass
class CastCache:
    """Casts of parameters, made once each as torch's weight cache does (so gradients add up in the same precision)."""

    parameters: dict[tuple[fx.Node, torch.dtype], fx.Node] = field(default_factory=dict)


def copy_with_casts(
    graph: fx.Graph,
    node: fx.Node,
    environment: Mapping[fx.Node, Any],
    autocast: Autocast | None,
    cache: CastCache,
) -> fx.Node | tuple[fx.Node, ...]:
    """Copy ``node`` into ``graph`` with the casts that ``autocast`` would make.

    Returns the copy; of an op that is replaced by its parts and has several results, a tuple of their nodes.
    """
    if autocast is None or not isinstance(node.target, torch._ops.OpOverload):
        return graph.node_copy(node, lambda n: environment[n])
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: environment[n])
    values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    casts: frozenset[tuple[int, torch.dtype]] = frozenset()
    if any(_castable(value) for value in pytree.tree_leaves(values)):
        if _has_kernel(node.target, f"Autocast{autocast.device.upper()}"):
            casts = _watch(node.target, values, autocast).inputs
        elif _has_kernel(node.target, "CompositeImplicitAutograd") and _differs(
            node.target, values, autocast
        ):
            return _decomposed(graph, node, (args, kwargs), values, autocast)
    if not casts:
        return graph.node_copy(node, lambda n: environment[n])
    leaves, shape = pytree.tree_flatten((args, kwargs))
    for position, dtype in sorted(casts, key=lambda cast: cast[0]):
        leaves[position] = _cast(graph, leaves[position], dtype, node, cache)
    args, kwargs = pytree.tree_unflatten(leaves, shape)
    copied = graph.create_node("call_function", node.target, args, kwargs, name=node.name)
    copied.meta.update(node.meta)
    return copied


def _has_kernel(target: torch._ops.OpOverload, key: str) -> bool:
    name = target._schema.name
    if target._schema.overload_name:
        name += f".{target._schema.overload_name}"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def _differs(target: torch._ops.OpOverload, values: Any, autocast: Autocast) -> bool:
    """Tell whether autocast casts something inside a composite op."""
    dtypes = {value.dtype for value in pytree.tree_leaves(values) if _castable(value)}
    with_autocast = _watch(target, values, autocast)
    if not with_autocast.made:
        return False
    # Mixed precisions: without autocast the op may not even run.
    return len(dtypes) > 1 or with_autocast != _watch(target, values, None)


def _cast(graph: fx.Graph, source: fx.Node, dtype: torch.dtype, like: fx.Node, cache: CastCache) -> fx.Node:
    key = (source, dtype)
    if key in cache.parameters:
        return cache.parameters[key]
    mode = source.meta["val"].fake_mode
    made = call(graph, mode, aten.to.dtype, (source, dtype), like=like)
    if source.op == "placeholder" and source.meta["val"].requires_grad:
        cache.parameters[key] = made
    return made


@dataclass(frozen=True)
class _Casts:
    """The casts that were seen: (position among the flat arguments, dtype) of inputs', and every one made, in order."""

    inputs: frozenset[tuple[int, torch.dtype]]
    made: tuple[torch.dtype, ...]


class _CastWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.positions = {id(value): i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
        self.inputs: set[tuple[int, torch.dtype]] = set()
        self.made: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = (kwargs or {}).get("dtype")
        if func is aten._to_copy.default and dtype is not None:
            self.made.append(dtype)
            if id(args[0]) in self.positions:
                self.inputs.add((self.positions[id(args[0])], dtype))
        return func(*args, **(kwargs or {}))


def _watch(target: Any, values: Any, autocast: Autocast | None) -> _Casts:
    leaves = pytree.tree_leaves(values)
    mode = next(value.fake_mode for value in leaves if _castable(value))
    args, kwargs = values
    watch = _CastWatch(leaves)
    with quiet(mode), watch, _scope(autocast):
        target(*args, **kwargs)
    return _Casts(frozenset(watch.inputs), tuple(watch.made))


def _scope(autocast: Autocast | None) -> Any:
    if autocast is None:
        return torch.autocast("cpu", enabled=False)
    return torch.autocast(autocast.device, dtype=autocast.dtype, cache_enabled=False)


def _decomposed(
    graph: fx.Graph, node: fx.Node, arguments: Any, values: Any, autocast: Autocast
) -> fx.Node | tuple[fx.Node, ...]:
    """Copy the parts of a composite op, as autocast runs them, into ``graph``; returns its result's nodes."""
    leaves, shape = pytree.tree_flatten(arguments)
    flat_values = pytree.tree_leaves(values)
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]

    def run(*nodes: Any) -> Any:
        filled = list(leaves)
        for position, value in zip(positions, nodes, strict=True):
            filled[position] = value
        args, kwargs = pytree.tree_unflatten(filled, shape)
        with _scope(autocast):
            return node.target(*args, **kwargs)  # type: ignore[operator]

    mode = next(value.fake_mode for value in flat_values if _castable(value))
    with quiet(mode):
        traced = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=False)(
            *(flat_values[i] for i in positions)
        )
    environment: dict[fx.Node, Any] = dict(
        zip(
            (n for n in traced.graph.nodes if n.op == "placeholder"),
            (leaves[i] for i in positions),
            strict=True,
        )
    )
    result: Any = None
    for part in traced.graph.nodes:
        if part.op == "call_function":
            copied = graph.node_copy(part, lambda n: environment[n])
            copied.meta = {**origin(node), "val": part.meta["val"]}
            environment[part] = copied
        elif part.op == "output":
            result = fx.map_arg(part.args[0], lambda n: environment[n])
    if not isinstance(result, fx.Node):
        return tuple(result)
    result.meta = {**node.meta, "val": result.meta["val"]}
    return result


def _castable(value: Any) -> bool:
    return isinstance(value, torch._subclasses.FakeTensor) and value.is_floating_point()
