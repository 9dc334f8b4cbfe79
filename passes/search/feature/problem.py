"""The numbers of the feature-wise problem for one mesh and one micro-batch count.

    minimize    Σ_units seconds[option] + Σ_wires Σ_distinct needs seconds[source, need]          (per step)
                − Σ_wires Σ_readers hidden[source, need of the reader]                             (``seconds``)
    subject to  Σ_units bytes[option] + Σ_wires Σ_distinct needs copies[source, need] + largest buffer
                + most working bytes ≤ capacity

Seconds of ops and bridges count once per micro-batch and member; those of parameters (summing their gradients, gathering
what the optimizer updated, the update itself) once per step. Bytes are one rank's, one micro-batch in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np
import sympy
from numpy.typing import NDArray

from cost_models.arrays import FloatArray
from cost_models.communication import hidden_seconds
from cost_models.conversion import local_share
from cost_models.devices import Device
from cost_models.layout import Mesh, Placement, Replicate, Shard
from passes.costs.backward_peak import backward_work
from passes.search.feature.ahead import ComputedBeside, backward_beside
from passes.search.feature.bridges import Bridges, BridgeTable
from passes.search.feature.codes import DEFERRED, combine, needs_of
from passes.search.feature.graph import FeatureGraph, Unit, Wire
from passes.search.feature.options import (
    Options,
    UnitNumbers,
    arriving_options,
    bytes_of,
    options_of,
    parts_of,
    sizes_of,
    storage_share,
    stored_options,
    undominated,
)
from passes.search.feature.parameters import ShardedParameter, sum_bytes
from passes.search.feature.seconds import (
    LocalRows,
    local_cost,
    local_seconds,
    local_weight_seconds,
    parts_of_sum,
    shared_seconds,
    weight_rows,
)
from passes.search.feature.setting import Setting
from passes.shard.words import Choice, Need

Restriction: TypeAlias = Callable[[Unit, UnitNumbers], UnitNumbers]


@dataclass(frozen=True, eq=False)
class FeatureProblem:
    """``units`` follow ``space.units``; the wires' tables are made when asked for."""

    space: FeatureGraph
    mesh: Mesh
    microbatches: int
    samples: int
    """Per micro-batch."""
    units: tuple[UnitNumbers, ...]
    capacity_bytes: float
    """Without ``floor_bytes``, which are not counted in the options' ``working_bytes`` either."""
    bridges: Bridges
    symbols: dict[sympy.Symbol, int]
    devices: tuple[Device, ...]
    """One of each kind."""
    contention: float
    """Factor by which computing slows down while something is sent."""
    floor_bytes: float = 0.0
    """Bytes that backward works in at least, whatever is chosen."""
    largest_buffer_bytes: float = math.inf
    """Bridges with larger buffers leave no room for the rest: they are not allowed."""

    def keep(self, chosen: Sequence[NDArray[np.bool_]]) -> FeatureProblem:
        """The problem with these options of each unit only."""
        units = zip(self.units, chosen, strict=True)
        return replace(self, units=tuple(unit.keep(mask) for unit, mask in units))

    def options_of(self, unit: Unit, choices: Sequence[Choice]) -> Options:
        """Return the combinations of ``choices`` that fit the mesh and the samples."""
        batch = self.space.graph.batch.batch_symbol
        return options_of(unit, choices, self.mesh.shape, self.symbols, batch)

    def table(self, wire: int, sources: Sequence[int], needs: Sequence[int]) -> BridgeTable:
        """Seconds per step and bytes of ``wire``'s bridges, over all the values that it stands for."""
        w = self.space.wires[wire]
        unit = self.space.units[w.producer]
        size = bytes_of(unit.outputs[w.output], self.symbols)
        found = self.bridges.table(sources, needs, size, w.gradient)
        seconds, copies = found.seconds, found.copies * (w.count if w.use.kept else 0)
        if w.use.repeated != "none":
            again = w.use.repeated == "all" or self.bridges.growing(sources, needs)
            there = self.bridges.table(sources, needs, size, gradient=False).seconds
            seconds = seconds + np.where(again, there, 0.0)
            copies = np.where(again, found.copies * (w.count if w.use.beside else 0), copies)
        allowed = found.allowed & (found.buffers <= self.largest_buffer_bytes)
        if unit.kind == "parameter" and len(w.readers) == 1:  # a sum of no parts may be priced lower
            allowed = allowed & self.bridges.summed_where_in_parts(sources, needs)
        return BridgeTable(seconds * (w.count * self.microbatches), copies, found.buffers, allowed)

    def hidden(self, wire: int, sources: Sequence[int], needs: Sequence[int]) -> tuple[FloatArray, ...]:
        """Seconds per step that each reader computes while the bridge's sum is under way, or others do while a parameter is
        gathered for it, [sources, needs]; or none."""
        w = self.space.wires[wire]
        if w.beside is not None:
            return (self._beside_gathers(w, w.beside, sources, needs),)
        if not w.layers:
            return ()
        graph = self.space.graph
        size = bytes_of(self.space.units[w.producer].outputs[w.output], self.symbols)
        sums = self.bridges.sum_seconds(sources, needs, size)
        layers = [graph.nodes[self.space.units[u].name] for u, _ in w.readers]
        if not sums.any():
            return (np.zeros_like(sums),) * len(layers)
        needed = [needs_of(code, len(self.mesh.shape)) for code in needs]
        rows = [
            weight_rows(graph, layer, self.space.op_index[layer.name], needed, self.mesh.shape, self.symbols)
            for layer in layers
        ]
        computing = local_weight_seconds(self.space.costs, rows, self.samples, self.devices)
        return tuple(
            hidden_seconds(sums * part, each, self.contention) * (times * w.count * self.microbatches)
            for part, each, times in zip(
                parts_of_sum(layers, w.layers), np.split(computing, len(layers)), w.layers, strict=True
            )
        )

    def _beside_gathers(
        self, wire: Wire, beside: ComputedBeside, sources: Sequence[int], needs: Sequence[int]
    ) -> FloatArray:
        size = bytes_of(self.space.units[wire.producer].outputs[wire.output], self.symbols)
        alone, merged = self.bridges.gather_seconds(sources, needs, size, beside.part)
        if not alone.any():
            return np.zeros_like(alone[0])
        if not wire.gradient:
            alone[1] = merged[1] = 0.0
        elif wire.use.repeated != "none":
            again = wire.use.repeated == "all" or self.bridges.growing(sources, needs)
            alone[1] += np.where(again, alone[0], 0.0)
            merged[1] += np.where(again, merged[0], 0.0)
        ways = zip(merged, beside.seconds(*self._shared_seconds), strict=True)
        hidden = [hidden_seconds(sending, computing, self.contention) for sending, computing in ways]
        less = (alone - merged + beside.often * np.array(hidden)).sum(axis=0)
        return np.asarray(less * (wire.count * self.microbatches))

    def beside_backward(self, parameter: Unit, sums: FloatArray) -> FloatArray:
        """Seconds per step in which the last backward goes on while the gradient of a parameter is summed, in each way to
        keep it. ``sums``: seconds of one such sum."""
        graph, (_, backward) = self.space.graph, self._shared_seconds
        each = np.array([backward_beside(graph, name, backward) for name in parameter.members])
        return np.asarray(hidden_seconds(sums[:, None], each, self.contention).mean(axis=1))

    @cached_property
    def _shared_seconds(self) -> tuple[FloatArray, FloatArray]:
        return shared_seconds(self.space.costs, self.samples, self.devices, math.prod(self.mesh.shape))


