"""One placement on a mesh for two traces: the evaluation graph runs on shards as the training graph does.

Parameters and buffers lie as training stores them. An op that training has too (same module path, kind and count) runs as
it does there; any other, and one whose sizes do not allow that here, takes what moves the fewest bytes:

    training                        choice             evaluation                       choice
    up    linear   module "up"      R~ S0 S0 -> S1     linear   module "up"             R~ S0 S0 -> S1    (same)
    drop  dropout  module "drop"    S1 -> S1           -
                                                       softmax  module ""               R -> R            (cheapest)

What an op's rule allows is right whatever other ops do: bridges convert. So only the time depends on what is chosen.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import sympy
from torch import fx

from cost_models.conversion import path, volume_share
from cost_models.layout import Mesh, Placement, Replicate, Shard
from partitioner.evaluation.placement import keyed_ops
from passes.graph.graph import OpGraph, tensor_specs
from passes.graph.nodes import argument
from passes.shard.rules import choices, has_rule, makes_tensors
from passes.shard.rules.samples import signature
from passes.shard.sizes import least_unit
from passes.shard.words import Choice, FeaturePlacement, Placements, all_replicated, are_nested, operands
from runtime.segment.code import Dim, TensorSpec
from runtime.segment.recompute import writes_statistics

MOVED = 16.0
"""A byte that is sent costs as much as so many that an op reads or writes."""


def reuse_sharding(
    training: OpGraph,
    placement: FeaturePlacement,
    evaluation: OpGraph,
    stored: Mapping[str, Placements],
    batch: Mapping[str, Placements],
    unit: int,
    whole: OpGraph | None = None,
    values: Mapping[str, Placements] | None = None,
) -> FeaturePlacement:
    """Place ``evaluation`` on the mesh of ``placement``, the one of ``training``.

    ``stored``: placements of parameters and buffers (whole if not listed). ``batch``: those of leaves that arrive,
    likewise. ``unit``: number that samples come in multiples of (1: any number): nothing is sharded that needs more.
    ``whole``: the graph that ``evaluation`` is a part of, if it is one: ops are counted in it. ``values``: those of
    ``reuse_interfaces``.
    """
    values = values or {}
    known = {key: node for key, node in keyed_ops(training) if node.name in placement.choices}
    walk = _MeshWalk(evaluation, placement.mesh, unit, _sizes(evaluation))
    for given in evaluation.inputs:
        arriving = {"parameter": stored, "buffer": stored, "batch": batch, "value": values}.get(
            given.kind, {}
        )
        walk.layouts[given.node] = (arriving.get(given.name, walk.whole),)
    for key, counted in keyed_ops(whole or evaluation):
        node = evaluation.nodes.get(counted.name)
        if node is None:
            continue
        if node.target is operator.getitem:
            walk.project(node)
        elif makes_tensors(node):
            twin = known.get(key)
            walk.place(node, twin, () if twin is None else placement.choices[twin.name])
    state = {name: stored[name] for name in (*evaluation.parameters, *evaluation.buffers) if name in stored}
    leaves = {name: batch[name] for name in evaluation.batch.batch_dims if name in batch}
    return FeaturePlacement(placement.mesh, walk.chosen, state, leaves, placement.microbatches, values=values)


def reuse_interfaces(
    training: OpGraph, evaluation: OpGraph, crossing: Collection[str], placement: FeaturePlacement, unit: int
) -> dict[str, Placements]:
    """Return the layouts of ``crossing``, values between segments, on the mesh of ``placement``, which is training's.

    A value that crosses in training too has its layout there, if that divides; any other is whole. Both sides of a way
    find the same, as nothing of it depends on what else a segment runs.
    """
    walk = _MeshWalk(evaluation, placement.mesh, unit, {})
    planned = {key: node.name for key, node in keyed_ops(training) if node.name in placement.values}
    found = {}
    for key, node in keyed_ops(evaluation):
        layout = placement.values.get(planned.get(key, ""), walk.whole)
        if node.name in crossing:
            found[node.name] = layout if walk.divides(tensor_specs(node)[0], layout) else walk.whole
    return found


@dataclass(frozen=True)
class _MeshWalk:
    """One walk through the evaluation graph. ``sizes``: a number for every symbol, to weigh bytes with."""

    graph: OpGraph
    mesh: Mesh
    unit: int
    sizes: Mapping[sympy.Symbol, int]
    layouts: dict[str, tuple[Placements, ...]] = field(default_factory=dict)
    """The layout of each tensor that a node makes."""
    chosen: dict[str, tuple[Choice, ...]] = field(default_factory=dict)

    @property
    def whole(self) -> Placements:
        return (Replicate(),) * len(self.mesh.shape)

    def project(self, node: fx.Node) -> None:
        source, position = node.args[0], node.args[1]
        assert isinstance(source, fx.Node)
        assert isinstance(position, int)
        if source.name in self.layouts:
            self.layouts[node.name] = (self.layouts[source.name][position],)

    def place(self, node: fx.Node, twin: fx.Node | None, wanted: Sequence[Choice]) -> None:
        """Place an op. ``wanted``: the choices of its ``twin`` in training, one per axis; none without one."""
        allowed = self._allowed(node, twin, wanted)
        found = tuple(wanted)
        if not found or not set(found) <= set(allowed) or not self._fits(node, found):
            found = self._cheapest(node, allowed, wanted)
        self.chosen[node.name] = found
        outputs = range(len(found[0].outputs)) if found else ()
        self.layouts[node.name] = tuple(tuple(choice.outputs[o] for choice in found) for o in outputs)

    def _allowed(self, node: fx.Node, twin: fx.Node | None, wanted: Sequence[Choice]) -> tuple[Choice, ...]:
        """List what a rule allows; without a rule, what the plan's trials allowed of the very same op.

        Trying again could find something else on another rank.
        """
        if has_rule(node):
            return choices(node)
        whole = all_replicated(len(operands(node)), len(tensor_specs(node)))
        if twin is not None and signature(twin) == signature(node):
            return tuple(dict.fromkeys((whole, *wanted)))
        return (whole,)

    def _cheapest(
        self, node: fx.Node, allowed: Sequence[Choice], wanted: Sequence[Choice]
    ) -> tuple[Choice, ...]:
        """Choose, axis after axis, what costs least. Every op may run whole."""
        whole = allowed[0]
        found = [whole] * len(self.mesh.shape)
        if writes_statistics(node):
            found = self._as_stored(node, allowed)
        for axis in range(len(found)):
            best = self._cost(node, found)
            for choice in allowed:
                tried = [*found[:axis], choice, *found[axis + 1 :]]
                if not self._fits(node, tried):
                    continue
                cost = self._cost(node, tried)
                if wanted and choice == wanted[axis]:
                    cost = -1.0
                if cost < best:
                    best, found = cost, tried
        return tuple(found)

    def _as_stored(self, node: fx.Node, allowed: Sequence[Choice]) -> list[Choice]:
        """List choices that take running statistics as they are kept (``passes.shard.shard``), for all axes at once."""
        fitting = (c for c in itertools.product(allowed, repeat=len(self.mesh.shape)) if self._fits(node, c))
        found = next(fitting, None)
        return list(found if found is not None else [allowed[0]] * len(self.mesh.shape))

    def _fits(self, node: fx.Node, tried: Sequence[Choice]) -> bool:
        """Tell whether everything divides, for every number of samples that may come."""
        taken = [tuple(c.inputs[i].placement for c in tried) for i in range(len(operands(node)))]
        made = [tuple(c.outputs[o] for c in tried) for o in range(len(tensor_specs(node)))]
        specs = [tensor_specs(source)[0] for source in operands(node)]
        if not all(map(self.divides, (*specs, *tensor_specs(node)), (*taken, *made))):
            return False
        ranks = math.prod(n for c, n in zip(tried, self.mesh.shape, strict=True) if c.divides)
        if any(count % ranks for c in tried for count in c.divides):
            return False
        functions = {c.local.partition(":")[0] for c in tried if c.local}
        return len(functions) < 2 and are_nested(tried) and self._keeps_statistics(node, taken)

    def _keeps_statistics(self, node: fx.Node, taken: Sequence[Placements]) -> bool:
        if not writes_statistics(node):
            return True
        written = (argument(node, "running_mean"), argument(node, "running_var"))
        return all(
            self.layouts[source.name][0] == layout
            for source, layout in zip(operands(node), taken, strict=True)
            if source in written
        )

    def divides(self, spec: TensorSpec, placements: Placements) -> bool:
        """Tell whether a tensor can lie so, for every number of samples that may come."""
        parts: dict[int, int] = defaultdict(lambda: 1)
        for placement, size in zip(placements, self.mesh.shape, strict=True):
            if isinstance(placement, Shard):
                parts[placement.dim] *= size
        return all(self._ensures(spec.shape[dim], count) for dim, count in parts.items())

    def _ensures(self, size: Dim, parts: int) -> bool:
        needed = least_unit(size, parts, self.graph.batch.batch_symbol)
        return needed is not None and self.unit % needed == 0 and size != 0

    def _cost(self, node: fx.Node, tried: Sequence[Choice]) -> float:
        """Count the bytes of converting the operands to what is needed, and those that the op then reads and writes."""
        cost = 0.0
        for i, source in enumerate(operands(node)):
            needed = tuple(c.inputs[i].placement for c in tried)
            size = tensor_specs(source)[0].size_bytes(self.sizes)
            for step in path(self.layouts[source.name][0], needed, self.mesh.shape):
                cost += MOVED * size * volume_share(step, self.mesh.shape[step.axis])
            cost += size * self._share(needed)
        for o, spec in enumerate(tensor_specs(node)):
            made = tuple(c.outputs[o] for c in tried)
            cost += spec.size_bytes(self.sizes) * self._share(made)
            for step in path(
                made, self._summed(made), self.mesh.shape
            ):  # a sum in parts is summed sooner or later
                cost += MOVED * spec.size_bytes(self.sizes) * volume_share(step, self.mesh.shape[step.axis])
        return cost

    def _summed(self, made: Placements) -> Placements:
        return tuple(p if isinstance(p, Shard) else Replicate() for p in made)

    def _share(self, placements: Sequence[Placement]) -> float:
        return 1 / math.prod(
            n for p, n in zip(placements, self.mesh.shape, strict=True) if isinstance(p, Shard)
        )


def _sizes(graph: OpGraph) -> dict[sympy.Symbol, int]:
    """Return the sizes of the example."""
    found = dict(graph.example_sizes)
    for node in graph.graph.nodes:  # whatever else is open
        for spec in tensor_specs(node):
            for size in spec.shape:
                symbols = () if isinstance(size, int) else size.free_symbols
                found |= {symbol: 8 for symbol in symbols if symbol not in found}
    return found
