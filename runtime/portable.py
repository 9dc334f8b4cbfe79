"""Segment graphs on their way to another process: plain data, and the same node names at the other end.

Pickling an ``fx.GraphModule`` would trace its code again there, which is slow, renames nodes, and runs functions that are
not ops. Here a graph travels as the list of its nodes; an ATen op travels as its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate


@dataclass(frozen=True)
class Reference:
    """The result of an earlier node."""

    name: str


@dataclass(frozen=True)
class AtenOp:
    """``aten::add.Tensor`` by its parts."""

    namespace: str
    name: str
    overload: str


@dataclass(frozen=True)
class PackedNode:
    """One node: ``target`` is an AtenOp, a picklable function, or a placeholder's name."""

    name: str
    op: str
    target: Any
    args: Any
    kwargs: Any


def pack(module: fx.GraphModule) -> tuple[PackedNode, ...]:
    """The module's graph as data. Its nodes' ``meta`` stays behind."""

    def refer(argument: Any) -> Any:
        return Reference(argument.name) if isinstance(argument, fx.Node) else argument

    return tuple(
        PackedNode(
            node.name,
            node.op,
            _pack_target(node.target),
            map_aggregate(node.args, refer),
            map_aggregate(node.kwargs, refer),
        )
        for node in module.graph.nodes
    )


def unpack(nodes: tuple[PackedNode, ...]) -> fx.GraphModule:
    """The graph module that ``pack`` was given."""
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}

    def resolve(argument: Any) -> Any:
        return made[argument.name] if isinstance(argument, Reference) else argument

    for node in nodes:
        args, kwargs = map_aggregate(node.args, resolve), map_aggregate(node.kwargs, resolve)
        made[node.name] = graph.create_node(
            node.op, _unpack_target(node.target), args, kwargs, name=node.name
        )
    return fx.GraphModule(torch.nn.Module(), graph)


def _pack_target(target: Any) -> Any:
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        return AtenOp(namespace, name, target._overloadname)
    return target


def _unpack_target(target: Any) -> Callable[..., Any] | str:
    if isinstance(target, AtenOp):
        packet = getattr(getattr(torch.ops, target.namespace), target.name)
        overload: Callable[..., Any] = getattr(packet, target.overload)
        return overload
    return target  # type: ignore[no-any-return]