def build_problem(
    space: FeatureGraph,
    mesh: Mesh,
    microbatches: int,
    setting: Setting,
    bridges: Bridges | None = None,
    restrict: Restriction | None = None,
    *,
    ops_cost: bool = True,
) -> FeatureProblem:
    """All numbers of one mesh and micro-batch count; ``bridges``: this mesh's, where other counts have made them.

    ``restrict``: leaves a unit the options that its pin allows. ``ops_cost``: False where only parameters are asked about.
    """
    samples = setting.job.batch_size // microbatches
    symbols = {**space.graph.example_sizes, space.graph.batch.batch_symbol: samples}
    bridges = bridges or Bridges(mesh.shape, setting.links(mesh))
    contention = setting.cluster.contention(mesh.ranks)
    capacity, devices = setting.capacity_bytes(mesh), setting.devices
    empty = FeatureProblem(
        space, mesh, microbatches, samples, (), capacity, bridges, symbols, devices, contention
    )
    units = _Builder(empty, setting, restrict, ops_cost).units()
    floor_bytes = max((float(unit.working_bytes.min(initial=math.inf)) for unit in units), default=0.0)
    if not math.isfinite(floor_bytes):  # a pin leaves a unit no option
        floor_bytes = 0.0
    beyond = (replace(u, working_bytes=np.maximum(u.working_bytes - floor_bytes, 0.0)) for u in units)
    return replace(
        empty, units=tuple(beyond), floor_bytes=floor_bytes, capacity_bytes=empty.capacity_bytes - floor_bytes
    )


