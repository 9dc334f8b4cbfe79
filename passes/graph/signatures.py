"""Equal ops and equal blocks: the 80 layers of a transformer are analysed and decided once.

Two ops have one *signature* if they call the same target with operands of equal symbolic shapes, strides, data types and
gradient roles, and equal other arguments. Everything an analysis of a single op can see is in its signature.

    Llama with 80 layers: 5,900 ops, about 50 signatures.

Two blocks (``passes.graph.blocks``) are equal if their ops have the same signatures in the same order. Ops at equal
positions of equal blocks are one *class*, decided once for all of them; every other op is a class of its own.

    layers.0: norm q k v attention … │ layers.1: norm q k v attention … │ …     ─►   one class per position, n members

Classes restrict a search to equal decisions for equal blocks; they say nothing about edges, which are those of the whole
graph (``passes.search.feature.graph``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import sympy
import torch
from torch import fx

from passes.graph.blocks import block_of
from passes.graph.graph import OpGraph, once_per_graph, tensor_specs
from passes.graph.nodes import nodes_in, symbolic
from runtime.ops.local import LEADING, op_called, run_local
from runtime.segment.code import Dim, TensorSpec

Role: TypeAlias = Literal["none", "input", "weight"]
"""The part of a tensor in backward: none, or the half that computes its gradient.

``weight``: a trainable parameter, or something computed from trainable parameters alone (a transposed or cast weight).
"""


@dataclass(frozen=True)
class Operand:
    """One tensor that an op reads: element ``element`` of what ``node`` produces."""

    node: str
    element: int
    spec: TensorSpec
    stride: tuple[Dim, ...]
    role: Role

    @property
    def key(self) -> Hashable:
        return (self.spec.shape, self.stride, self.spec.dtype, self.role)


@dataclass(frozen=True)
class Signature:
    """A class of equal ops, by its first member.

    ``differentiated``: true if the op's output receives a gradient.
    """

    exemplar: fx.Node
    operands: tuple[Operand, ...]
    outputs: tuple[TensorSpec, ...]
    differentiated: bool

    @property
    def target(self) -> Any:
        """The op; where ranks run its local form (``runtime.ops.local``), the op that this stands for."""
        return called(self.exemplar)[0]

    @property
    def runs(self) -> bool:
        """True if the op computes tensors; sizes and ``getitem`` do not."""
        return bool(self.outputs) and self.exemplar.target is not operator.getitem


@dataclass(frozen=True)
class SignatureTable:
    """``signatures[of[i]]`` is the signature of op i; ``operands[i]`` are op i's own operands."""

    signatures: tuple[Signature, ...]
    of: tuple[int, ...]
    operands: tuple[tuple[Operand, ...], ...]
    elements: tuple[tuple[int, ...], ...]
    """``elements[i]``: the elements of op i's result that are tensors; ``(0,)`` for a single tensor."""


@once_per_graph
def group_by_signature(graph: OpGraph) -> SignatureTable:
    """Group the ops of ``graph``; O(ops)."""
    tensors = _Tensors(graph)
    found: dict[Hashable, int] = {}
    signatures: list[Signature] = []
    of: list[int] = []
    operands: list[tuple[Operand, ...]] = []
    for node in graph.ops:
        own = tuple(
            operand for source in nodes_in((node.args, dict(node.kwargs))) for operand in tensors.of(source)
        )
        differentiated = node.name in graph.needs_grad
        key = (
            node.target,
            hashable(node.args, tensors.key),
            hashable(dict(node.kwargs), tensors.key),
            differentiated,
        )
        if key not in found:
            found[key] = len(signatures)
            signatures.append(Signature(node, own, tensor_specs(node), differentiated))
        of.append(found[key])
        operands.append(own)
    elements = tuple(tuple(operand.element for operand in tensors.of(node)) for node in graph.ops)
    return SignatureTable(tuple(signatures), tuple(of), tuple(operands), elements)


@dataclass(frozen=True)
class OpClasses:
    """``of[i]``: the class of op i; ``members[c]``: the indices of class c's ops, in the model's order."""

    of: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]


@once_per_graph
def op_classes(graph: OpGraph) -> OpClasses:
    """Return the classes of ``graph.ops``."""
    return group_blocks([node.name for node in graph.ops], group_by_signature(graph).of, block_of(graph))


def group_blocks(names: Sequence[str], signatures: Sequence[int], blocks: Mapping[str, str]) -> OpClasses:
    """Group ops by their block's run of signatures and their position in it; O(ops)."""
    inside: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        if name in blocks:
            inside.setdefault(blocks[name], []).append(index)
    kind_of = {block: tuple(signatures[i] for i in members) for block, members in inside.items()}
    class_of: dict[object, int] = {}
    of = [-1] * len(names)
    position = {i: place for members in inside.values() for place, i in enumerate(members)}
    for index, name in enumerate(names):
        key: object = index
        if name in blocks:
            key = (kind_of[blocks[name]], position[index])
        of[index] = class_of.setdefault(key, len(class_of))
    members_of: list[list[int]] = [[] for _ in class_of]
    for index, number in enumerate(of):
        members_of[number].append(index)
    return OpClasses(tuple(of), tuple(map(tuple, members_of)))


