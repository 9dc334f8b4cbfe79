"""The quotient of a graph for the feature-wise search: classes of equal ops as units, values between them as wires.

    unit   a class of ops, of parameters, of batch leaves, of buffers and constants, or an output of the graph
    wire   a value and the set of (unit, operand) that read it; ``count`` of the graph's values look like this

Taken from the whole graph, edge by edge: a value between two blocks, from the embedding into the first or from the last
into the head is a wire with its own readers and count. Nothing here depends on a mesh.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from torch import fx

from cost_models.layout import Replicate
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph, once_per_graph, tensor_specs
from passes.graph.signatures import op_classes
from passes.search.feature.ahead import ComputedBeside, computed_beside
from passes.search.feature.seconds import layers_of
from passes.search.feature.twins import with_twins
from passes.search.recomputed import BridgeUse, Recomputed, Regions
from passes.shard.words import Choice, operands
from runtime.segment.code import TensorSpec
from runtime.segment.recompute import writes_statistics

UnitKind: TypeAlias = Literal["op", "parameter", "batch", "state", "value", "output", "leaving"]
"""``value``, ``leaving``: of a part of a model, what other parts make for it, and what it makes for them."""
Chooser: TypeAlias = Callable[[fx.Node], tuple[Choice, ...]]
ValueName: TypeAlias = tuple[str, int]
"""(name of the node that makes it, which of its tensors)."""
Readers: TypeAlias = dict[ValueName, list[tuple[str, int, bool]]]
"""Per value: (reading op, operand, whether a gradient comes back)."""


@dataclass(frozen=True, eq=False)
class Unit:
    """One decision. ``members``: names of nodes; the first stands for all of them.

    ``operands`` and ``outputs``: specs of the tensors read and made. ``choices``: of an op, on one axis.
    """

    index: int
    kind: UnitKind
    members: tuple[str, ...]
    operands: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    choices: tuple[Choice, ...] = ()

    @property
    def name(self) -> str:
        return self.members[0]

    @property
    def only_whole(self) -> bool:
        """True of an op that can only run whole on every rank, except ops that only count or compare."""
        return len(self.choices) == 1 and self.kind == "op" and self.outputs[0].dtype.is_floating_point


@dataclass(frozen=True)
class Wire:
    """Equal values: made by ``producer`` as its tensor ``output``, read by ``readers`` as (unit, operand).

    ``gradient``: whether a gradient comes back. ``use``: which copies made by bridges stay until backward, and which it
    makes again. ``layers``: the number of linear layers that each reader stands for, where the sum of the gradient runs
    beside them (``seconds``); ``beside``: what runs while a parameter is gathered.
    """

    producer: int
    output: int
    readers: tuple[tuple[int, int], ...]
    gradient: bool
    use: BridgeUse
    layers: tuple[int, ...]
    beside: ComputedBeside | None
    count: int


@dataclass(frozen=True, eq=False)
class FeatureGraph:
    """``unit_of``: the unit of each node that has one, by name. ``again``: the blocks that backward computes again."""

    graph: OpGraph
    costs: GraphCosts
    units: tuple[Unit, ...]
    wires: tuple[Wire, ...]
    unit_of: Mapping[str, int]
    again: Recomputed
    readers: Readers
    _unlike: dict[int, Sequence[Mapping[int, int]]] = field(default_factory=dict, init=False)

    def recomputing(self, recomputed: Regions) -> FeatureGraph:
        """Return the same units with other blocks that backward computes again."""
        again = replace(self.again, again=recomputed)
        return replace(self, again=again, wires=_wires(again, self.readers, self.unit_of))

    def gradient_comes_back(self, unit: Unit) -> bool:
        """Tell whether a gradient flows along the wires that end in ``unit``."""
        return any(wire.gradient for wire in self.wires if (unit.index, 0) in wire.readers)

    @cached_property
    def op_index(self) -> Mapping[str, int]:
        return {node.name: i for i, node in enumerate(self.graph.ops)}

    def unlike_members(self, samples: int) -> Sequence[Mapping[int, int]]:
        """Per unit: op index -> how many of its members cost the same, of a micro-batch of ``samples``.

        Equal ops may have unlike numbers of readers, whose gradients are summed on the op's account, and not all may run
        twice.
        """
        if samples not in self._unlike:
            sizes = 1, samples  # a rank may have one sample, and is costed as such
            extras = [self.costs.exact(size).rates.extra for size in sizes]
            found: list[dict[int, int]] = []
            for unit in self.units:
                alike: dict[object, list[int]] = {}
                for name in unit.members if unit.kind == "op" else ():
                    i = self.op_index[name]
                    key = *(extra.of(i) for extra in extras), name in self.again.twice
                    alike.setdefault(key, []).append(i)
                found.append({members[0]: len(members) for members in alike.values()})
            self._unlike[samples] = found
        return self._unlike[samples]


@once_per_graph
def space_of(
    graph: OpGraph,
    costs: GraphCosts,
    choices: Chooser,
    marks: tuple[tuple[str, str], ...],
    recomputed: Regions,
) -> FeatureGraph:
    """Return ``feature_graph`` of a whole model, for all meshes of all parts of a cluster."""
    return feature_graph(graph, costs, choices, dict(marks), recomputed)


def feature_graph(
    graph: OpGraph,
    costs: GraphCosts,
    choices: Chooser,
    marks: Mapping[str, str] | None = None,
    recomputed: Regions = (),
    alike: int = 0,
) -> FeatureGraph:
    """Group ops, placeholders and values; O(ops · operands). ``marks``: nodes with unlike marks are in unlike units.

    ``alike``: pieces of a model that are as this one is; 0: it is no piece.
    """
    again = Recomputed(graph, costs, recomputed, alike)
    marks = marks or {}
    choices = _taking_shared_buffers_whole(graph, choices)
    unit_of: dict[str, int] = {}
    units: list[Unit] = []
    ops = graph.ops
    for members in with_twins(graph, op_classes(graph)):
        exemplar = ops[members[0]]
        if not makes_values(exemplar):
            continue
        specs = tuple(_spec(source) for source in operands(exemplar))
        groups: dict[str | None, list[str]] = {}
        for name in (ops[i].name for i in members):
            groups.setdefault(marks.get(name), []).append(name)
        for names in groups.values():
            unit = Unit(len(units), "op", tuple(names), specs, tensor_specs(exemplar), choices(exemplar))
            units.append(unit)
            unit_of |= dict.fromkeys(names, unit.index)
    readers, order = _readers(graph, unit_of)
    _add_placeholders(graph, readers, unit_of, units, marks)
    _add_outputs(graph, readers, order, unit_of, units)
    wires = _wires(again, readers, unit_of)
    return FeatureGraph(graph, costs, tuple(units), wires, unit_of, again, readers)


def _taking_shared_buffers_whole(graph: OpGraph, choices: Chooser) -> Chooser:
    """``choices``; of ops that write a buffer that others write too, only those that take it whole.

    Else what one wrote would be lost to the next. A batch norm that a model calls twice is two ops on the same running
    statistics. Each could take these as it likes (by channels, or whole where samples are split), but they are stored in
    one way only.
    """
    writers = Counter(source.name for node in graph.ops for source in _written(node))
    shared = {name for name, count in writers.items() if count > 1}
    if not shared:
        return choices

    def fewer(node: fx.Node) -> tuple[Choice, ...]:
        whole = [
            i for i, source in enumerate(operands(node)) if source in _written(node) and source.name in shared
        ]
        return tuple(
            choice
            for choice in choices(node)
            if all(isinstance(choice.inputs[i].placement, Replicate) for i in whole)
        )

    return fewer


def _written(node: fx.Node) -> tuple[fx.Node, ...]:
    if not writes_statistics(node):
        return ()
    return tuple(source for source in node.args[3:5] if isinstance(source, fx.Node))


def makes_values(node: fx.Node) -> bool:
    """Tell whether an op is decided about: it makes tensors and is no projection of another's."""
    return node.target is not operator.getitem and bool(tensor_specs(node))


