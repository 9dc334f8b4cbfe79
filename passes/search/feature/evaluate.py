"""The cost of a feature-wise placement, summed over every op, value and parameter of the whole graph.

Independent of the search's classes, wires, codes and tables: it reads a ``FeaturePlacement`` and the graph, follows every
edge, and adds up seconds and bytes one at a time. A search's objective must agree.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import sympy
from torch import fx

from cost_models.arrays import FloatArray
from cost_models.communication import hidden_seconds
from cost_models.conversion import (
    AxisLinks,
    buffer_share,
    expected_gradient,
    given_gradient,
    local_share,
    path,
    steps_bytes_per_rank,
    steps_seconds,
)
from cost_models.layout import Partial, Placement, Replicate, Shard
from passes.costs.backward_peak import backward_work
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph, tensor_specs
from passes.search.feature.ahead import ComputedBeside, backward_beside, computed_beside
from passes.search.feature.bridges import gather_ahead, steps_between, summed_beside
from passes.search.feature.graph import ValueName, kept_operands, makes_values, value_name
from passes.search.feature.options import bytes_of, parts_of, placements_of, storage_share
from passes.search.feature.parameters import ShardedParameter, sum_bytes
from passes.search.feature.seconds import (
    LocalRows,
    layers_of,
    local_cost,
    local_seconds,
    local_weight_seconds,
    parts_of_sum,
    shared_seconds,
    splits_samples,
    traffic_of_parts,
    weight_rows,
)
from passes.search.feature.setting import Setting
from passes.search.recomputed import BridgeUse, Reader, Recomputed
from passes.shard.words import FeaturePlacement, Need, Placements, operands
from runtime.segment.code import TensorSpec


@dataclass(frozen=True)
class FeatureCost:
    """The cost of one step.

    ``bridge_seconds``: with the collectives inside ops, and values from other parts. ``communication_bytes``: bytes that
    each rank sends, by the collectives' volumes.
    """

    op_seconds: float
    bridge_seconds: float
    parameter_seconds: float
    memory_bytes: float
    communication_bytes: float

    @property
    def seconds(self) -> float:
        return self.op_seconds + self.bridge_seconds + self.parameter_seconds


def evaluate(graph: OpGraph, costs: GraphCosts, placement: FeaturePlacement, setting: Setting) -> FeatureCost:
    """The surrogate's seconds and bytes of ``placement``; O(ops · operands)."""
    whole = WholeGraph(graph, costs, placement, setting)
    seconds_of, saved, working = whole.ops()
    bridge_seconds, copies, buffer, sent, deferred = whole.bridges()
    bridge_seconds -= whole.hidden_seconds() + whole.hidden_gather_seconds()
    inside_seconds, inside_sent = whole.inside_ops()
    crossing_seconds = whole.crossing() * setting.crossing_seconds_per_byte
    parameter_seconds, kept, summed = whole.placeholders(deferred)
    return FeatureCost(
        math.fsum(seconds_of.values()) * placement.microbatches,
        (bridge_seconds + inside_seconds + crossing_seconds) * placement.microbatches,
        parameter_seconds,
        saved + copies + buffer + working + kept,
        (sent + inside_sent) * placement.microbatches + summed,
    )