@dataclass(frozen=True, eq=False)
class _Builder:
    """The numbers of all units of ``problem``, which has none yet."""

    problem: FeatureProblem
    setting: Setting
    restrict: Restriction | None
    ops_cost: bool

    def units(self) -> tuple[UnitNumbers, ...]:
        ops = [unit for unit in self.problem.space.units if unit.kind == "op"]
        options = {u.index: self.problem.options_of(u, u.choices) for u in ops}
        nothing = {index: np.zeros(o.count) for index, o in options.items()}
        seconds = self._op_seconds(ops, options) if self.ops_cost else nothing
        saved = self._saved_bytes(ops, options) if self.ops_cost else nothing
        found = []
        for unit in self.problem.space.units:
            if unit.kind == "op":
                o = options[unit.index]
                own = UnitNumbers(
                    seconds[unit.index],
                    saved[unit.index],
                    self._working_bytes(unit, o) if self.ops_cost else nothing[unit.index],
                    o.inputs,
                    o.outputs,
                    o,
                    np.arange(o.count),
                )
            elif unit.kind == "parameter":
                own = self._parameter(unit)
            else:
                own = self._fixed(unit)
            if self.restrict is not None:  # before the rest is dropped: what is pinned need not be the best
                own = self.restrict(unit, own)
            found.append(undominated(own))
        return tuple(found)

    def _op_seconds(self, ops: Sequence[Unit], options: dict[int, Options]) -> dict[int, FloatArray]:
        """Per step; one call for all ops and options."""
        rows: list[LocalRows] = []
        pieces: list[tuple[int, int]] = []  # (unit, how many members) of each run of rows
        unlike = self.problem.space.unlike_members(self.problem.samples)
        for unit in ops:
            o = options[unit.index]
            parts, traffic = o.split(
                unit, self.problem.space.graph, self.problem.mesh.shape, self.problem.symbols
            )
            for member, count in unlike[unit.index].items():
                twice = self.problem.space.graph.ops[member].name in self.problem.space.again.twice
                forwards = 2 if twice else 1
                rows.append(LocalRows(np.full(o.count, member), o.work_share, traffic, parts, forwards))
                pieces.append((unit.index, count))
        costs, samples = self.problem.space.costs, self.problem.samples
        ends = np.cumsum([len(r.ops) for r in rows])[:-1]
        flat = local_seconds(costs, rows, samples, self.setting.devices)
        found = {unit.index: np.zeros(options[unit.index].count) for unit in ops}
        for (unit_index, count), part in zip(pieces, np.split(flat, ends), strict=True):
            found[unit_index] += part * (count * self.problem.microbatches)
        for unit in ops:
            found[unit.index] += self._local_seconds(unit, options[unit.index])
        return found

    def _working_bytes(self, unit: Unit, o: Options) -> FloatArray:
        """Bytes that a rank holds while the backward of one of the unit's ops runs, beyond what was saved: in proportion to
        the share of its memory traffic."""
        space, samples = self.problem.space, self.problem.samples
        parts, traffic = o.split(unit, space.graph, self.problem.mesh.shape, self.problem.symbols)
        members, found = [space.op_index[name] for name in unit.members], np.zeros(o.count)
        for count in np.unique(parts).tolist():
            own = backward_work(space.graph, space.costs, samples // count).beyond_bytes[members].max()
            found[parts == count] = own * traffic.bytes[parts == count]
        return found

    def _local_seconds(self, unit: Unit, o: Options) -> FloatArray:
        """Per step, of the collectives inside the unit's ops."""
        seconds, again = np.zeros(o.count), np.zeros(o.count)
        if not any(choice.local for choice in unit.choices):
            return seconds
        space, count = self.problem.space, self.problem.microbatches
        twice = len(space.again.twice.intersection(unit.members))
        for k in range(o.count):
            per_axis = o.per_axis(k)
            if any(choice.local for choice in per_axis):
                cost = partial(
                    local_cost,
                    space.graph.nodes[unit.name],
                    per_axis,
                    self.problem.mesh,
                    self.problem.symbols,
                    self.setting.cluster,
                )
                seconds[k], _ = cost(differentiable=unit.name in space.graph.needs_grad)
                again[k], _ = cost(differentiable=False) if twice else (0.0, 0.0)
        return seconds * (len(unit.members) * count) + again * (twice * count)

    def _saved_bytes(self, ops: Sequence[Unit], options: dict[int, Options]) -> dict[int, FloatArray]:
        """Bytes that autograd keeps, charged to the op that makes the storage, in the layout that it makes it in."""
        costs = self.problem.space.costs.exact(self.problem.samples)
        sizes = costs.storage_bytes(self.problem.samples)
        found = {unit.index: np.zeros(options[unit.index].count) for unit in ops}
        for storage in self.problem.space.again.storages(self.problem.samples):
            maker = costs.ops[costs.maker[storage]]
            unit = self.problem.space.unit_of.get(maker)
            if unit is None:
                continue
            o = options[unit]
            found[unit] += sizes[storage] * storage_share(storage, o.output_share, o.work_share)
        return found

    def _fixed(self, unit: Unit) -> UnitNumbers:
        """Batch leaves arrive whole or split along the batch; buffers, constants and outputs are whole."""
        axes = len(self.problem.mesh.shape)
        whole = np.zeros(1, dtype=np.int64)
        if unit.kind == "output":
            return UnitNumbers(np.zeros(1), np.zeros(1), np.zeros(1), (whole,), (), (), whole)
        if unit.kind in ("value", "leaving"):
            return self._crossing(unit)
        spec = unit.outputs[0]
        size = float(bytes_of(spec, self.problem.symbols)) * len(unit.members)
        dim = None
        if unit.kind == "batch":
            leaf = self.problem.space.graph.input_of[unit.name].name
            dim = self.problem.space.graph.batch.batch_dims.get(leaf)
            size *= self.problem.microbatches if dim is not None else 1
        ways = [Choice((), (Replicate(),)), *([] if dim is None else [Choice((), (Shard(dim),))])]
        o = self.problem.options_of(unit, ways)
        assert o.axes.shape[1] == axes
        held = o.output_share[:, 0] * size
        return UnitNumbers(np.zeros(o.count), held, np.zeros(o.count), (), o.outputs, o, np.arange(o.count))

    def _crossing(self, unit: Unit) -> UnitNumbers:
        """A value between parts arrives and leaves whole or split; a rank is charged the bytes that come to it: the value's
        where it arrives, its gradient's where it left."""
        if unit.kind == "value":
            return self._arriving(unit)
        (spec,) = unit.operands
        layouts: list[Placement] = [Replicate(), *(Shard(d) for d in range(len(spec.shape)))]
        ways = [Choice((Need(p),), ()) for p in layouts]
        o = self.problem.options_of(unit, ways)
        comes = self.problem.space.gradient_comes_back(unit)
        received = o.operand_share[:, 0] * (float(bytes_of(spec, self.problem.symbols)) * comes)
        seconds, nothing = received * self._seconds_per_byte, np.zeros(o.count)
        return UnitNumbers(seconds, nothing, nothing, o.inputs, (), o, np.arange(o.count))

    def _arriving(self, unit: Unit) -> UnitNumbers:
        """A value of another part arrives. If its gradient goes back in parts of a sum, the first is charged to those whom
        it comes to, as any gradient is, the others here."""
        shape, (spec,) = self.problem.mesh.shape, unit.outputs
        size = float(bytes_of(spec, self.problem.symbols))
        gradient = any(wire.gradient for wire in self.problem.space.wires if wire.producer == unit.index)
        ways = arriving_options(
            spec, gradient, shape, self.problem.symbols, self.problem.space.graph.batch.batch_symbol
        )
        held = np.array([local_share([c.stored for c in way], shape) for way in ways]) * size
        parts = np.array([parts_of([c.state for c in way], shape) for way in ways])
        more = (parts - 1) * (size * self.setting.returned_share(unit.name))
        codes = np.array([combine([c.code for c in way]) for way in ways], dtype=np.int64)
        seconds = (held + more) * self._seconds_per_byte
        return UnitNumbers(seconds, held, np.zeros(len(ways)), (), (codes,), ways, np.arange(len(ways)))

    @property
    def _seconds_per_byte(self) -> float:
        """Seconds per step of a byte that crosses in every micro-batch."""
        return self.setting.crossing_seconds_per_byte * self.problem.microbatches

    def _parameter(self, unit: Unit) -> UnitNumbers:
        graph, mesh, setting = self.problem.space.graph, self.problem.mesh, self.setting
        dims = sizes_of(unit.outputs[0], self.problem.symbols)
        trained = unit.name in graph.needs_grad
        ways = stored_options(dims, trained, mesh.shape)
        shared = setting.part.shared if setting.part is not None else ()
        whole = any(graph.input_of[node].name in shared for node in unit.members)
        if whole:
            ways = tuple(way for way in ways if all(c.stored == c.state == Replicate() for c in way))
        types = graph.types_of(graph.input_of[unit.name].name, setting.job.precision)
        together_bytes = sum_bytes(graph, setting.job.precision)
        known, key = self.problem.bridges.parameters, (dims, trained, whole, types, together_bytes)
        if key not in known:
            kept = [
                ShardedParameter(
                    elements=math.prod(dims),
                    types=types,
                    trained=trained,
                    mesh=mesh,
                    stored=tuple(c.stored for c in way),
                    state=tuple(c.state for c in way),
                    deferred=tuple(c.code == DEFERRED for c in way),
                )
                for way in ways
            ]
            known[key] = [each.costs(self.problem.bridges.links, setting, together_bytes) for each in kept]
        codes = np.array([combine([c.code for c in way]) for way in ways], dtype=np.int64)
        count = len(unit.members)
        seconds, held, sums = (np.array(column) for column in zip(*known[key], strict=True))
        if sums.any():
            seconds -= self.problem.beside_backward(unit, sums)
        return UnitNumbers(
            seconds * count, held * count, np.zeros(len(ways)), (), (codes,), ways, np.arange(len(ways))
        )
