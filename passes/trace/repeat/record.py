"""One run of a block as it is traced: the nodes that it adds to the graph, and what it returns, fit to be written again.

    recorded = record(tracer, block, sight_before, run)
    recorded.nodes      every node, with the word that its name was made from
    recorded.inputs     the nodes of others that these read: arguments, parameters, buffers, sizes

``NotRepeatableError`` says why a run is more than its nodes: it makes sizes of its own, writes to what it is given, or
keeps what it computed.
"""

from __future__ import annotations

import gc
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from passes.graph.nodes import WRITES_UNDECLARED, nodes_in, storage_key, symbolic, tensors_in, writes
from passes.trace.repeat.sight import Place, Sight
from passes.trace.repeat.values import PLAIN, own_attributes

_SIZES = torch.ops.aten
_SIZE_OPS = (
    *(function for function in vars(operator).values() if isinstance(function, types.BuiltinFunctionType)),
    *(torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_ite, torch.sym_int, torch.sym_float),
    *(
        _SIZES.sym_size.int,
        _SIZES.sym_stride.int,
        _SIZES.sym_numel.default,
        _SIZES.sym_storage_offset.default,
    ),
)


class NotRepeatableError(Exception):
    """The reason why another block's run cannot be written down from this one's."""


@dataclass(frozen=True)
class RecordedNode:
    """A node that the run made, and the word that its name was made from."""

    node: fx.Node
    word: str


@dataclass(frozen=True)
class Recorded:
    """A run of a block in a trace."""

    path: str
    """The block's path in the tracer's names."""
    nodes: tuple[RecordedNode, ...]
    arguments: tuple[fx.Node, ...]
    """The nodes of the tensors among the arguments, in order."""
    state: Mapping[Place, fx.Node]
    """The nodes of the parameters and buffers."""
    sizes: frozenset[fx.Node]
    """Nodes of sizes that the run reads, the same for every run."""
    renamed: Mapping[int | Place, fx.Node]
    """The nodes that stand for an argument, or a parameter or buffer, from now on: ``x.to(x.dtype)`` is ``x`` itself."""
    result: Any
    """The value that the run returned, its tensors as ``Returned`` or ``Argument``."""
    calls: Mapping[str, int]
    """Calls of each module of the block, by its path in the tracer's names."""
    depth: int
    """The number of modules around the block, the block not among them."""


@dataclass(frozen=True)
class Returned:
    """A tensor that the run computed: the last node of it."""

    node: fx.Node
    tensor: Tensor


@dataclass(frozen=True)
class Argument:
    """A tensor that the run was given, by its number among the arguments' tensors."""

    number: int


def node_of(tracer: Any, tensor: Tensor) -> fx.Node:
    """Return the node whose value a tensor is in the trace. Raises NotRepeatableError if it has none, or is a constant."""
    known = tracer.tensor_tracker.get(tensor)
    if known is None or known.constant is not None:
        raise NotRepeatableError("it is given a tensor that is a constant of the graph")
    node: fx.Node = known.proxy.node
    return node


