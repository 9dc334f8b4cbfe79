"""OpGraph: the model as a DAG of tensor operations. The one data structure that all passes share.

An ``OpGraph`` is a view over an ``fx.Graph`` with three kinds of nodes: placeholders (parameters, buffers, constants,
batch inputs), ``call_function`` ops (ATen, functional), and one output. It is immutable by convention: a pass returns a
new one (``dataclasses.replace``) with one thing more.

What every node's ``meta`` holds
    val           FakeTensor on CPU (or a list of them, or a SymInt); sizes are expressions of the batch symbol
    module_path   "model.layers.0.mlp.up_proj": the innermost module that made it; "" at the root and in the loss
    source        "modeling_llama.py:231": the line of the model's code that made it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Literal, TypeAlias, TypeVar, TypeVarTuple, Unpack, cast

import networkx as nx
import sympy
import torch
from torch import fx

from cost_models.precision import ParameterPrecision, Precision
from passes.graph.nodes import is_floating, symbolic, tensors_of
from passes.graph.token_counts import TokenCounts
from runtime.segment.code import BatchSpec, TensorSpec
from runtime.state.rank_state import TensorPart
from runtime.state.state_view import StateView

aten = torch.ops.aten

Answer = TypeVar("Answer")
Further = TypeVarTuple("Further")
PlaceholderKind: TypeAlias = Literal["parameter", "buffer", "constant", "batch", "value"]

NOT_DIFFERENTIABLE = frozenset(
    {
        aten.detach.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.empty_like.default,
        aten.full_like.default,
        aten.rand_like.default,
        aten.randn_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_empty.default,
        aten.new_full.default,
        aten.bernoulli.default,
        aten.bernoulli.p,
    }
)
"""Ops whose floating-point output has no gradient even if an input has one (autograd's own rule)."""


@dataclass(frozen=True)
class GraphInput:
    """A placeholder, and the tensor of the model or the batch that it stands for.

    ``name``: the model's own fully qualified name (canonical, see ``aliases``) or the batch leaf's name; in a part of a
    model (``passes.graph.part``) the name of a value that another part makes.
    """

    node: str
    kind: PlaceholderKind
    name: str
    needs_grad: bool = False
    """True for a value that this part owes a gradient."""


@dataclass(frozen=True)
class GraphOutput:
    """One element of the graph's output tuple.

    ``metric``: a number that the loss function returned beside the loss, without a gradient. ``buffer``: the new
    contents of buffer ``name``. ``value``: what another part of the model reads (``passes.graph.part``).
    """

    node: str
    kind: Literal["loss", "metric", "output", "buffer", "value"]
    name: str
    needs_grad: bool = False
    """True for a value of which other parts send a gradient back."""
    once: bool = False
    """True for a buffer that a batch writes once, whatever its micro-batches (``passes.graph.per_batch``)."""


@dataclass(frozen=True)
class StateSpec:
    """A parameter or buffer of the model, by its canonical name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    persistent: bool = True
    keeps_dtype: bool = False
    """Not cast to another precision: a batch norm's, which must fit its statistics."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class OpGraph:
    """A traced model.

    ``parameters`` and ``buffers`` are keyed by canonical names; ``aliases`` maps every other name of a tied tensor to
    its canonical one. ``notes`` are remarks for the user, such as "use_cache was switched off for tracing".
    """

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    parameters: Mapping[str, StateSpec]
    buffers: Mapping[str, StateSpec]
    aliases: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    """Real tensors that the trace lifted out of the model's code, by name."""
    batch: BatchSpec
    example_batch_size: int
    example_shapes: Mapping[str, tuple[int, ...]]
    """Shape of each batch leaf as it was given, by leaf name."""
    training: bool
    model_name: str
    fingerprint: str
    notes: tuple[str, ...] = ()
    checkpointing: str | None = None
    """The way in which the model asks for its activations to be recomputed, if it does: the graph keeps no trace of it."""
    frozen_modules: frozenset[str] = field(default_factory=frozenset)
    module_classes: Mapping[str, str] = field(default_factory=dict)
    """The name of the class of each module, by path, for pictures."""
    loss_reduction: Literal["mean", "sum", "token_mean"] = "mean"
    """The way from micro-batches' losses to the batch's: see ``passes.trace.loss.reduction``."""
    token_counts: TokenCounts | None = None
    """Under "token_mean": how to fill the batch leaves that no user's batch has."""
    unlike_whole: tuple[str, ...] = ()
    """The terms of the loss of which ``loss_reduction`` does not make the whole batch's out of those of micro-batches."""
    reduction_declared: bool = False
    """True if the user (or a plan) said ``loss_reduction``, and so how unlike terms are put together."""
    precision: Precision = field(default_factory=Precision)
    """The data types of the trace: parameters' placeholders have their ``leaf`` types, ``StateSpec`` the model's own."""
    opaque: tuple[str, ...] = ()
    """The parts that were asked to run whole (``passes.trace.opaque.parts``)."""
    views: Mapping[str, StateView] = field(default_factory=dict)
    """Buffers, and attributes that the graph reads, which have no memory of their own: read from a parameter or buffer.

    None of them is among ``buffers`` or ``constants``, and the graph computes them from their owners.
    """
    parts: Mapping[str, TensorPart] = field(default_factory=dict)
    """The tensor of the model that a parameter or buffer is a block of, where ops were split (``passes.split.split``).

    ``parameters`` and ``buffers`` then have the parts instead of the whole tensor, with their own shapes.
    """
    blocks: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """(name of the whole op, number of the block) of each op that is a block of another, where ops were split."""

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @cached_property
    def nodes(self) -> Mapping[str, fx.Node]:
        """Every node by name, in topological order."""
        return {node.name: node for node in self.graph.nodes}

    @cached_property
    def ops(self) -> tuple[fx.Node, ...]:
        """The operations, in topological order (the order of the model's own code)."""
        return tuple(node for node in self.graph.nodes if node.op == "call_function")

    @cached_property
    def input_of(self) -> Mapping[str, GraphInput]:
        """The input that each placeholder node stands for, by node name."""
        return {i.node: i for i in self.inputs}

    @property
    def loss(self) -> str | None:
        """Name of the node that computes the loss; None in an inference trace without one."""
        return next((o.node for o in self.outputs if o.kind == "loss"), None)

    @cached_property
    def needs_grad(self) -> frozenset[str]:
        """Names of nodes, trainable parameters included, that get a gradient when the loss is differentiated.

        Static, so that every rank knows which gradient messages will come. A value needs a gradient iff it is floating
        point, depends on a trainable parameter through differentiable ops, and reaches the loss through differentiable
        ops. Over-approximating is safe (the consumer then sends zeros); the reverse would lose a gradient, so an op
        counts as differentiable unless it is known not to be.
        """
        candidates = _differentiable(self)
        found = {o.node for o in self.outputs if o.kind == "loss" or o.needs_grad} & candidates
        for node in reversed(list(self.graph.nodes)):
            if node.name in candidates and any(
                user.name in found for user in node.users if user.op != "output"
            ):
                found.add(node.name)
        return frozenset(found)

    @cached_property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that get a gradient."""
        return frozenset(i.name for i in self.inputs if i.kind == "parameter" and i.node in self.needs_grad)

    @cached_property
    def example_sizes(self) -> Mapping[sympy.Symbol, int]:
        """The number of every dynamic size in the example batch."""
        return {
            symbol: self.example_shapes[leaf][dim]
            for symbol, (leaf, dim) in self.batch.symbols.items()
            if leaf in self.example_shapes
        }

    def types_of(self, name: str, precision: Precision) -> ParameterPrecision:
        """Return the data types of a parameter or buffer when trained in ``precision``."""
        spec = self.parameters.get(name)
        if spec is None:
            return ParameterPrecision.plain(self.buffers[name].dtype)
        return precision.of(spec.dtype, trains=name in self.trained, keeps_dtype=spec.keeps_dtype)

    @cached_property
    def _answers(self) -> dict[tuple[object, ...], object]:
        """Answers of functions that are asked ``once_per_graph``, by the function and its further arguments."""
        return {}

    def networkx(self) -> nx.DiGraph[str]:
        """Return the DAG of ops and placeholders as a networkx graph; edge (u, v): v reads u."""
        dag: nx.DiGraph[str] = nx.DiGraph()
        for node in self.graph.nodes:
            if node.op == "output":
                continue
            dag.add_node(
                node.name, op=node.op, target=str(node.target), module=node.meta.get("module_path", "")
            )
            dag.add_edges_from((source.name, node.name) for source in node.all_input_nodes)
        return dag

    def __len__(self) -> int:
        return len(self.ops)

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self.ops)


def once_per_graph(
    function: Callable[[OpGraph, Unpack[Further]], Answer],
) -> Callable[[OpGraph, Unpack[Further]], Answer]:
    """Keep what ``function`` returns for a graph as long as the graph, so that it is computed once.

    Further arguments must be hashable, and the answer must follow from them and the graph alone.
    """

    @wraps(function)
    def asked(graph: OpGraph, *further: *Further) -> Answer:
        key = (function, *further)
        if key not in graph._answers:
            graph._answers[key] = function(graph, *further)
        return cast("Answer", graph._answers[key])

    return asked


def _differentiable(graph: OpGraph) -> frozenset[str]:
    """Name the nodes that depend on a trainable parameter through differentiable ops."""
    trainable = {
        i.node
        for i in graph.inputs
        if i.needs_grad or (i.kind == "parameter" and graph.parameters[i.name].requires_grad)
    }
    found: set[str] = set()
    for node in graph.graph.nodes:
        if node.name in trainable or (
            node.op == "call_function"
            and node.target not in NOT_DIFFERENTIABLE
            and is_floating(node)
            and any(source.name in found for source in node.all_input_nodes)
        ):
            found.add(node.name)
    return frozenset(found)


def tensor_specs(node: fx.Node) -> tuple[TensorSpec, ...]:
    """Return the specs of the tensors a node produces: one for a tensor, several for a tuple, none for sizes."""
    return tuple(TensorSpec(tuple(map(symbolic, item.shape)), item.dtype) for item in tensors_of(node))
