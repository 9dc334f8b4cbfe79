"""shard: the model's graph and a placement on a mesh become the graph that every rank runs on its shards.

    before                                        after, column then row over 2 ranks ("tensor")
    x      [b, 8]                                 x      [b, 8]
                                                  x__sum_gradient_tensor = sum_gradient(x, axis="tensor")
    h   = linear(x, w1, b1)       [b, 32]         h   = linear(x__sum_gradient_tensor, w1, b1)      [b, 16]
    a   = gelu(h)                 [b, 32]         a   = gelu(h)                                     [b, 16]
    y   = linear(a, w2)           [b, 8]          y   = linear(a, w2)                               [b, 8], a part of a sum
                                                  y__all_reduce_tensor = all_reduce(y, axis="tensor")
    z   = add(y, x)               [b, 8]          z   = add(y__all_reduce_tensor, x)                [b, 8]

Ops keep their names. A value is bridged once for all consumers that need it alike. Every local shape is computed twice,
from the placements and by running the op on fake shards, and must agree.

A parameter that is whole on an axis, and of whose gradient each rank there makes a part, is summed once per step and not
in the graph: ``ShardedGraph.syncs``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from cost_models.errors import InternalError
from cost_models.layout import Mesh, Partial, Replicate
from passes.graph.code_on_demand import code_on_demand
from passes.graph.fake_values import FakeValues
from passes.graph.graph import GraphOutput, OpGraph
from passes.graph.nodes import (
    are_read,
    argument,
    drop_dead_code,
    fake_mode_of,
    new_module,
    origin,
    replaced,
    tensors_of,
)
from passes.graph.sizes import SizeBuilder
from passes.shard.bridges import BridgeOp, bridge_ops, first_gradient_op
from passes.shard.rules.local import local_form
from passes.shard.sizes import COUNTS, SIZE_ARGUMENTS, LocalSizes, local_sizes, sizes_of
from passes.shard.syncs import GradientSync, deferred_axes, gradient_syncs, refuse_blocks
from passes.shard.words import (
    Choice,
    FeaturePlacement,
    Need,
    Placements,
    all_replicated,
    is_projection,
    operands,
    short,
)
from runtime.segment.recompute import writes_statistics

Needs = tuple[Need, ...]


@dataclass(frozen=True)
class ShardedGraph:
    """The graph that each rank runs: its parameters and buffers have local shapes."""

    graph: OpGraph
    placement: FeaturePlacement
    syncs: tuple[GradientSync, ...]
    shared: frozenset[str] = frozenset()
    """Parameters and buffers that other parts of the model have too: whole, and their gradients are summed over all."""

    @property
    def mesh(self) -> Mesh:
        """The ranks."""
        return self.placement.mesh


@code_on_demand()
def shard_graph(
    graph: OpGraph, placement: FeaturePlacement, multiple: int = 1, shared: frozenset[str] = frozenset()
) -> ShardedGraph:
    """Make ``graph`` as a rank of ``placement.mesh`` runs it, for micro-batches of multiples of ``multiple`` samples.

    ``shared``: parameters and buffers that other parts of the model read too. Every rank makes a part of their gradients.
    """
    return _Sharder(graph, placement, multiple, shared).run()


def samples_multiple(
    graph: OpGraph, placement: FeaturePlacement, multiple: int = 1, shared: frozenset[str] = frozenset()
) -> int:
    """Return ``batch.multiple`` of what ``shard_graph`` makes of the same, without making it."""
    return _Sharder(graph, placement, multiple, shared).sizes.unit


class _Sharder:
    """One run of the pass."""

    def __init__(
        self, graph: OpGraph, placement: FeaturePlacement, multiple: int, shared: frozenset[str]
    ) -> None:
        self.multiple = multiple
        self.shared = shared.intersection((*graph.parameters, *graph.buffers))
        self.old, self.placement, self.mesh = graph, placement, placement.mesh
        self.whole: Placements = (Replicate(),) * len(self.mesh.shape)
        self.choices = {node.name: self._choices_of(node) for node in graph.ops}
        self.placement = replace(placement, stored={**placement.stored, **self._written_buffers()})
        self.layouts = {
            node.name: self._layouts_of(node) for node in graph.graph.nodes if node.op != "output"
        }
        refuse_blocks(self.shared, placement)
        wide = frozenset(axis for axis, size in enumerate(self.mesh.shape) if size > 1)
        beyond = dict.fromkeys(self.shared, wide)
        self.deferred = deferred_axes(graph, self.stored, self._needs_of_operand, beyond, placement.returned)
        self.values = FakeValues(fake_mode_of(graph.graph))
        self.new = fx.Graph()
        self.made: dict[str, fx.Node] = {}
        self.bridged: dict[tuple[str, Needs], fx.Node] = {}
        self.sizes = self._local_sizes()

    def run(self) -> ShardedGraph:
        for node in self.old.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
        self._prepare_sizes()
        for node in self.old.ops:
            if self.layouts.get(node.name):
                self.made[node.name] = self._op(node)
        outputs = self._outputs()
        self.new.erase_node(self.anchor)
        drop_dead_code(self.new)
        local = replace(
            self.old,
            module=new_module(self.old.module, self.new),
            outputs=outputs,
            parameters={n: replace(s, shape=self._stored_shape(n)) for n, s in self.old.parameters.items()},
            buffers={n: replace(s, shape=self._stored_shape(n)) for n, s in self.old.buffers.items()},
            batch=replace(
                self.old.batch,
                multiple=self.sizes.unit,
                mesh=self.mesh,
                placements={n: p for n, p in self.placement.batch.items() if p != self.whole},
            ),
        )
        own = {
            node: axes
            for node, axes in self.deferred.items()
            if self.old.input_of[node].name not in self.shared
        }
        syncs = gradient_syncs(self.old, own, self.stored, self.placement, self.mesh)
        return ShardedGraph(local, self.placement, syncs, self.shared)

    # Layouts:
    def stored(self, name: str) -> Placements:
        """Return how a parameter or buffer is kept."""
        return self.placement.stored.get(name, self.whole)

    def _written_buffers(self) -> dict[str, Placements]:
        """Return the placements of buffers that ops write (running statistics): the one that the writing op uses."""
        return {
            self.old.input_of[source.name].name: self._taken_as(node, position)
            for node in self.old.ops
            if writes_statistics(node)
            for position, source in enumerate(operands(node))
            if source in node.args[3:5] and source.name in self.old.input_of
        }

    def _choices_of(self, node: fx.Node) -> tuple[Choice, ...]:
        found = self.placement.choices.get(node.name)
        if found is None:
            return (all_replicated(len(operands(node)), len(tensors_of(node))),) * len(self.mesh.shape)
        return found

    def _layouts_of(self, node: fx.Node) -> tuple[Placements, ...]:
        """Return the layout of each tensor that a node makes; none for sizes."""
        if node.op == "placeholder":
            given = self.old.input_of[node.name]
            if given.kind in ("parameter", "buffer"):
                return (self.stored(given.name),)
            arriving = {"batch": self.placement.batch, "value": self.placement.values}.get(given.kind, {})
            return (arriving.get(given.name, self.whole),)
        if not tensors_of(node):
            return ()
        if is_projection(node):
            source: Any = node.args[0]
            return (self._layouts_of(source)[node.args[1]],)  # type: ignore[index]
        choices = self.choices[node.name]
        return tuple(tuple(c.outputs[i] for c in choices) for i in range(len(tensors_of(node))))

    def _needs_of_operand(self, node: fx.Node, position: int) -> Needs:
        source = operands(node)[position]
        needs = tuple(choice.inputs[position] for choice in self.choices[node.name])
        if source.name in self.old.needs_grad and node.name in self.old.needs_grad:
            return needs
        return tuple(Need(need.placement) for need in needs)

    def _local_sizes(self) -> LocalSizes:
        known: dict[Any, torch.SymInt] = {}
        sharded: list[tuple[torch.Tensor, Placements]] = []
        for node in self.old.graph.nodes:
            if node.op == "output":
                continue
            if node.op == "placeholder" and isinstance(node.meta["val"], torch.Tensor):
                sizes: tuple[Any, ...] = tuple(node.meta["val"].shape)
                for size in sizes:
                    if isinstance(size, torch.SymInt):
                        env = size.node.shape_env
                        for symbol in size.node.expr.free_symbols - known.keys():
                            known[symbol] = env.create_symintnode(symbol, hint=None)
            sharded += zip(tensors_of(node), self.layouts[node.name], strict=True)
            if node.op == "call_function" and not is_projection(node):
                for i, source in enumerate(operands(node)):
                    needs = self.choices[node.name]
                    sharded.append((source.meta["val"], tuple(c.inputs[i].placement for c in needs)))
        for output in self.old.outputs:
            leaving = tuple(need.placement for need in self._output_needs(output))
            sharded.append((self.old.nodes[output.node].meta["val"], leaving))
        return local_sizes(self.placement, self.old.batch.batch_symbol, sharded, known, self.multiple)

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        spec = self.old.parameters.get(name) or self.old.buffers[name]
        shape = self.sizes.local(torch.empty(spec.shape, device="meta"), self.stored(name))
        return tuple(int(size) for size in shape)

    # Nodes:
    def _placeholder(self, node: fx.Node) -> None:
        copy = self.new.placeholder(node.name)
        copy.meta = dict(node.meta)
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            shape = self.sizes.local(value, self.layouts[node.name][0])
            copy.meta["val"] = self.values.empty(shape, value, self.sizes.number)
        self.made[node.name] = copy

    def _prepare_sizes(self) -> None:
        """Compute every number that depends on the batch from an input's size, as before (``passes.graph.sizes``)."""
        self.anchor = self.new.call_function(torch.sym_not, (False,))
        origins: dict[Any, tuple[fx.Node, int]] = {}
        symbol, like = self.old.batch.batch_symbol, None
        multiples: tuple[fx.Node, int, int] | None = None
        for given in self.old.inputs:
            node = self.made[given.node]
            if given.kind not in ("batch", "value") or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            for dim, size in enumerate(node.meta["val"].shape):
                if not isinstance(size, torch.SymInt):
                    continue
                count, rest = size.node.expr.as_coeff_Mul()
                if rest.is_Symbol and count == 1:
                    origins.setdefault(rest, (node, dim))
                elif rest == symbol:
                    multiples, like = (node, dim, int(count)), node
        self.builder = SizeBuilder(self.new, self.anchor, origins)
        if symbol not in origins and multiples is not None and like is not None:
            self._divide_size(*multiples, like)

    def _divide_size(self, leaf: fx.Node, dim: int, count: int, like: fx.Node) -> None:
        """Compute the symbol's number from a leaf that has it several times."""
        with self.new.inserting_before(self.anchor):
            before = self.anchor.prev
            size = self.new.call_function(torch.ops.aten.sym_size.int, (leaf, dim))
            proxy = operator.floordiv(fx.Proxy(size, self.builder.tracer), count)
            self.builder.give_values(before, like)
        self.builder.symbols[self.old.batch.batch_symbol] = proxy

    def _number(self, size: Any, like: fx.Node) -> Any:
        """Return a local size as an argument: a number, or the node that computes it."""
        return size if isinstance(size, int) else self.builder.build(size, like)

    def _op(self, node: fx.Node) -> fx.Node:
        if is_projection(node):
            source: Any = node.args[0]
            args: tuple[Any, ...] = (self.made[source.name], *node.args[1:])
            return self._emit(node.name, node.target, args, {}, node)
        self._refuse_lost_writes(node)
        needs = iter(range(len(operands(node))))

        def local(argument: Any) -> Any:
            if not isinstance(argument, fx.Node):
                return argument
            if isinstance(argument.meta.get("val"), torch.Tensor):
                return self._bridge(argument, self._needs_of_operand(node, next(needs)))
            return self._number(self.sizes.scaled(argument.meta["val"]), node)

        args, kwargs = map_aggregate((node.args, dict(node.kwargs)), local)
        args, kwargs = self._resized(node, tuple(args), dict(kwargs))
        target, args = local_form(node, args, self.choices[node.name], self.mesh)
        made = self._emit(node.name, target, args, kwargs, node)
        self._check(node, made)
        return made

    def _refuse_lost_writes(self, node: fx.Node) -> None:
        """Refuse an op that writes a part or copy made of a buffer (running statistics), not the buffer itself."""
        if not writes_statistics(node):
            return
        lost = [
            f"{source.name} is stored {' '.join(map(short, self.layouts[source.name][0]))} and written as "
            + " ".join(map(str, self._needs_of_operand(node, position)))
            for position, source in enumerate(operands(node))
            if source in node.args[3:5] and self.layouts[source.name][0] != self._taken_as(node, position)
        ]
        if lost:
            raise InternalError(f"shard {node.name} ({node.target}): what it writes would be lost", lost)

    def _resized(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return sizes and counts among the arguments as the rank's shards have them."""
        layouts = self.layouts[node.name]
        if node.target in SIZE_ARGUMENTS and any(p != self.whole for p in layouts):
            name, new_sizes = SIZE_ARGUMENTS[node.target]
            taken = [
                self.sizes.local(s.meta["val"], self._taken_as(node, i)) for i, s in enumerate(operands(node))
            ]
            made = self.sizes.local(tensors_of(node)[0], layouts[0])
            sizes = [self._number(size, node) for size in new_sizes(node, taken, made)]
            args, kwargs = replaced(node, args, kwargs, name, sizes)
        counts: dict[str, int] = {}
        for choice, size in zip(self.choices[node.name], self.mesh.shape, strict=True):
            if choice.divides and size > 1:
                name = next(name for name in COUNTS if argument(node, name) is not None)
                args, kwargs = replaced(
                    node, args, kwargs, name, counts.setdefault(name, argument(node, name)) // size
                )
                counts[name] //= size
        return args, kwargs

    def _taken_as(self, node: fx.Node, position: int) -> Placements:
        return tuple(choice.inputs[position].placement for choice in self.choices[node.name])

    def _emit(self, name: str, target: Any, args: tuple[Any, ...], kwargs: Any, like: fx.Node) -> fx.Node:
        made = self.new.create_node("call_function", target, args, dict(kwargs), name=name)
        if made.name != name and name in self.layouts:
            # A size has taken the name of an op that comes later.
            taken = next(node for node in self.new.nodes if node.name == name)
            taken.name, made.name = made.name, name
        made.meta = {**like.meta, **origin(like)}
        made.meta["val"] = self.values.of(target, args, kwargs)
        return made

    def _check(self, node: fx.Node, made: fx.Node) -> None:
        """Check that what the op made of its shards is what the placement promised, as far as anyone reads it."""
        values = zip(tensors_of(node), tensors_of(made), self.layouts[node.name], are_read(node), strict=True)
        for value, found, layout, read in values:
            promised = self.sizes.local(value, layout)
            shape = sizes_of(found)
            unlike = read and promised != shape  # in form: they may still be equal numbers
            if unlike and any(bool(a - b != 0) for a, b in zip(promised, shape, strict=True)):
                raise InternalError(
                    f"shard {node.name} ({node.target})",
                    [
                        f"choices {'; '.join(map(str, self.choices[node.name]))} promise the local shape {promised}",
                        f"on its shards the op makes {shape}",
                    ],
                )

    # Bridges:
    def _bridge(self, source: fx.Node, needs: Needs) -> fx.Node:
        """Convert ``source`` to what a consumer needs."""
        (layout,) = self.layouts[source.name]
        known = self.bridged.get((source.name, needs))
        if known is None:
            known = self.made[source.name]
            for op in self._ops_between(source, layout, needs):
                known = self._bridge_node(source, known, op)
            self.bridged[source.name, needs] = known
        return known

    def _ops_between(self, source: fx.Node, layout: Placements, needs: Needs) -> list[BridgeOp]:
        """List the ops between. A gradient stays a partial sum on axes summed later, or by another stage."""
        first: list[BridgeOp] = []
        settled = list(needs)
        for axis in sorted(self.deferred.get(source.name, ())):
            need = needs[axis]
            if need.partial_gradient and isinstance(need.placement, Replicate):
                settled[axis] = Need(Replicate())
            else:
                first.append(first_gradient_op(axis, self.mesh))
        return [*first, *bridge_ops(layout, settled, self.mesh)]

    def _bridge_node(self, source: fx.Node, value: fx.Node, op: BridgeOp) -> fx.Node:
        name = f"{source.name}__{op.target.__name__}_{op.axis}"
        made = self._emit(name, op.target, (value, *op.args), dict(op.options), value)
        for key in ("module_path", "source"):
            made.meta[key] = source.meta.get(key, "")
        return made

    def _output_needs(self, output: GraphOutput) -> Needs:
        """Loss and metrics are parts of sums (the engine adds them up), outputs whole, state and values as placed."""
        if output.kind in ("loss", "metric"):
            return (Need(Partial()),) * len(self.whole)
        kept = self.stored(output.name) if output.kind == "buffer" else self.whole
        return tuple(
            map(Need, self.placement.values.get(output.name, kept) if output.kind == "value" else kept)
        )

    def _outputs(self) -> tuple[GraphOutput, ...]:
        made = [self._bridge(self.old.nodes[o.node], self._output_needs(o)) for o in self.old.outputs]
        self.new.output(tuple(made))
        return tuple(replace(o, node=node.name) for o, node in zip(self.old.outputs, made, strict=True))