def value_name(node: fx.Node) -> ValueName:
    """The value that a node stands for: for a projection, the value it projects from."""
    if node.target is operator.getitem:
        source, element = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(element, int)
        items = source.meta["val"]
        return source.name, sum(isinstance(item, torch.Tensor) for item in items[:element])
    return node.name, 0


def _readers(graph: OpGraph, unit_of: Mapping[str, int]) -> tuple[Readers, list[ValueName]]:
    readers: Readers = {}
    for node in graph.ops:
        if node.name not in unit_of:
            continue
        for position, source in enumerate(operands(node)):
            floating = bool(source.meta["val"].is_floating_point() or source.meta["val"].is_complex())
            flows = floating and source.name in graph.needs_grad and node.name in graph.needs_grad
            readers.setdefault(value_name(source), []).append((node.name, position, flows))
    return readers, [value_name(graph.nodes[output.node]) for output in graph.outputs]


def _add_placeholders(
    graph: OpGraph,
    readers: Readers,
    unit_of: dict[str, int],
    units: list[Unit],
    marks: Mapping[str, str],
) -> None:
    """Parameters that equal ops read in equal places are one unit; so are batch leaves, buffers and constants."""
    groups: dict[object, list[str]] = {}
    kinds: dict[object, UnitKind] = {}
    for given in graph.inputs:
        node = graph.nodes[given.node]
        used = readers.get((node.name, 0), [])
        if not tensor_specs(node) or (not used and given.kind != "parameter"):
            continue
        spec = _spec(node)
        kind: UnitKind = "state"
        if given.kind in ("parameter", "batch", "value"):
            kind = given.kind
        places = frozenset((unit_of[reader], position) for reader, position, _ in used)
        trained = node.name in graph.needs_grad
        dtypes: tuple[object, ...] = ()
        if kind == "parameter":
            dtypes = (graph.types_of(given.name, graph.precision), trained)
        key: object = (kind, spec.shape, spec.dtype, places or node.name, dtypes, marks.get(node.name))
        if kind in ("batch", "value"):
            key = (kind, node.name)
        groups.setdefault(key, []).append(node.name)
        kinds[key] = kind
    for key, members in groups.items():
        unit = Unit(len(units), kinds[key], tuple(members), (), (_spec(graph.nodes[members[0]]),))
        units.append(unit)
        unit_of |= dict.fromkeys(members, unit.index)


