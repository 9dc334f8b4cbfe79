"""Couplings: ops that make one sample's result depend on other samples, where micro-batches are not the whole batch.

    x (samples along 0) ─► linear ─► relu ─► mm(z, z.T)   couples: no way to run it sample by sample
    x ─► linear ─► square ─► mean over the samples ─► loss   does not: a part of the loss per sample, added up

Every value gets a state (``passes.shard.sample_states``), from the batch to the loss.
An op keeps states apart where its rule of sharding has a choice that takes its operands as they are: splitting by samples
over devices and over micro-batches ask the same of an op, as long as devices do not talk to each other (``Choice.local``).
Ops without a rule are tried on drawn shards. The first op of every path that gives Coupled is named, and none after it.

    batch norm, its running statistics     named; searches cut the batch all the same, as everybody does who trains in
                                           micro-batches (``why_whole`` leaves it out), and behind it samples are samples
    synchronized batch norm                named; who synchronizes wants statistics of all samples: the batch stays whole
    everything else that is named          searches keep the batch whole, unless they are told otherwise
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import sympy
import torch
from torch import fx

from cost_models.layout import Partial, Placement, Replicate, Shard
from cost_models.units import counted, listed
from passes.graph.graph import OpGraph, once_per_graph
from passes.graph.nodes import SYNCHRONIZED, argument, is_size, op_name, symbolic, tensors_of
from passes.graph.recomputed import draws_random_numbers
from passes.graph.signatures import op_classes
from passes.shard.discover import Discovery
from passes.shard.rules import makes_tensors
from passes.shard.sample_states import Added, Coupled, Ordered, Same, Samples, State
from passes.shard.sorted_rows import counted_rows, is_sorted, sorted_by, through_order
from passes.shard.words import Choice, Need, operands

Kind = Literal["batch statistics", "synchronized statistics", "samples", "running state"]
_TALK = frozenset({"batch_norm:samples"})
"""Local forms in which ranks exchange more than parts of a sum: a micro-batch has nobody to ask."""
_AFFINE = frozenset({"add", "sub", "rsub", "stack", "cat", "add_", "lerp", "where"})
"""Ops that are linear in all operands together: a sum over samples plus a constant is a mean of sums plus it.

(``where`` in both that it chooses from: what decides is no sum, and depends on none.)
"""
_ROWS = frozenset({"index", "_unsafe_index"})
_VIEWS = frozenset({"view", "reshape", "_unsafe_view", "unflatten", "flatten"})
_PARTS = frozenset(
    {"slice", "chunk", "split", "split_with_sizes", "unsafe_chunk", "unsafe_split", "tensor_split"}
)


@dataclass(frozen=True)
class Coupling:
    """An op that couples samples. ``module``, ``source``: where the model's code has it; "" if that is not known."""

    op: str
    module: str
    source: str
    kind: Kind

    def __str__(self) -> str:
        number = self.module.replace(".", "").isdecimal()  # of an entry of a Sequential: no name by itself
        place = f"in {'module ' if number else ''}{self.module}" if self.module else ""
        where = " ".join(filter(None, (place, self._line)))
        return f"{self.op} {where}".strip()

    @property
    def _line(self) -> str:
        return f"({self.source})" if self.source else ""


@once_per_graph
def couplings(graph: OpGraph) -> tuple[Coupling, ...]:
    """Return the ops that couple samples on a way to the loss or into a buffer, in the order of the graph."""
    return _Walk(graph).found()


def why_whole(graph: OpGraph) -> str:
    """Say why only a batch in one piece computes what the model does with a batch; "" if micro-batches do, too.

    Batch norm is no reason: statistics of one micro-batch at a time are what pipelines (GPipe, 2019) and gradient
    accumulation have always had, and a deep pipeline of a ResNet has nothing else. ``SyncBatchNorm`` is one: a recipe that
    converts norms asks for statistics of all samples that are anywhere.
    """
    found = [coupling for coupling in couplings(graph) if coupling.kind != "batch statistics"]
    return "; ".join(_by_kind(found))


