"""Segment graphs on their way to another process: plain data, and the same node names at the other end.

Pickling an ``fx.GraphModule`` would trace its code again there, which is slow, renames nodes, and runs functions that are
not ops. Here a graph travels as the list of its nodes; an ATen op travels as its name.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._library.custom_ops import OPDEFS
from torch.fx.node import map_aggregate

import runtime.ops.bags
import runtime.ops.flex  # noqa: F401 both register ops of ours that graphs hold
from runtime.ops.opaque import Opaque, refuse_unportable


@dataclass(frozen=True)
class Reference:
    """The result of an earlier node."""

    name: str


@dataclass(frozen=True)
class AtenOp:
    """An op by its names: ``aten::add.Tensor``. ``module``: the module and file that define a custom op in Python."""

    namespace: str
    name: str
    overload: str
    module: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class PackedNode:
    """One node: ``target`` is an AtenOp, a picklable function, or a placeholder's name."""

    name: str
    op: str
    target: Any
    args: Any
    kwargs: Any


def pack(module: fx.GraphModule) -> tuple[PackedNode, ...]:
    """Return the module's graph as plain data; its nodes' ``meta`` stays behind."""

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
    """Return the graph module that ``pack`` was given."""
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
        return AtenOp(namespace, name, target._overloadname, _defined_in(target._schema.name))
    if isinstance(target, Opaque):
        refuse_unportable(target)
    return target


def _unpack_target(target: Any) -> Callable[..., Any] | str:
    if isinstance(target, AtenOp):
        if target.module[0] and target.module[0] not in sys.modules:
            _import(*target.module)
        packet = getattr(getattr(torch.ops, target.namespace), target.name)
        overload: Callable[..., Any] = getattr(packet, target.overload)
        return overload
    return target  # type: ignore[no-any-return]


def _defined_in(qualified_name: str) -> tuple[str, str]:
    definition = OPDEFS.get(qualified_name)
    module = definition._init_fn.__module__ if definition is not None else ""
    return module, str(getattr(sys.modules.get(module), "__file__", None) or "")


def _import(module: str, file: str) -> None:
    """Import the module that registers a custom op: by name, or from the file that ``file.py:factory`` named."""
    if not file or importlib.util.find_spec(module.partition(".")[0]) is not None:
        importlib.import_module(module)
        return
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None  # a .py file always has a spec and a loader
    assert spec.loader is not None
    sys.modules[module] = found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
