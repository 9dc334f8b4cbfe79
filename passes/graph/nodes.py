"""Helpers that rewriting passes share: make a node with a value, drop dead ones, say where a node came from."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeGuard

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate
from torch.fx.passes.shape_prop import TensorMetadata

from runtime.segment.code import Dim
from runtime.segment.recompute import writes_statistics
from runtime.user_code import line_in

_ORIGIN = ("nn_module_stack", "stack_trace", "module_path", "source")
WRITES_UNDECLARED = frozenset({"aten::batch_norm", "aten::instance_norm"})
"""Ops that update a buffer (running statistics) without saying so in their schema."""


def value_of(argument: Any) -> Any:
    """Return the argument with every node in it replaced by the node's example value."""
    return fx.map_arg(argument, lambda node: node.meta["val"])


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """Return the fake mode that the graph was traced under, None for a graph without tensors."""
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), torch._subclasses.FakeTensor):
            mode: FakeTensorMode = node.meta["val"].fake_mode
            return mode
    return None


def fake_call(
    mode: FakeTensorMode | None, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run one op on example values: shapes and dtypes only, no autograd."""
    if mode is None:
        return target(*args, **kwargs)
    with quiet(mode):
        return target(*args, **kwargs)


@contextmanager
def quiet(mode: FakeTensorMode) -> Iterator[None]:
    """Keep dynamic sizes dynamic while ops run on fake tensors.

    Some ops compare sizes, which would fix them for good; some kernels in C++ (pad) take numbers only, those in Python
    do not.
    """
    shape_env = mode.shape_env
    unguarded = shape_env.suppress_guards() if shape_env is not None else nullcontext()
    with mode, torch.no_grad(), unguarded, enable_python_dispatcher():
        yield


def call(
    graph: fx.Graph,
    mode: FakeTensorMode | None,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: fx.Node,
) -> fx.Node:
    """Make a new op at the graph's insertion point, with its value and the origin of ``like``."""
    node = graph.call_function(target, args, dict(kwargs or {}))
    node.meta.update(origin(like))
    node.meta["val"] = fake_call(mode, target, value_of(args), value_of(dict(kwargs or {})))
    return node


def new_module(old: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Make a module around ``graph``, last in a pass: it compiles the graph, which costs more than most passes."""
    module = fx.GraphModule(torch.nn.Module(), graph)
    module.meta.update(old.meta)
    return module


def copy_graph(old: fx.Graph) -> fx.Graph:
    """Copy a graph, node names included."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(old, {})).meta.update(old.output_node().meta)
    return graph


def drop_dead_code(graph: fx.Graph) -> None:
    """Erase ops whose result nobody reads and that write nothing (random ones included)."""
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users and not writes(node):
            graph.erase_node(node)


def writes(node: fx.Node) -> bool:
    """Tell whether an op writes to a tensor that it is given: it counts even if nobody reads its result."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return writes_statistics(node)
    return node.target._schema.is_mutable or node.target._schema.name in WRITES_UNDECLARED


SYNCHRONIZED = "synchronized"
"""The entry of a batch norm's ``meta`` that tells whether its module is one that processes synchronize."""


def origin(node: fx.Node) -> dict[str, Any]:
    """Return the part of ``meta`` that says where in the model a node was made."""
    return {key: node.meta[key] for key in _ORIGIN if key in node.meta}


def where(node: fx.Node) -> str:
    """Describe a node's place as far as it is known: "aten.add.Tensor in module 'encoder.layer.0' (file.py:12)"."""
    module, source = node.meta.get("module_path"), node.meta.get("source")
    if module is None:
        stack = [
            entry[0] for entry in node.meta.get("nn_module_stack", {}).values() if isinstance(entry, tuple)
        ]
        module = str(stack[-1]).removeprefix("model").removeprefix(".") if stack else ""
    source = source or line_in(node.meta.get("stack_trace") or "")
    place = f"module {str(module)!r}" if module else "the root module"
    return f"{node.target} in {place}" + (f" ({source})" if source else "")


def op_name(node: fx.Node) -> str:
    """Return "linear" for ``aten.linear.default``; "" for what is no op of torch."""
    target = node.target
    return target._schema.name.split("::")[-1] if isinstance(target, torch._ops.OpOverload) else ""


def nodes_in(arguments: Any) -> list[fx.Node]:
    """List the nodes among the arguments, in order, repeated as often as they are given."""
    found: list[fx.Node] = []
    fx.map_arg(arguments, found.append)
    return found


def tensors_in(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a result: itself, or those of a tuple, in order."""
    items = value if isinstance(value, list | tuple) else (value,)
    return tuple(item for item in items if isinstance(item, torch.Tensor))


def tensors_of(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """Return the tensors that ``node`` produces, in order."""
    return tensors_in(node.meta.get("val"))


def are_read(node: fx.Node) -> tuple[bool, ...]:
    """Tell of each tensor that ``node`` produces whether an op reads it, or might: those of a tuple are projected first.

    The sizes of what nobody reads may mean nothing: ``embedding_bag`` makes a tensor of the bags' sizes with as many
    elements as there are bags if its weight requires a gradient, and as there are offsets if not.
    """
    value = node.meta.get("val")
    if not isinstance(value, list | tuple):
        return (True,) * len(tensors_of(node))
    taken = {user.args[1] for user in node.users if user.target is operator.getitem}
    return tuple(place in taken for place, item in enumerate(value) if isinstance(item, torch.Tensor))


def is_floating(node: fx.Node) -> bool:
    """Tell whether some tensor that ``node`` produces is floating-point or complex."""
    return any(value.is_floating_point() or value.is_complex() for value in tensors_of(node))


def is_size(value: Any) -> TypeGuard[torch.SymInt | torch.SymFloat | torch.SymBool]:
    """Tell whether a value is a number that follows from sizes."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def symbolic(size: Any) -> Dim:
    """Return a size as a number or an expression."""
    if isinstance(size, int) or not is_size(size):
        dim: Dim = size
        return dim
    expression = size.node.expr
    return int(expression) if getattr(expression, "is_Integer", False) else expression


def storage_key(value: Any) -> int | None:
    """Return a key that is equal for tensors that share memory; None for anything without memory."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """Return the op's argument ``name`` as given, else its schema's default, else ``default``."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return default
    return given_argument(node.target, node.args, node.kwargs, name, default)


def given_argument(
    target: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    name: str,
    default: Any = None,
) -> Any:
    """Return argument ``name`` of a call as given, else its schema's default, else ``default``."""
    for position, declared in enumerate(target._schema.arguments):
        if declared.name == name:
            if name in kwargs:
                return kwargs[name]
            return args[position] if position < len(args) else declared.default_value
    return default


def reshaping(target: Any) -> Any:
    """Put ``reshape`` in place of ``view``, which refuses what is not laid out in memory as it was when traced."""
    views = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
    return torch.ops.aten.reshape.default if target in views else target


def relocated(node: fx.Node, device: torch.device) -> fx.Node:
    """Write ``device`` over every device among the op's arguments, in place."""

    def relocate(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    node.args, node.kwargs = map_aggregate(node.args, relocate), map_aggregate(node.kwargs, relocate)
    return node


def replaced(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, value: Any) -> Any:
    """Return (args, kwargs) with the schema's argument ``name`` set."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, declared in enumerate(node.target._schema.arguments):
        if declared.name == name and name not in kwargs and position < len(args):
            return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: value}


def recorded_requires_grad(node: fx.Node) -> bool | None:
    """Tell whether the tensor required a gradient when the model was traced; None if nothing was recorded.

    The exporter loses ``no_grad`` inside ``autocast``, and puts ops of a custom ``autograd.Function`` into the
    graph as if they were differentiable; what it recorded per tensor is right in both cases.
    """
    recorded = node.meta.get("tensor_meta")
    if isinstance(recorded, TensorMetadata):
        return bool(recorded.requires_grad)
    value = node.meta.get("val")
    if node.op == "placeholder" and isinstance(value, torch.Tensor):
        return value.requires_grad
    return False if node.meta.get("grad_enabled") is False else None