class _Walk:
    """States of all values of a graph, from its inputs on."""

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._discovery = Discovery.stored()
        ops, members = graph.ops, op_classes(graph).members
        self._first = {ops[i]: ops[alike[0]] for alike in members for i in alike}
        """The first op of each op's class: equal ops have equal choices."""
        self._choices: dict[fx.Node, tuple[Choice, ...]] = {}
        self._states: dict[fx.Node, tuple[State, ...]] = {}
        self._norms: set[fx.Node] = set()
        """Batch norms of samples: each has its statistics from others, and gives samples again."""
        made = graph.token_counts.made if graph.token_counts is not None else frozenset()
        for node in graph.graph.nodes:
            given = graph.input_of.get(node.name)
            if given is not None:
                dim = graph.batch.batch_dims.get(given.name) if given.kind == "batch" else None
                # A divisor of the whole batch, repeated for every sample, is one number.
                single = given.kind != "batch" or dim is None or given.name in made
                self._states[node] = (Same() if single or dim is None else Samples(dim),)

    def found(self) -> tuple[Coupling, ...]:
        """Walk the graph."""
        graph = self._graph
        wanted = _behind(graph)
        result = []
        for node in graph.ops:
            if node not in wanted:
                continue
            states = self._after(node)
            self._states[node] = states
            before = [state for source in node.all_input_nodes for state in self._states.get(source, ())]
            if node in self._norms:
                synchronized = node.meta.get(SYNCHRONIZED, False)
                result.append(_named(node, "synchronized statistics" if synchronized else "batch statistics"))
            elif any(isinstance(s, Coupled) for s in states) and not any(
                isinstance(s, Coupled) for s in before
            ):
                result.append(_named(node, "samples"))
        unlike = () if graph.reduction_declared else graph.unlike_whole
        for node in (graph.nodes[name] for name in unlike if name in graph.nodes):  # a stage has its own
            if not any(isinstance(state, Coupled) for state in self._states.get(node, ())):
                result.append(_named(node, "samples"))
        named = {coupling.op for coupling in result}
        for output in graph.outputs:
            node = graph.nodes[output.node]
            states = self._states.get(node, ())
            coupled = node.name in named or any(isinstance(state, Coupled) for state in states)
            if output.kind == "buffer" and not output.once and not coupled:
                result.append(_named(node, "running state"))
        return tuple(result)

    def _after(self, node: fx.Node) -> tuple[State, ...]:
        """Return the states of an op's results."""
        if node.target is operator.getitem:
            source, index = node.args[0], node.args[1]
            assert isinstance(source, fx.Node)
            several = self._states.get(source, ())
            return (several[index],) if isinstance(index, int) and index < len(several) else several[:1]
        if not makes_tensors(node) or is_size(node.meta.get("val")):
            return (Same(),)
        given = operands(node)
        states = [self._states[source][0] for source in given]
        count = len(tensors_of(node))
        if all(isinstance(state, Same) for state in states):
            return (Same(_counts(self._graph, node)),) * count
        if any(isinstance(state, Coupled) for state in states):
            return (Coupled(),) * count
        if (rows := counted_rows(node, given, states)) is not None:
            return (rows,)
        if is_sorted(states):
            found = self._in_order(node, given, states)
        else:
            found = sorted_by(node, given, states) or self._apart(node, given, states)
        if found is None and "batch_norm" in op_name(node) and isinstance(states[0], Samples):
            self._norms.add(node)
            return (states[0],) * count
        return (Coupled(),) * count if found is None else found

    def _apart(
        self, node: fx.Node, given: Sequence[fx.Node], states: Sequence[State], *, in_order: bool = False
    ) -> tuple[State, ...] | None:
        """Return the states of what every sample has for itself; None if there is no such way."""
        found = self._specially(node, given, states)
        return self._by_choice(node, given, states, in_order=in_order) if found is None else found

    def _in_order(
        self, node: fx.Node, given: Sequence[fx.Node], states: Sequence[State]
    ) -> tuple[State, ...] | None:
        """Return the states of what is done to sorted rows: to each by itself, or to all of them together."""
        found = through_order(node, given, states)
        rows = {state for state in states if not isinstance(state, Same)}
        orders = {replace(state, keys=False) for state in rows if isinstance(state, Ordered)}
        if found is not None or len(orders) != 1 or not all(isinstance(state, Ordered) for state in rows):
            return found
        plain = [state if isinstance(state, Same) else Samples(0) for state in states]
        found = self._apart(node, given, plain, in_order=True)
        if found is None or not all(isinstance(s, Same | Added) or s == Samples(0) for s in found):
            return None
        return tuple(orders.copy().pop() if isinstance(state, Samples) else state for state in found)

    def _specially(
        self, node: fx.Node, given: Sequence[fx.Node], states: Sequence[State]
    ) -> tuple[State, ...] | None:
        """Return the states where micro-batches ask less of an op than devices do; None where they do not."""
        name, results = op_name(node).rstrip("_"), tensors_of(node)
        floating = [s for s, source in zip(states, given, strict=True) if not isinstance(s, Same)]
        if name in _AFFINE and all(isinstance(state, Added) for state in floating):
            return (Added(),) * len(results)
        first = states[0]
        if draws_random_numbers(node) and isinstance(first, Samples):
            same_shape = all(tensor.shape == given[0].meta["val"].shape for tensor in results)
            return (first,) * len(results) if same_shape and "randperm" not in name else None
        if name == "cat" and all(isinstance(state, Samples) for state in states):
            dims = {state.dim for state in states if isinstance(state, Samples)}
            if dims == {int(argument(node, "dim", 0)) % results[0].dim()}:
                return (Samples(dims.pop(), joined=True),)
        if name in _PARTS and isinstance(first, Samples):
            dim = int(argument(node, "dim", 0)) % given[0].meta["val"].dim()
            if dim == first.dim and first.joined:
                return (Samples(dim),) * len(results)
        by_row = name == "embedding" or (name == "embedding_bag" and argument(node, "offsets") is None)
        if by_row and isinstance(first, Same) and not argument(node, "scale_grad_by_freq"):
            return (states[1],)  # sparse gradients keep devices from sharing it, not micro-batches
        if name in _VIEWS and isinstance(first, Samples):
            return _viewed(node, given[0], first, self._graph.batch.batch_symbol)
        if name in _ROWS and isinstance(first, Samples) and first.dim < len(given) - 1:
            # x[arange(samples), ids]: every sample takes its own.
            rows = states[1 + first.dim]
            indices = node.args[1]
            if (
                isinstance(indices, list | tuple)
                and None not in indices
                and isinstance(rows, Same)
                and rows.counts
            ):
                others = [s for at, s in enumerate(states[1:]) if at != first.dim]
                if all(isinstance(s, Same | Samples) for s in others):
                    return (Samples(0),)
        return None

    def _by_choice(
        self, node: fx.Node, given: Sequence[fx.Node], states: Sequence[State], *, in_order: bool
    ) -> tuple[State, ...] | None:
        """Return the states by a choice that takes the operands as they are; None if there is none.

        ``in_order``: rows stand in another order, so that what has a row for each of them by its place belongs to others.
        """
        kinds = {state.joined for state in states if isinstance(state, Samples)}
        if len(kinds) > 1:
            return None  # one has its samples in another order than the other
        joined = True in kinds
        first = self._first[node]
        if first not in self._choices:
            self._choices[first] = self._discovery.choices(first)
        for choice in self._choices[first]:
            if choice.local in _TALK or len(choice.inputs) != len(given):
                continue
            if all(self._takes(*each, in_order) for each in zip(choice.inputs, given, states, strict=True)):
                return tuple(_state(output, joined) for output in choice.outputs)
        return None

    def _takes(self, need: Need, source: fx.Node, state: State, in_order: bool) -> bool:
        """Tell whether a choice's need of an operand is met by its state."""
        placement = need.placement
        if isinstance(state, Samples):
            return isinstance(placement, Shard) and placement.dim == state.dim
        if isinstance(state, Added):
            return isinstance(placement, Partial)
        if isinstance(placement, Replicate):
            return True
        # A value without samples may still have a row for each: positions, a mask of ones.
        shape = source.meta["val"].shape
        symbol = self._graph.batch.batch_symbol
        return (
            not in_order
            and isinstance(placement, Shard)
            and isinstance(shape[placement.dim], torch.SymInt)
            and symbol in shape[placement.dim].node.expr.free_symbols
        )