def record(
    tracer: Any, path: str, sight: Sight, mode: FakeTensorMode, run: Callable[[], Any]
) -> tuple[Any, Recorded | NotRepeatableError]:
    """Run a block; return its result, and the recording of the run or the reason why there is none."""
    shape_env = mode.shape_env
    assert shape_env is not None
    try:
        arguments = tuple(node_of(tracer, tensor) for tensor in sight.tensors)
        state = {place: node_of(tracer, tensor) for place, tensor in sight.state.items()}
    except NotRepeatableError as reason:
        return run(), reason
    known, calls = _known_sizes(tracer, shape_env), dict(tracer.num_calls)
    last = tracer.graph._root._prev
    with _made(tracer.graph) as made:
        result = run()
    try:
        if _known_sizes(tracer, shape_env) != known:
            raise NotRepeatableError("it makes sizes, or assumptions about sizes, of its own")
        if _after(last) != [each.node for each in made]:
            raise NotRepeatableError("it changes the graph elsewhere than at its end")
        sizes = _outer_sizes(made, {*arguments, *state.values()}, sight)
        own = {each.node for each in made}
        described = _result(result, tracer, sight, own)
        given: dict[int | Place, Tensor] = dict(enumerate(sight.tensors))
        given.update(sight.state.items())
        renamed = {place: node for place, t in given.items() if (node := node_of(tracer, t)) in own}
        _refuse_kept(tracer, own, (result, list(given.values())))
        _refuse_strangers(tracer, path, made)
    except Exception as error:  # noqa: BLE001 (whatever it is: the block has run, as ever)
        return result, error if isinstance(error, NotRepeatableError) else NotRepeatableError(repr(error))
    counted = {name: n - calls.get(name, 0) for name, n in tracer.num_calls.items() if n != calls.get(name)}
    depth = len(tracer.module_stack)
    return result, Recorded(path, tuple(made), arguments, state, sizes, renamed, described, counted, depth)


@contextmanager
def _made(graph: fx.Graph) -> Iterator[list[RecordedNode]]:
    """Collect the nodes that are made."""
    made: list[RecordedNode] = []
    original = graph.create_node

    def create_node(
        op: str, target: Any, args: Any = None, kwargs: Any = None, name: Any = None, kind: Any = None
    ) -> fx.Node:
        node = original(op, target, args, kwargs, name, kind)
        made.append(RecordedNode(node, name if name is not None else graph._target_to_str(target)))
        return node

    graph.create_node = create_node  # type: ignore[method-assign, assignment]
    try:
        yield made
    finally:
        del graph.create_node  # the class's own is there again


def _after(node: fx.Node) -> list[fx.Node]:
    found = []
    node = node._next
    while node.op != "root":
        found.append(node)
        node = node._next
    return found


def _known_sizes(tracer: Any, shape_env: ShapeEnv) -> tuple[int, ...]:
    """Return how many sizes and assumptions are known."""
    return (
        len(tracer.sympy_expr_tracker),
        len(shape_env.guards),
        len(shape_env.replacements),
        len(shape_env.var_to_range),
        len(shape_env.deferred_runtime_asserts),
        shape_env._version_counter,
    )


def _outer_sizes(made: list[RecordedNode], given: set[fx.Node], sight: Sight) -> frozenset[fx.Node]:
    """Return the nodes of sizes that the run reads from before it; refuse every other kind of node."""
    own = {each.node for each in made}
    symbols = {
        id(size.node)
        for tensor in sight.tensors
        for size in (*tensor.shape, *tensor.stride())
        if isinstance(size, torch.SymInt)
    }
    sizes = set()
    given_memory = {storage_key(tensor) for node in given for tensor in tensors_in(node.meta.get("val"))}
    for each in made:
        _refuse_unrepeatable(each.node, given_memory)
        for source in nodes_in((each.node.args, each.node.kwargs)):
            if source in own or source in given:
                continue
            value = source.meta.get("val")
            if not isinstance(value, torch.SymInt) or id(value.node) not in symbols:
                raise NotRepeatableError(f"it reads {source.name}, which is none of its arguments")
            sizes.add(source)
    return frozenset(sizes)


def _refuse_unrepeatable(node: fx.Node, given_memory: set[int | None]) -> None:
    target, value = node.target, node.meta.get("val")
    if target is operator.getitem:
        return
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        if target not in _SIZE_OPS:
            raise NotRepeatableError(f"it asks for a size by {target}")
        return
    plain = (
        isinstance(target, torch._ops.OpOverload) and target.namespace != "partitioner"
    )  # ours: opaque parts
    if node.op != "call_function" or not plain or not tensors_in(value):
        raise NotRepeatableError(f"{node.op} {target} is no operation on tensors")
    if torch.Tag.data_dependent_output in target.tags:  # type: ignore[union-attr]
        raise NotRepeatableError(f"{target} gives Python a number")
    if writes(node) and (
        target._schema.name in WRITES_UNDECLARED  # type: ignore[union-attr]
        or any(
            storage_key(t) in given_memory
            for n in node.all_input_nodes
            for t in tensors_in(n.meta.get("val"))
        )
    ):
        raise NotRepeatableError(f"{target} writes to what it is given")


