"""The spaces that splits are searched over: ops in units, and which units may share a stage.

LayerModel (ops as arrays) ─► Space (units, structure) ─► LayerProblem per micro-batch size
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from passes.graph.contraction import OpArrays, clusters, intervals, list_downsets
from passes.search.layer.problem import LayerStructure, Working
from passes.search.layer.table import Geometry
from passes.search.layer.tuning import TUNING
from passes.search.model import LayerModel
from passes.search.touches import BoolArray, Crossing, Touch

T = TypeVar("T")
G = TypeVar("G", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Space:
    """One coarsening: which unit each op is in, and the structure that splits are searched over."""

    name: str
    unit_of: IntArray
    """[n ops]"""
    structure: LayerStructure
    geometry: Geometry
    _storage_group: IntArray
    _recomputed_group: IntArray
    _deferred_group: IntArray
    _state_group: IntArray
    _crossing_ops: IntArray
    _crossing_group: IntArray
    _carries_gradient: BoolArray

    def seconds(self, per_op: FloatArray) -> FloatArray:
        """[n ops] -> [units]"""
        return _sums(self.unit_of, per_op, self.structure.units)

    def storage_bytes(self, sizes: FloatArray) -> FloatArray:
        return _sums(self._storage_group, sizes, len(self.structure.storages))

    def recomputed_bytes(self, sizes: FloatArray) -> FloatArray:
        return _sums(self._recomputed_group, sizes, len(self.structure.recomputed))

    def working(self, beside: FloatArray, freed: FloatArray) -> Working:
        """[n ops] that of each op -> that of units, whose ops backward takes one after the other."""
        peak = Working(beside, freed).peak_bytes(self.unit_of.tolist(), self.structure.units)
        return Working(peak, _sums(self.unit_of, freed, self.structure.units))

    def deferred_bytes(self, sizes: FloatArray) -> FloatArray:
        return _sums(self._deferred_group, sizes, len(self.structure.deferred))

    def state_bytes(self, sizes: FloatArray) -> FloatArray:
        return _sums(self._state_group, sizes, len(self.structure.states))

    def crossing_bytes(self, per_op: FloatArray) -> tuple[FloatArray, FloatArray]:
        """[n ops] -> activation and gradient bytes of [crossings]"""
        size, count = per_op[self._crossing_ops], len(self.structure.crossings)
        forward = _sums(self._crossing_group, size, count)
        gradient = _sums(self._crossing_group, size * self._carries_gradient, count)
        return forward, gradient


def _sums(group: IntArray, weights: FloatArray, count: int) -> FloatArray:
    """[count] sum of the weights of each group."""
    return np.bincount(group, weights=weights, minlength=count).astype(np.float64)


def make_space(
    model: LayerModel, name: str, unit_of: Sequence[int], downsets: tuple[int, ...] | None
) -> Space:
    """Express what ops touch by units; equal touches become one."""
    units = np.array(unit_of, dtype=np.int64)

    def by_unit(touch: Touch) -> Touch:
        producer = int(units[touch.producer]) if touch.producer >= 0 else -1
        reading = {int(units[u]) for u in touch.readers} - {producer}
        return Touch(
            tuple(sorted({int(units[u]) for u in touch.savers})),
            producer if reading else -1,
            tuple(sorted(reading)),
            touch.keeps_sent,
        )

    storages, storage_group = _grouped([touch for _, touch in model.storages], by_unit)
    blocks = model.blocks.storages if model.blocks else ()
    recomputed, recomputed_group = _grouped([touch for _, touch in blocks], by_unit)
    gradients = [Touch((int(op),)) for op in model.parameterized]
    deferred, deferred_group = _grouped([*(touch for _, touch in model.deferred), *gradients], by_unit)
    states, state_group = _grouped([touch for _, touch in model.states], by_unit)
    leaving = [
        (op, Crossing(unit, tuple(sorted({int(units[v]) for v in readers} - {unit}))))
        for op, (unit, readers) in enumerate(zip(units.tolist(), model.readers, strict=True))
        if any(units[v] != unit for v in readers)
    ]
    crossings, crossing_group = _grouped([crossing for _, crossing in leaving], lambda crossing: crossing)
    structure = LayerStructure(
        units=int(units.max()) + 1,
        edges=tuple(sorted({(c.producer, v) for c in crossings for v in c.readers})),
        storages=storages,
        states=states,
        crossings=crossings,
        deferred=deferred,
        downsets=downsets,
        recomputed=recomputed,
    )
    crossing_ops = np.array([op for op, _ in leaving], dtype=np.int64)
    return Space(
        name,
        units,
        structure,
        Geometry(structure),
        storage_group,
        recomputed_group,
        deferred_group,
        state_group,
        crossing_ops,
        crossing_group,
        model.differentiable[crossing_ops],
    )


def _grouped(items: Sequence[T], key: Callable[[T], G]) -> tuple[tuple[G, ...], IntArray]:
    """Distinct keys, and the index of each item's key."""
    found: dict[G, int] = {}
    group = np.array([found.setdefault(key(item), len(found)) for item in items], dtype=np.int64)
    return tuple(found), group


def spaces(model: LayerModel, work: FloatArray, pins: Mapping[int, int], size: int) -> list[Space]:
    """The spaces to search: intervals of the program's order; and all downsets of a coarser DAG where it
    branches.

    ``work``: seconds per op; ``size``: the micro-batch size that crossing bytes are compared at.
    """
    crossing = model.output_bytes(size) * (1.0 + model.differentiable)
    ops = OpArrays(model.readers, work, crossing, model.together, pins)
    unit_of = intervals(ops, TUNING.most_intervals)
    count = max(unit_of) + 1
    found = [make_space(model, f"contiguous splits at {count - 1} cuts of the program order", unit_of, None)]
    for most in TUNING.cluster_sizes:
        unit_of = clusters(ops, most)
        units = max(unit_of) + 1
        edges = {
            (unit_of[u], unit_of[v])
            for u, rs in enumerate(ops.readers)
            for v in rs
            if unit_of[u] != unit_of[v]
        }
        downsets = list_downsets(units, edges, TUNING.most_downsets)
        if downsets is None:
            continue
        if len(downsets) > units + 1:
            found.append(
                make_space(model, f"all {len(downsets)} downsets of {units} clusters", unit_of, downsets)
            )
        break
    return found