def _add_outputs(
    graph: OpGraph, readers: Readers, order: Sequence[ValueName], unit_of: dict[str, int], units: list[Unit]
) -> None:
    """Add the graph's results, which are needed whole: a unit with one operand and one way. Of numbers ranks return their
    parts. A value for other parts leaves in any layout, and its gradient comes back."""
    for number, (value, output) in enumerate(zip(order, graph.outputs, strict=True)):
        if output.kind in ("loss", "metric"):
            continue
        leaving = output.kind == "value"
        name = leaving_name(output.name) if leaving else f"output {number}"
        spec = _spec(graph.nodes[output.node])
        units.append(Unit(len(units), "leaving" if leaving else "output", (name,), (spec,), ()))
        unit_of[name] = len(units) - 1
        readers.setdefault(value, []).append((name, 0, leaving and output.node in graph.needs_grad))


def leaving_name(value: str) -> str:
    """Name the unit that takes ``value`` for other parts."""
    return f"leaving {value}"


def _wires(again: Recomputed, readers: Readers, unit_of: Mapping[str, int]) -> tuple[Wire, ...]:
    saved = kept_operands(again.graph, again.costs)
    found: Counter[
        tuple[int, int, tuple[tuple[int, int], ...], bool, BridgeUse, tuple[int, ...], ComputedBeside | None]
    ] = Counter()
    ahead = computed_beside(again)
    for (name, output), used in readers.items():
        if name not in unit_of:
            continue
        ends = tuple(sorted({(unit_of[reader], position) for reader, position, _ in used}))
        gradient = any(flows for _, _, flows in used)
        places = [(reader, position) for reader, position, _ in used]
        use = again.use(name, places, saved)
        beside = layers_of(again.graph, name, places, again.region_of) if gradient else ()
        layers = Counter(unit_of[layer] for layer in beside)
        of_ends = tuple(layers[u] for u, _ in ends if layers)
        found[unit_of[name], output, ends, gradient, use, of_ends, ahead.get(name)] += 1
    return tuple(Wire(*key, count) for key, count in found.items())


@once_per_graph
def kept_operands(graph: OpGraph, costs: GraphCosts) -> frozenset[tuple[str, int]]:
    """(op, operand) pairs whose operand autograd keeps: saved by the op, or by a reader of a view of it."""
    index = {node.name: i for i, node in enumerate(graph.ops)}
    storage: dict[ValueName, str | None] = {}
    for node, outputs in zip(graph.ops, costs.output_storages, strict=True):
        if node.target is not operator.getitem:
            storage |= {(node.name, j): name for j, name in enumerate(outputs)}
    kept: set[tuple[str, int]] = set()
    held: set[ValueName] = set()  # values of which a reader keeps what it takes
    for node in reversed(graph.ops):
        if node.target is operator.getitem:
            continue
        saved = costs.saved_operands(index[node.name])
        made = costs.output_storages[index[node.name]]
        for position, source in enumerate(operands(node)):
            value = value_name(source)
            own = storage.get(value)
            through = own is not None and any(
                other == own and (node.name, j) in held for j, other in enumerate(made)
            )
            if position in saved or through:
                kept.add((node.name, position))
                held.add(value)
    return frozenset(kept)


def _spec(node: fx.Node) -> TensorSpec:
    if node.target is operator.getitem:
        value = value_name(node)
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return tensor_specs(source)[value[1]]
    return tensor_specs(node)[0]