def _result(value: Any, tracer: Any, sight: Sight, own: set[fx.Node]) -> Any:
    """Describe what the run returned."""
    if isinstance(value, Tensor):
        for number, tensor in enumerate(sight.tensors):
            if tensor is value:
                return Argument(number)
        node = node_of(tracer, value)
        if node not in own:
            raise NotRepeatableError(f"it returns {node.name}, which it has not computed")
        if own_attributes(value):
            raise NotRepeatableError("it returns a tensor with attributes of its own")
        _refuse_odd_memory(node, own)
        return Returned(node, value)
    if type(value) in (tuple, list):
        return type(value)(_result(item, tracer, sight, own) for item in value)
    if type(value) is dict:
        return {key: _result(item, tracer, sight, own) for key, item in value.items()}
    if type(value) not in PLAIN:
        raise NotRepeatableError(f"it returns a {type(value).__name__}")
    return value


def _refuse_odd_memory(node: fx.Node, own: set[fx.Node]) -> None:
    """Refuse a result that is not all of its memory: a view of something larger, or of the run's input."""
    value = node.meta["val"]
    key, elements = storage_key(value), 1
    left = [
        (symbolic(size), symbolic(stride)) for size, stride in zip(value.shape, value.stride(), strict=True)
    ]
    while left:  # dense: each dimension steps over all elements of those inside it
        inner = next((dim for dim in left if dim[1] == elements), None)
        if inner is None:
            raise NotRepeatableError(f"it returns {node.name}, which has gaps")
        left.remove(inner)
        elements = elements * inner[0]
    for other in {source for made in own for source in (made, *made.all_input_nodes)}:
        for tensor in tensors_in(other.meta.get("val")):
            same_elements = prod(map(symbolic, tensor.shape)) == elements
            if storage_key(tensor) == key and (other not in own or not same_elements):
                raise NotRepeatableError(f"it returns {node.name}, a view of {other.name}")


def _refuse_kept(tracer: Any, own: set[fx.Node], known: Any) -> None:
    """Refuse a run whose tensors somebody keeps, beside the ``known`` ones: a list, an attribute, a closure."""
    if _keepers(tracer, own, known):
        gc.collect()  # what died in a cycle still refers to it
        if left := _keepers(tracer, own, known):
            raise NotRepeatableError(f"a {left[0]} keeps what it computed")


def _keepers(tracer: Any, own: set[fx.Node], known: Any) -> list[str]:
    """Return the types of the objects, frames aside, that refer to tensors of the run beside the ``known`` ones."""
    ids = {id(tensor) for tensor in _tensors(known)}
    alive = tuple(
        tensor
        for tensor in list(tracer.tensor_tracker)
        if id(tensor) not in ids and tracer.tensor_tracker[tensor].proxy.node in own
    )  # autograd keeps some, unseen by Python
    holders = [holder for holder in gc.get_referrers(*alive) if holder is not alive] if alive else []
    return [type(holder).__name__ for holder in holders if not isinstance(holder, types.FrameType)]


def _refuse_strangers(tracer: Any, path: str, made: list[RecordedNode]) -> None:
    """Refuse nodes that other modules than the block's made."""
    depth = len(tracer.module_stack)
    for node in (each.node for each in made):
        stack = list(node.meta["nn_module_stack"].items())[depth:]
        names = [tracer.node_name_to_scope[node.name][0]]
        names += [name for key, (module, _) in stack for name in (key, module)]
        if not all(f"{name}.".startswith(f"{path}.") for name in names):
            raise NotRepeatableError(f"{node.name} was made by a module outside of it")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
