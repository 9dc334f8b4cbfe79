"""The numbers of the feature-wise problem for one mesh and one micro-batch count.

    minimize    Σ_units seconds[option] + Σ_wires Σ_distinct needs seconds[source, need]          (per step)
    subject to  Σ_units bytes[option] + Σ_wires Σ_distinct needs copies[source, need] + largest buffer ≤ capacity

Seconds of ops and bridges count once per micro-batch and member; those of parameters (summing their gradients, gathering
what the optimizer updated, the update itself) once per step. Bytes are one rank's, one micro-batch in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import sympy
from numpy.typing import NDArray

from cost_models.cluster import ClusterSpec
from cost_models.compute import FloatArray
from cost_models.conversion import AxisLinks, axis_links
from cost_models.devices import Device
from cost_models.layout import Mesh
from cost_models.precision import ParameterPrecision, Precision
from passes.search.feature.bridges import Bridges, BridgeTable
from passes.search.feature.codes import DEFERRED, combine
from passes.search.feature.graph import FeatureGraph, Unit
from passes.search.feature.local import local_cost
from passes.search.feature.options import (
    Options,
    StoredChoice,
    arrivals,
    bytes_of,
    options_of,
    sizes_of,
    stored_options,
)
from passes.search.feature.parameters import parameter_costs, sum_bytes
from passes.search.feature.seconds import byte_shares, local_seconds
from passes.shard.words import Choice

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class UnitNumbers:
    """Arrays over one unit's options. ``detail``: what the options are: one-axis choices, or ways to store a parameter."""

    seconds: FloatArray
    bytes: FloatArray
    inputs: tuple[IntArray, ...]
    outputs: tuple[IntArray, ...]
    detail: Options | tuple[tuple[StoredChoice, ...], ...]
    index: IntArray
    """The index of each option in ``detail``: dominated ones are gone."""

    def keep(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> UnitNumbers:
        return UnitNumbers(
            self.seconds[chosen],
            self.bytes[chosen],
            tuple(codes[chosen] for codes in self.inputs),
            tuple(codes[chosen] for codes in self.outputs),
            self.detail,
            self.index[chosen],
        )


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
    bridges: Bridges
    symbols: dict[sympy.Symbol, int]
    optimizer: str
    precision: Precision
    largest_buffer_bytes: float = math.inf
    """Bridges with larger buffers leave no room for the rest: they are not allowed."""

    def table(self, wire: int, sources: Sequence[int], needs: Sequence[int]) -> BridgeTable:
        """Seconds per step and bytes of ``wire``'s bridges, over all the values that it stands for."""
        w = self.space.wires[wire]
        unit = self.space.units[w.producer]
        found = self.bridges.table(sources, needs, bytes_of(unit.outputs[w.output], self.symbols), w.gradient)
        copies = found.copies * w.count if w.kept else np.zeros_like(found.copies)
        allowed = found.allowed & (found.buffers <= self.largest_buffer_bytes)
        return BridgeTable(found.seconds * (w.count * self.microbatches), copies, found.buffers, allowed)


@dataclass(frozen=True, eq=False)
class Setting:
    """Everything that is the same for every mesh and micro-batch count of a search."""

    cluster: ClusterSpec
    batch_size: int
    optimizer: str
    precision: Precision
    reserved_bytes: float = 0.0
    """Memory of every device that is not to be planned with."""

    @property
    def capacity_bytes(self) -> float:
        """Memory of the smallest device: all have equal parts."""
        return min(device.memory_bytes for device in self.cluster.devices) - self.reserved_bytes

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """One of each kind of device: ops take what they take on the slowest."""
        found = {
            replace(device, rank=0, node=0, node_name="", host=None, memory_bytes=0): device
            for device in self.cluster.devices
        }
        return tuple(found.values())


def build_problem(
    space: FeatureGraph,
    mesh: Mesh,
    links: tuple[AxisLinks, ...],
    microbatches: int,
    setting: Setting,
    bridges: Bridges | None = None,
    restrict: Restriction | None = None,
) -> FeatureProblem:
    """All numbers of one mesh and micro-batch count; ``bridges``: this mesh's, where other counts have made them.

    ``restrict``: leaves a unit the options that its pin allows.
    """
    samples = setting.batch_size // microbatches
    symbols = {**space.graph.example_sizes, space.graph.batch.batch_symbol: samples}
    builder = _Builder(space, mesh, links, microbatches, samples, symbols, setting, restrict)
    return FeatureProblem(
        space,
        mesh,
        microbatches,
        samples,
        builder.units(),
        setting.capacity_bytes,
        bridges or Bridges(mesh.shape, links),
        symbols,
        setting.optimizer,
        setting.precision,
    )


def least_saved_bytes(space: FeatureGraph, ranks: int, samples: int) -> float:
    """Bytes that autograd saves of a micro-batch on one rank at least: nothing is split into more than all ranks."""
    costs = space.costs.exact(samples)
    sizes = costs.storage_bytes(samples)
    stored = {name for names in costs.saved for name in names}
    return sum(sizes[name] for name in stored if costs.ops[costs.maker[name]] in space.unit_of) / ranks


def links_of(mesh: Mesh, cluster: ClusterSpec) -> tuple[AxisLinks, ...]:
    return tuple(axis_links(mesh, axis, cluster) for axis in range(len(mesh.shape)))


@dataclass(frozen=True, eq=False)
class _Builder:
    space: FeatureGraph
    mesh: Mesh
    links: tuple[AxisLinks, ...]
    microbatches: int
    samples: int
    symbols: dict[sympy.Symbol, int]
    setting: Setting
    restrict: Restriction | None

    def units(self) -> tuple[UnitNumbers, ...]:
        ops = [unit for unit in self.space.units if unit.kind == "op"]
        options = {u.index: options_of(u, u.choices, self.mesh.shape, self.symbols) for u in ops}
        seconds = self._op_seconds(ops, options)
        saved = self._saved_bytes(ops, options)
        found = []
        for unit in self.space.units:
            if unit.kind == "op":
                o = options[unit.index]
                own = UnitNumbers(
                    seconds[unit.index], saved[unit.index], o.inputs, o.outputs, o, np.arange(o.count)
                )
            elif unit.kind == "parameter":
                own = self._parameter(unit)
            else:
                own = self._fixed(unit)
            if self.restrict is not None:  # before the rest is dropped: what is pinned need not be the best
                own = self.restrict(unit, own)
            found.append(own.keep(undominated(own)))
        return tuple(found)

    def _op_seconds(self, ops: Sequence[Unit], options: dict[int, Options]) -> dict[int, FloatArray]:
        """Per step; one call for all ops and options."""
        rows, work, moved, weight = [], [], [], []
        pieces: list[tuple[int, int]] = []  # (unit, how many members) of each run of rows
        for unit in ops:
            o = options[unit.index]
            traffic, weight_traffic = byte_shares(
                self.space.graph.nodes[unit.name].target,
                [bytes_of(spec, self.symbols) for spec in unit.operands],
                [bytes_of(spec, self.symbols) for spec in unit.outputs],
                o.operand_share,
                o.output_share,
            )
            for member, count in self._unlike_members(unit).items():
                rows.append(np.full(o.count, member, dtype=np.intp))
                work.append(o.work_share)
                moved.append(traffic)
                weight.append(weight_traffic)
                pieces.append((unit.index, count))
        flat = local_seconds(
            self.space.costs,
            np.concatenate(rows),
            np.concatenate(work),
            np.concatenate(moved),
            np.concatenate(weight),
            self.samples,
            self.setting.devices,
        )
        found = {unit.index: np.zeros(options[unit.index].count) for unit in ops}
        for (unit_index, count), part in zip(
            pieces, np.split(flat, np.cumsum([len(r) for r in rows])[:-1]), strict=True
        ):
            found[unit_index] += part * (count * self.microbatches)
        for unit in ops:
            found[unit.index] += self._local_seconds(unit, options[unit.index])
        return found

    def _local_seconds(self, unit: Unit, o: Options) -> FloatArray:
        """Per step, of the collectives inside the unit's ops."""
        seconds = np.zeros(o.count)
        if not any(choice.local for choice in unit.choices):
            return seconds
        graph = self.space.graph
        for k in range(o.count):
            per_axis = o.per_axis(k)
            if any(choice.local for choice in per_axis):
                seconds[k], _ = local_cost(
                    graph.nodes[unit.name],
                    per_axis,
                    self.mesh,
                    self.symbols,
                    self.setting.cluster,
                    differentiable=unit.name in graph.needs_grad,
                )
        return seconds * (len(unit.members) * self.microbatches)

    def _unlike_members(self, unit: Unit) -> dict[int, int]:
        """Op index -> how many of the unit's members cost the same: equal ops may have unlike numbers of readers, whose
        gradients are summed on the op's account."""
        extra = self.space.costs.exact(self.samples).rates.extra
        found: dict[object, list[int]] = {}
        for name in unit.members:
            i = self.space.op_index[name]
            found.setdefault(extra.of(i), []).append(i)
        return {members[0]: len(members) for members in found.values()}

    def _saved_bytes(self, ops: Sequence[Unit], options: dict[int, Options]) -> dict[int, FloatArray]:
        """Bytes that autograd keeps, charged to the op that makes the storage, in the layout that it makes it in."""
        costs = self.space.costs.exact(self.samples)
        sizes = costs.storage_bytes(self.samples)
        found = {unit.index: np.zeros(options[unit.index].count) for unit in ops}
        for storage in {name for names in costs.saved for name in names}:
            maker = costs.ops[costs.maker[storage]]
            unit = self.space.unit_of.get(maker)
            if unit is None:
                continue
            o = options[unit]
            found[unit] += sizes[storage] * storage_share(storage, o.output_share, o.work_share)
        return found

    def _fixed(self, unit: Unit) -> UnitNumbers:
        """Batch leaves arrive whole or split along the batch; buffers, constants and outputs are whole."""
        axes = len(self.mesh.shape)
        whole = np.zeros(1, dtype=np.int64)
        if unit.kind == "output":
            return UnitNumbers(np.zeros(1), np.zeros(1), (whole,), (), (), whole)
        spec = unit.outputs[0]
        size = float(bytes_of(spec, self.symbols)) * len(unit.members)
        dim = None
        if unit.kind == "batch":
            leaf = self.space.graph.input_of[unit.name].name
            dim = self.space.graph.batch.batch_dims.get(leaf)
            size *= self.microbatches
        ways = [Choice((), (p,)) for p in arrivals(dim)]
        o = options_of(unit, ways, self.mesh.shape, self.symbols)
        assert o.axes.shape[1] == axes
        return UnitNumbers(
            np.zeros(o.count), o.output_share[:, 0] * size, (), o.outputs, o, np.arange(o.count)
        )

    def _parameter(self, unit: Unit) -> UnitNumbers:
        graph = self.space.graph
        name = graph.input_of[unit.name].name
        trained = unit.name in graph.needs_grad
        types = graph.types_of(name, self.setting.precision)
        dims = sizes_of(unit.outputs[0], self.symbols)
        elements = int(np.prod(dims, dtype=np.int64)) if dims else 1
        ways = stored_options(dims, trained, self.mesh.shape)
        count = len(unit.members)
        numbers = [self._kept(elements, types, trained, way) for way in ways]
        codes = np.array([combine([c.code for c in way]) for way in ways], dtype=np.int64)
        return UnitNumbers(
            np.array([seconds for seconds, _ in numbers]) * count,
            np.array([held for _, held in numbers]) * count,
            (),
            (codes,),
            ways,
            np.arange(len(ways)),
        )

    def _kept(
        self, elements: int, types: ParameterPrecision, trained: bool, way: Sequence[StoredChoice]
    ) -> tuple[float, float]:
        return parameter_costs(
            elements,
            types,
            trained,
            tuple(c.stored for c in way),
            tuple(c.state for c in way),
            tuple(c.code == DEFERRED for c in way),
            self.mesh,
            self.links,
            self.setting.optimizer,
            self.setting.devices,
            sum_bytes(self.space.graph, self.setting.precision),
            self.setting.cluster,
        )


def storage_share(storage: str, output_share: FloatArray, work_share: FloatArray) -> FloatArray:
    """The part of a saved storage that a rank has: an output's; of what is hidden in the op, as much as of its work."""
    if "~" in storage:
        return work_share
    _, _, number = storage.partition(".")
    share: FloatArray = output_share[:, int(number) if number.isdecimal() else 0]
    return share


def undominated(own: UnitNumbers) -> NDArray[np.intp]:
    """Options that no other with the same codes beats in both seconds and bytes; of equal ones the first."""
    codes = list(zip(*(c.tolist() for c in (*own.inputs, *own.outputs)), strict=True))
    if not codes:
        codes = [()] * len(own.seconds)
    best: dict[object, list[int]] = {}
    order = np.lexsort((np.arange(len(own.seconds)), own.bytes, own.seconds))
    for k in order.tolist():
        rivals = best.setdefault(codes[k], [])
        if all(own.bytes[r] > own.bytes[k] for r in rivals):
            rivals.append(k)
    return np.array(sorted(k for rivals in best.values() for k in rivals), dtype=np.intp)