class _Tensors:
    """The operands that each node offers, and its gradient role, each computed once."""

    def __init__(self, graph: OpGraph) -> None:
        self._needs_grad = graph.needs_grad
        self._weights = weight_nodes(graph)
        self._known: dict[str, tuple[Operand, ...]] = {}
        self._keys: dict[str, Hashable] = {}

    def of(self, node: fx.Node) -> tuple[Operand, ...]:
        if node.name not in self._known:
            self._known[node.name] = self._describe(node)
        return self._known[node.name]

    def key(self, node: fx.Node) -> Hashable:
        """Return what a signature says about an argument: its operands, or the symbolic number it is."""
        if node.name not in self._keys:
            value = node.meta.get("val")
            operands = self.of(node)
            if not operands and value is not None:
                self._keys[node.name] = ("number", symbolic(value))
            else:
                self._keys[node.name] = (isinstance(value, torch.Tensor), *(o.key for o in operands))
        return self._keys[node.name]

    def _describe(self, node: fx.Node) -> tuple[Operand, ...]:
        value = node.meta.get("val")
        items = value if isinstance(value, list | tuple) else (value,)
        tensors = [(position, item) for position, item in enumerate(items) if isinstance(item, torch.Tensor)]
        operands = []
        for (element, item), spec in zip(tensors, tensor_specs(node), strict=True):
            stride = tuple(symbolic(s) for s in item.stride())
            floating = item.is_floating_point() or item.is_complex()
            operands.append(
                Operand(node.name, element, spec, stride, self._role(node) if floating else "none")
            )
        return tuple(operands)

    def _role(self, node: fx.Node) -> Role:
        if node.name not in self._needs_grad:
            return "none"
        return "weight" if node.name in self._weights else "input"


def weight_nodes(graph: OpGraph) -> frozenset[str]:
    """Name the parameters, and the ops that read parameters only: their gradients belong to the weight half of backward."""
    found = {i.node for i in graph.inputs if i.kind == "parameter"}
    for node in graph.ops:
        sources = [
            source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)
        ]
        if sources and all(source.name in found for source in sources):
            found.add(node.name)
    return frozenset(found)


def called(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the op that a node stands for and its positional arguments: local forms name theirs."""
    if node.target is run_local:
        return op_called(str(node.args[1])), node.args[LEADING:]
    return node.target, node.args


def hashable(value: Any, key: Callable[[fx.Node], Hashable]) -> Hashable:
    """Turn an op's argument into a dictionary key, with ``key`` of its nodes; 1, 1.0 and True stay different."""
    if isinstance(value, fx.Node):
        return key(value)
    if isinstance(value, list | tuple):
        return ("list", *(hashable(item, key) for item in value))
    if isinstance(value, dict):
        return ("dict", *((name, hashable(item, key)) for name, item in value.items()))
    if isinstance(value, slice):
        return ("slice", *(hashable(v, key) for v in (value.start, value.stop, value.step)))
    return (type(value), value)


def concrete(size: Dim, symbols: Mapping[sympy.Symbol, int]) -> int:
    """Return the number that ``size`` is once every symbol has one; a symbol without one (data-dependent) counts as 1.

    A part of nothing, which so few samples may be (b // (b // 2) of one), is nothing.
    """
    if not isinstance(size, sympy.Basic):
        return int(size)
    try:
        substituted = size.subs(symbols)
        if substituted.free_symbols:
            substituted = substituted.subs(dict.fromkeys(substituted.free_symbols, 1))
    except ZeroDivisionError:
        return 0
    return int(substituted)


def concrete_arguments(
    node: fx.Node, operands: Sequence[torch.Tensor], symbols: Mapping[sympy.Symbol, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return ``node``'s arguments with its operands replaced, in order, by ``operands`` and its sizes by numbers."""
    supply = iter(operands)

    def resolve(source: fx.Node) -> Any:
        value = source.meta.get("val")
        if isinstance(value, torch.Tensor):
            return next(supply)
        if isinstance(value, list | tuple):
            return [next(supply) if isinstance(item, torch.Tensor) else item for item in value]
        return concrete(symbolic(value), symbols)

    resolved: Any = fx.node.map_arg((called(node)[1], dict(node.kwargs)), resolve)
    args, kwargs = resolved[0], dict(resolved[1])
    if isinstance(kwargs.get("device"), torch.device):
        kwargs["device"] = torch.device("cpu")  # a model traced on meta has its device baked in
    return tuple(args), kwargs