@dataclass(frozen=True, eq=False)
class WholeGraph:
    """A placement, followed through the whole graph."""

    graph: OpGraph
    costs: GraphCosts
    placement: FeaturePlacement
    setting: Setting

    @cached_property
    def again(self) -> Recomputed:
        """The blocks that backward computes again."""
        return Recomputed(self.graph, self.costs, self.setting.again)

    @property
    def samples(self) -> int:
        """Samples of a micro-batch."""
        return self.setting.job.batch_size // self.placement.microbatches

    @cached_property
    def symbols(self) -> Mapping[sympy.Symbol, int]:
        return {**self.graph.example_sizes, self.graph.batch.batch_symbol: self.samples}

    @cached_property
    def links(self) -> tuple[AxisLinks, ...]:
        return self.setting.links(self.placement.mesh)

    def ops(self) -> tuple[dict[str, float], float, float]:
        """(seconds of each op on its shards in one micro-batch, without collectives; bytes saved for backward; the most
        that the backward of one of them works in)."""
        shape, batch = self.placement.mesh.shape, self.graph.batch.batch_symbol
        rows = []
        shares: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for index, node in enumerate(self.graph.ops):
            if not makes_values(node):
                continue
            choice = self.placement.choices[node.name]
            read = [
                local_share([c.inputs[i].placement for c in choice], shape)
                for i in range(len(choice[0].inputs))
            ]
            made = [local_share([c.outputs[o] for c in choice], shape) for o in range(len(choice[0].outputs))]
            busy = 1.0
            for c, size in zip(choice, shape, strict=True):
                busy /= size if any(isinstance(p, Shard) for p in placements_of(c)) else 1
            specs = [self._spec(source) for source in operands(node)], tensor_specs(node)
            splits = (splits_samples([*specs[0], *specs[1]], placements_of(c), batch) for c in choice)
            parts = math.prod(size for size, own in zip(shape, splits, strict=True) if own)
            number = np.array([math.gcd(parts, self.samples)])
            local = np.array([read]).reshape(1, -1), np.array([made])
            traffic = traffic_of_parts(self.graph, node, specs, self.symbols, local, number)
            forwards = 2 if node.name in self.again.twice else 1
            rows.append(LocalRows(np.array([index]), np.array([busy]), traffic, number, forwards))
            shares[node.name] = np.array([made]), np.array([busy])
        seconds = local_seconds(self.costs, rows, self.samples, self.setting.devices)
        most = 0.0
        for row in rows:
            working = backward_work(self.graph, self.costs, self.samples // int(row.parts[0])).beyond_bytes
            most = max(most, float(working[row.ops[0]] * row.traffic.bytes[0]))
        return dict(zip(shares, seconds.tolist(), strict=True)), self._saved(shares), most

    def inside_ops(self) -> tuple[float, float]:
        """(seconds, sent bytes) of one micro-batch, of the collectives that local functions make."""
        seconds = sent = 0.0
        for name, choice in self.placement.choices.items():
            if any(c.local for c in choice):
                ways = [name in self.graph.needs_grad, *([False] if name in self.again.twice else [])]
                for flows in ways:
                    own = local_cost(
                        self.graph.nodes[name],
                        choice,
                        self.placement.mesh,
                        self.symbols,
                        self.setting.cluster,
                        differentiable=flows,
                    )
                    seconds, sent = seconds + own[0], sent + own[1]
        return seconds, sent

    def crossing(self) -> float:
        """Bytes that other parts send a rank in one micro-batch: values that arrive, gradients of those that left; and what
        it sends them of gradients in parts, beyond the first."""
        shape, total = self.placement.mesh.shape, 0.0
        coming = [given.node for given in self.graph.inputs if given.kind == "value"]
        leaving = [output.node for output in self.graph.outputs if output.kind == "value"]
        for name in (*coming, *(name for name in leaving if name in self.graph.needs_grad)):
            size = bytes_of(self._spec(self.graph.nodes[name]), self.symbols)
            layout = self.placement.values[name]
            parts = parts_of(self.placement.returned.get(name, layout), shape)
            total += size * (local_share(layout, shape) + (parts - 1) * self.setting.returned_share(name))
        return total

    def _saved(self, shares: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> float:
        exact = self.costs.exact(self.samples)
        sizes = exact.storage_bytes(self.samples)
        total = 0.0
        for storage in sorted(self.again.storages(self.samples)):
            maker = exact.ops[exact.maker[storage]]
            if maker in shares:
                total += sizes[storage] * float(storage_share(storage, *shares[maker])[0])
        return total

    def _spec(self, node: fx.Node) -> TensorSpec:
        name, output = value_name(node)
        return tensor_specs(self.graph.nodes[name])[output]

    def produced(self, value: ValueName) -> Placements:
        name, output = value
        given = self.graph.input_of.get(name)
        axes = len(self.placement.mesh.shape)
        if given is None:
            return tuple(c.outputs[output] for c in self.placement.choices[name])
        other = {"batch": self.placement.batch, "value": self.placement.values}
        layouts = other.get(given.kind, self.placement.stored)
        return layouts.get(given.name, (Replicate(),) * axes)

    def needs(self) -> dict[ValueName, dict[tuple[Need, ...], bool]]:
        """Per value the distinct needs of it, and whether anything gives it a gradient."""
        whole: Placements = (Replicate(),) * len(self.placement.mesh.shape)
        readers: dict[ValueName, list[tuple[tuple[Need, ...], bool]]] = {}
        for node in self.graph.ops:
            if not makes_values(node):
                continue
            for i, source in enumerate(operands(node)):
                need = tuple(c.inputs[i] for c in self.placement.choices[node.name])
                flows = source.name in self.graph.needs_grad and node.name in self.graph.needs_grad
                readers.setdefault(value_name(source), []).append((need, flows))
        for output in self.graph.outputs:
            if output.kind not in ("loss", "metric"):  # of numbers ranks return their parts
                value = value_name(self.graph.nodes[output.node])
                layout = self.placement.values[output.name] if output.kind == "value" else whole
                flows = output.kind == "value" and output.node in self.graph.needs_grad
                readers.setdefault(value, []).append((tuple(map(Need, layout)), flows))
        return {
            value: dict.fromkeys((need for need, _ in found), any(flows for _, flows in found))
            for value, found in readers.items()
        }

    def uses(self) -> dict[ValueName, BridgeUse]:
        """Tell per value how backward has the copies that its bridges make."""
        saved = kept_operands(self.graph, self.costs)
        return {value: self.again.use(value[0], found, saved) for value, found in self._readers.items()}

    @cached_property
    def _readers(self) -> Mapping[ValueName, list[Reader]]:
        """The (op, operand) that read each value."""
        readers: dict[ValueName, list[Reader]] = {}
        for node in self.graph.ops:
            if makes_values(node):
                for i, source in enumerate(operands(node)):
                    readers.setdefault(value_name(source), []).append((node.name, i))
        for number, output in enumerate(self.graph.outputs):
            if output.kind not in ("loss", "metric"):
                value = value_name(self.graph.nodes[output.node])
                readers.setdefault(value, []).append((f"output {number}", 0))
        return readers

    def bridges(self) -> tuple[float, float, float, float, dict[str, tuple[bool, ...]]]:
        """(seconds and sent bytes of one micro-batch, bytes of kept copies, the largest buffer, axes on which each
        parameter's gradient is summed once per step)."""
        shape = self.placement.mesh.shape
        seconds = copies = largest = sent = 0.0
        deferred: dict[str, tuple[bool, ...]] = {}
        uses = self.uses()
        for value, needs in self.needs().items():
            produced = self.produced(value)
            given = self.graph.input_of.get(value[0])
            size = float(bytes_of(tensor_specs(self.graph.nodes[value[0]])[value[1]], self.symbols))
            expected: tuple[Placement, ...] = expected_gradient(produced)
            if given is not None and given.kind == "parameter" and value[0] in self.graph.needs_grad:
                later = tuple(
                    isinstance(p, Replicate) and any(isinstance(given_gradient(n)[a], Partial) for n in needs)
                    for a, p in enumerate(produced)
                )
                deferred[given.name] = later
                expected = tuple(Partial() if d else e for d, e in zip(later, expected, strict=True))
            if given is not None and given.kind == "value":
                expected = self.placement.returned.get(given.name, expected)
            buffer = 0.0
            for need, flows in needs.items():
                there = path(produced, tuple(n.placement for n in need), shape)
                back = path(given_gradient(need), expected, shape) if flows else ()
                had, has = (local_share(p, shape) for p in (produced, [n.placement for n in need]))
                use = uses[value]
                twice = use.repeated == "all" or (use.repeated == "growing" and has > had)
                for steps in (there, back, there if twice else ()):
                    seconds += steps_seconds(steps, size, self.links)
                    sent += steps_bytes_per_rank(steps, size, shape)
                if there and (use.beside if twice else use.kept):
                    copies += size * has
                buffer += size * max((buffer_share(s, shape[s.axis]) for s in (*there, *back)), default=0.0)
            largest = max(largest, buffer)
        return seconds, copies, largest, sent, deferred

    def hidden_seconds(self) -> float:
        """Seconds of one micro-batch in which layers compute while a sum of their input's gradient is under way."""
        shape, rows, sums = self.placement.mesh.shape, list[LocalRows](), list[float]()
        index = {node.name: i for i, node in enumerate(self.graph.ops)}
        needs = self.needs()
        for value, readers in self._readers.items():
            if not any(needs[value].values()):
                continue
            names = layers_of(self.graph, value[0], readers, self.again.region_of)
            layers = [self.graph.nodes[name] for name in names]
            size = float(bytes_of(tensor_specs(self.graph.nodes[value[0]])[value[1]], self.symbols))
            given = self.graph.input_of.get(value[0])
            parts = self.placement.returned.get(given.name) if given is not None else None
            later = [isinstance(p, Partial) for p in parts or (Replicate(),) * len(shape)]
            for layer, part in zip(layers, parts_of_sum(layers, (1,) * len(layers)), strict=True):
                need = tuple(choice.inputs[0] for choice in self.placement.choices[layer.name])
                step = summed_beside(self.produced(value), need, later, shape)
                if step is not None:
                    seconds = self.links[step.axis].seconds(step.kind, step.share * size)
                    sums.append(seconds * part)
                    rows.append(
                        weight_rows(self.graph, layer, index[layer.name], [need], shape, self.symbols)
                    )
        if not rows:
            return 0.0
        computing = local_weight_seconds(self.costs, rows, self.samples, self.setting.devices)
        return float(hidden_seconds(np.array(sums), computing, self._contention).sum())

    @cached_property
    def _computing(self) -> Mapping[str, tuple[ComputedBeside, float, float]]:
        """Return what runs beside a parameter's gathers, and a rank's seconds in it each way, by the parameter's node."""
        beside = computed_beside(self.again)
        return {name: (own, *own.seconds(*self._shared_seconds)) for name, own in beside.items()}

    @cached_property
    def _shared_seconds(self) -> tuple[FloatArray, FloatArray]:
        ranks = math.prod(self.placement.mesh.shape)
        return shared_seconds(self.costs, self.samples, self.setting.devices, ranks)

    def hidden_gather_seconds(self) -> float:
        """Seconds of one micro-batch less than gathers of parameters take, and sums of their gradients, by themselves."""
        graph, shape, total = self.graph, self.placement.mesh.shape, 0.0
        uses, needs, (*_, deferred) = self.uses(), self.needs(), self.bridges()
        for parameter, (beside, forward, backward) in self._computing.items():
            ((need, flows),) = needs[parameter, 0].items()
            produced = self.produced((parameter, 0))
            later = deferred.get(graph.input_of[parameter].name, (False,) * len(shape))
            first, last = gather_ahead(*steps_between(produced, need, later, shape))
            if first is None:
                continue
            whole = float(bytes_of(tensor_specs(graph.nodes[parameter])[0], self.symbols))
            growing = local_share([n.placement for n in need], shape) > local_share(produced, shape)
            repeated = uses[parameter, 0].repeated
            again = repeated == "all" or (repeated == "growing" and growing)
            back = [step for step in (last, first if again else None) if step is not None] if flows else []
            for steps, computing in (([first], forward), (back, backward)):
                merged = 0.0
                for step in steps:
                    size, links = step.share * whole, self.links[step.axis]
                    merged += beside.part * links.seconds(step.kind, size / beside.part)
                    total += links.seconds(step.kind, size)
                total += beside.often * float(hidden_seconds(merged, computing, self._contention)) - merged
        return total

    @cached_property
    def _contention(self) -> float:
        return self.setting.cluster.contention(self.placement.mesh.ranks)

    def placeholders(self, deferred: Mapping[str, tuple[bool, ...]]) -> tuple[float, float, float]:
        """(seconds per step, bytes, bytes sent to sum gradients and to gather what was updated)."""
        graph, placement, shape = self.graph, self.placement, self.placement.mesh.shape
        whole = (Replicate(),) * len(shape)
        seconds = held = sent = 0.0
        used = self.needs()
        together_bytes = sum_bytes(graph, self.setting.job.precision)
        for given in graph.inputs:
            node = graph.nodes[given.node]
            if not tensor_specs(node) or node.target is operator.getitem:
                continue
            size = bytes_of(tensor_specs(node)[0], self.symbols)
            if given.kind != "parameter":
                if (node.name, 0) in used:
                    cut = graph.batch.batch_dims.get(given.name) if given.kind == "batch" else None
                    times = 1 if cut is None else placement.microbatches
                    held += size * times * local_share(self.produced((node.name, 0)), shape)
                continue
            stored = placement.stored.get(given.name, whole)
            parameter = ShardedParameter(
                elements=size // tensor_specs(node)[0].dtype.itemsize,
                types=graph.types_of(given.name, self.setting.job.precision),
                trained=node.name in graph.needs_grad,
                mesh=placement.mesh,
                stored=stored,
                state=placement.sharded_state.get(given.name, stored),
                deferred=deferred.get(given.name, (False,) * len(shape)),
            )
            own_seconds, own_bytes, sums = parameter.costs(self.links, self.setting, together_bytes)
            if sums:
                backward = backward_beside(graph, node.name, self._shared_seconds[1])
                own_seconds -= float(hidden_seconds(sums, backward, self._contention))
            seconds += own_seconds
            held += own_bytes
            sent += parameter.sent_bytes()
        return seconds, held, sent