def _viewed(
    node: fx.Node, source: fx.Node, state: Samples, samples: sympy.Symbol
) -> tuple[State, ...] | None:
    """Return the state of a view in which a dimension is the samples again, or several times all of them.

    (steps, samples, 6) ─► (steps · samples, 6): joined ─► (steps, samples, 6): samples along 1
    """
    before, after = (list(map(symbolic, tensors_of(n)[0].shape)) for n in (source, node))
    inner = math.prod(before[state.dim + 1 :])
    repeated = sympy.sympify(before[state.dim]) / samples
    if not state.joined and repeated != 1:
        return None  # a sample has several rows
    for dim, size in enumerate(after):
        times = sympy.expand(sympy.sympify(size) / samples)
        if (
            sympy.expand(sympy.sympify(math.prod(after[dim + 1 :])) - inner) == 0
            and samples not in times.free_symbols
        ):
            return (Samples(dim, joined=times != 1),)
    return None


def _state(placement: Placement, joined: bool) -> State:
    if isinstance(placement, Shard):
        return Samples(placement.dim, joined)
    return Added() if isinstance(placement, Partial) else Same()


def _counts(graph: OpGraph, node: fx.Node) -> bool:
    """Tell whether the result is 0, 1, 2 … with a number for each sample."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 1:
        return False
    size: object = value.shape[0]
    counted_by = isinstance(size, torch.SymInt) and graph.batch.batch_symbol in size.node.expr.free_symbols
    from_0 = (argument(node, "start", 0), argument(node, "step", 1)) == (0, 1)
    return op_name(node) == "arange" and from_0 and counted_by


def _behind(graph: OpGraph) -> set[fx.Node]:
    """Return the ops that the loss or a buffer's new contents depend on."""
    waiting = [graph.nodes[o.node] for o in graph.outputs if o.kind in ("loss", "buffer")]
    found: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _named(node: fx.Node, kind: Kind) -> Coupling:
    return Coupling(node.name, node.meta.get("module_path") or "", node.meta.get("source") or "", kind)


def said(found: Sequence[Coupling], largest: int) -> tuple[str, ...]:
    """Say once what is computed per micro-batch; nothing if that is nothing. ``largest``: the samples of a micro-batch."""
    if not found:
        return ()
    return (
        f"computed per micro-batch of {largest}: {'; '.join(_by_kind(found))}. microbatches=1 computes the whole batch, "
        'with strategy="feature" on several devices',
    )


def _by_kind(found: Sequence[Coupling]) -> list[str]:
    """Say of each kind what it is and where its first is."""
    by_kind: dict[Kind, list[Coupling]] = {}
    for coupling in found:
        by_kind.setdefault(coupling.kind, []).append(coupling)
    norms = counted(len(by_kind.get("batch statistics", ())), "batch norm")
    synchronized = counted(len(by_kind.get("synchronized statistics", ())), "synchronized batch norm")
    words: dict[Kind, str] = {
        "samples": "loss couples samples",
        "batch statistics": f"{norms}: statistics of one micro-batch at a time, running ones advance with each",
        "synchronized statistics": f"statistics that {synchronized} would have of all samples,",
        "running state": "a buffer kept of the batch advances with each micro-batch",
    }
    return [
        f"{text} at {listed(by_kind[kind], 1, count_rest=True)}"
        for kind, text in words.items()
        if kind in by_kind
    ]
