"""A traced model as free placement problems: ops become units, what they send becomes nets.

    ops ─► exact units  (what must share a device)                           bounds are proved over these
        ─► tasks        (ops that always run one after another, merged: a DAG) ─► units of the search

Units hold together: projections with their tuple, users of a buffer that is written, ops that read one parameter by
repeated calls of one module (an unrolled cell: its weights lie in one place) unless pins part them. A tie across
modules (an embedding and the head that reads it) may lie apart: copies and the sum of their gradients are charged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from cost_models.cluster import ClusterSpec
from cost_models.compute import optimizer_seconds
from cost_models.errors import InternalError
from cost_models.memory import StateBytes, state_bytes
from passes.costs.costs import GraphCosts
from passes.graph.contraction import OpArrays, clusters
from passes.graph.graph import OpGraph
from passes.graph.leaves import leaf_bytes, leaf_readers
from passes.graph.state import owning_groups, state_readers
from passes.lower.job import Job
from passes.search.anywhere.problem import Home, Net, PlacementProblem
from passes.search.free.makespan import TaskGraph
from passes.search.model import LayerModel, read_model

MOST_TASKS = 5000
"""Tasks that ops are merged into, roughly: a makespan of 5,000 is played in a fifth of a second."""


@dataclass(frozen=True)
class TouchedState:
    """A parameter, buffer or batch leaf. ``gradient_bytes``: those that devices sum; 0 if it is not trained."""

    name: str
    held: StateBytes
    gradient_bytes: int
    ops: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class FreeModel:
    """Placed ops 0 … n-1 of a graph in the program's order. Shapes [n] unless said otherwise."""

    layers: LayerModel
    cluster: ClusterSpec
    optimizer: str
    states: tuple[TouchedState, ...]
    pins: Mapping[int, int]
    """Rank of each pinned op."""
    together: tuple[tuple[int, ...], ...]
    """Ops that must share a segment, with all between them."""
    exact_unit_of: IntArray
    task_of: IntArray
    """[n] task of each op, numbered in a topological order"""
    unit_of_task: IntArray
    module_of_unit: tuple[str, ...]
    """Module path of each unit of the search: that of its heaviest op."""
    work: FloatArray
    """[n] seconds that tasks were balanced by"""
    _cache: dict[object, FloatArray] = field(default_factory=dict)
    _nets_of: dict[bytes, tuple[dict[Net, int], IntArray, IntArray]] = field(default_factory=dict)

    @property
    def unit_of(self) -> IntArray:
        """Return [n] the search's unit of each op."""
        return np.asarray(self.unit_of_task[self.task_of])

    def ranks(self, home: Sequence[int]) -> dict[str, int]:
        """Return the rank of each placed op, given the device of each unit of the search."""
        where = np.asarray(home, dtype=np.int64)[self.unit_of].tolist()
        return dict(zip(self.layers.names, where, strict=True))

    def home_of(self, rank_of: Mapping[str, int], problem: PlacementProblem) -> Home:
        """Return for each unit the allowed device that has most of its work in ``rank_of``."""
        ranks = np.array([rank_of.get(name, 0) for name in self.layers.names], dtype=np.int64)
        votes = np.zeros((problem.devices, problem.units))
        np.add.at(votes, (ranks, self.unit_of), np.maximum(self.work, 1e-300))
        votes[~problem.allowed] = -1.0
        return tuple(votes.argmax(axis=0).tolist())

    def seconds(self, size: int) -> FloatArray:
        """Return [3, K, n] seconds of forward, input half and weight half of a micro-batch of ``size`` samples."""
        key = ("seconds", size)
        if key not in self._cache:
            rows, passes = self.layers.rows, self.layers.differentiable
            each = [self.layers.costs.seconds(size, device) for device in self.cluster.devices]
            self._cache[key] = np.stack(
                [
                    np.stack([np.asarray(s.forward)[rows] for s in each]),
                    np.stack([np.where(passes, np.asarray(s.backward_input)[rows], 0.0) for s in each]),
                    np.stack([np.where(passes, np.asarray(s.backward_weight)[rows], 0.0) for s in each]),
                ]
            )
        return self._cache[key]

    def problem(self, unit_of: IntArray, batch_size: int, microbatches: int) -> PlacementProblem:
        """Make the problem over the units ``unit_of`` [n], with one micro-batch at a time in memory."""
        size = -(-batch_size // microbatches)
        count = int(unit_of.max()) + 1
        seconds = microbatches * _over_units(self.seconds(size).sum(axis=0), unit_of, count)
        out = self.layers.output_bytes(size)
        nets, net_of, ops = self._nets(unit_of)
        carries = 1.0 + self.layers.differentiable[ops].astype(np.float64)
        unit_bytes = self._saved_bytes(unit_of, count, size)
        ties = self._add_states(unit_of, seconds, unit_bytes)
        latency, per_byte = self.links
        return PlacementProblem(
            seconds=seconds,
            unit_bytes=unit_bytes,
            nets=tuple(nets),
            messages=microbatches * _sums(net_of, carries, len(nets)),
            net_bytes=microbatches * _sums(net_of, out[ops] * carries, len(nets)),
            received_bytes=_sums(net_of, out[ops], len(nets)),
            ties=tuple(units for units, _, _ in ties),
            tie_bytes=np.array([float(state.held.total) for _, state, _ in ties]),
            tie_seconds=np.array([row for _, _, row in ties]).reshape(len(ties), len(seconds)).T,
            sum_bytes=np.array([float(state.gradient_bytes) for _, state, _ in ties]),
            latency=latency,
            seconds_per_byte=per_byte,
            capacity_bytes=np.array([float(d.room_bytes - d.context_bytes) for d in self.cluster.devices]),
            allowed=self._allowed(unit_of, count),
        )

    def tasks(self, batch_size: int, microbatches: int) -> TaskGraph:
        """Make the tasks of one micro-batch, for makespans."""
        size = -(-batch_size // microbatches)
        count = len(self.unit_of_task)
        forward, backward, weight = self.seconds(size)
        task_of = self.task_of.tolist()
        readers: list[set[int]] = [set() for _ in range(count)]
        leaving = np.zeros(len(task_of), dtype=bool)
        for op, reading in enumerate(self.layers.readers):
            away = {task_of[v] for v in reading} - {task_of[op]}
            readers[task_of[op]] |= away
            leaving[op] = bool(away)
        out = self.layers.output_bytes(size) * leaving
        passes = np.zeros(count, dtype=bool)
        np.logical_or.at(passes, self.task_of, self.layers.differentiable)
        latency, per_byte = self.links
        return TaskGraph(
            readers=tuple(tuple(sorted(each)) for each in readers),
            forward=_over_units(forward, self.task_of, count),
            backward=_over_units(backward, self.task_of, count),
            weight=_over_units(weight, self.task_of, count),
            sent_bytes=_sums(self.task_of, out, count),
            gradient_bytes=_sums(self.task_of, out * self.layers.differentiable, count),
            passes_gradient=passes,
            latency=latency,
            seconds_per_byte=per_byte,
        )

    @property
    def links(self) -> tuple[FloatArray, FloatArray]:
        """Return [K, K] latency and [K, K] seconds per byte, the slower direction of each pair."""
        devices = len(self.cluster.devices)
        latency, per_byte = np.zeros((devices, devices)), np.zeros((devices, devices))
        for a in range(devices):
            for b in range(devices):
                if a != b:
                    path = self.cluster.path(a, b)
                    latency[a, b] = path.latency_seconds
                    per_byte[a, b] = 1.0 / path.bandwidth_bytes_per_second
        return np.maximum(latency, latency.T), np.maximum(per_byte, per_byte.T)

    def _nets(self, unit_of: IntArray) -> tuple[dict[Net, int], IntArray, IntArray]:
        """Return (nets, net of each op whose results leave its unit, those ops)."""
        key = unit_of.tobytes()
        if key in self._nets_of:
            return self._nets_of[key]
        nets: dict[Net, int] = {}
        net_of, ops = [], []
        of = unit_of.tolist()
        for op, reading in enumerate(self.layers.readers):
            away = {of[v] for v in reading} - {of[op]}
            if away:
                net = Net(of[op], tuple(sorted(away)))
                net_of.append(nets.setdefault(net, len(nets)))
                ops.append(op)
        found = nets, np.array(net_of, dtype=np.int64), np.array(ops, dtype=np.int64)
        self._nets_of[key] = found
        return found

    def _saved_bytes(self, unit_of: IntArray, count: int, size: int) -> FloatArray:
        """Return [units] bytes of one micro-batch: each storage that autograd keeps, at the unit that saves it first."""
        sizes = self.layers.storage_sizes(size)
        saved = [
            (int(unit_of[touch.savers[0]]), number)
            for (_, touch), number in zip(self.layers.storages, sizes.tolist(), strict=True)
            if touch.savers
        ]
        units = np.array([unit for unit, _ in saved], dtype=np.int64)
        return _sums(units, np.array([number for _, number in saved]), count)

    def _add_states(
        self, unit_of: IntArray, seconds: FloatArray, unit_bytes: FloatArray
    ) -> list[tuple[tuple[int, ...], TouchedState, list[float]]]:
        """Add the state that one unit owns to it; return the ties, with optimizer seconds per device."""
        ties = []
        for state in self.states:
            units = sorted({int(unit_of[op]) for op in state.ops})
            row = [
                optimizer_seconds(state.held, device, self.optimizer, int(state.gradient_bytes > 0))
                for device in self.cluster.devices
            ]
            if len(units) > 1:
                ties.append((tuple(units), state, row))
                continue
            unit_bytes[units[0]] += state.held.total
            seconds[:, units[0]] += row
        return ties

    def _allowed(self, unit_of: IntArray, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """Return [K, units] True where pins let a unit be."""
        allowed = np.ones((len(self.cluster.devices), count), dtype=bool)
        for op, rank in self.pins.items():
            allowed[:, unit_of[op]] = False
            allowed[rank, unit_of[op]] = True
        return allowed


def read_free_model(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    recomputed: frozenset[str],
    job: Job,
    pins: Mapping[int, int],
    work_size: int,
) -> FreeModel:
    """Collect the arrays of a graph. ``work_size``: samples of the micro-batch at which tasks are balanced."""
    layers = read_model(graph, costs, job)
    if recomputed.intersection(layers.names) or len(recomputed) + len(layers.names) != len(graph.ops):
        raise InternalError("free search: the ops without a rank are not those of passes.graph.recomputed")
    states = _states(graph, layers, job)
    together = owning_groups(graph, recomputed)
    alike = [*together, *repeated_calls(graph, layers, states)]
    states += _leaves(graph, layers, job)
    exact = _numbered(len(layers.names), alike, pins)
    work = layers.seconds(work_size, cluster.devices[0])
    crossing = layers.output_bytes(work_size) * (1.0 + layers.differentiable)
    tasks = np.array(
        clusters(OpArrays(layers.readers, work, crossing, together, pins), MOST_TASKS), dtype=np.int64
    )
    count = int(tasks.max()) + 1
    pinned = {int(tasks[op]): rank for op, rank in pins.items()}
    unit_of_task = _numbered(count, [sorted({int(tasks[op]) for op in group}) for group in alike], pinned)
    heaviest: dict[int, int] = {}
    for op, unit in enumerate(unit_of_task[tasks].tolist()):
        if unit not in heaviest or work[op] > work[heaviest[unit]]:
            heaviest[unit] = op
    paths = [str(graph.nodes[name].meta.get("module_path", "")) for name in layers.names]
    modules = tuple(paths[heaviest[unit]] for unit in range(int(unit_of_task.max()) + 1))
    return FreeModel(
        layers,
        cluster,
        job.optimizer,
        states,
        dict(pins),
        together,
        exact,
        tasks,
        unit_of_task,
        modules,
        work,
    )


def repeated_calls(
    graph: OpGraph, layers: LayerModel, states: Sequence[TouchedState]
) -> list[tuple[int, ...]]:
    """Return groups of ops of one module that read the same parameter: several calls of the module."""
    groups = []
    for state in states:
        by_path: dict[str, list[int]] = defaultdict(list)
        for op in state.ops:
            by_path[str(graph.nodes[layers.names[op]].meta.get("module_path", ""))].append(op)
        for ops in by_path.values():
            if len(ops) > 1:
                groups.append(tuple(ops))
    return groups


def _states(graph: OpGraph, layers: LayerModel, job: Job) -> tuple[TouchedState, ...]:
    index = {name: op for op, name in enumerate(layers.names)}
    found = []
    for name, ops in state_readers(graph, index).items():
        spec = graph.parameters.get(name) or graph.buffers[name]
        types = graph.types_of(name, job.precision)
        held = state_bytes([(spec.elements, types, name in graph.trained)], job.optimizer)
        gradient_bytes = spec.elements * types.gradient.itemsize if name in graph.trained else 0
        found.append(TouchedState(name, held, gradient_bytes, tuple(sorted(ops))))
    return tuple(found)


def _leaves(graph: OpGraph, layers: LayerModel, job: Job) -> tuple[TouchedState, ...]:
    """List the batch leaves: every device that reads one holds the whole step's."""
    sizes = leaf_bytes(graph, job.batch_size)
    readers = leaf_readers(graph, {name: op for op, name in enumerate(layers.names)})
    return tuple(
        TouchedState(name, StateBytes(batch=sizes[name]), 0, tuple(sorted(ops)))
        for name, ops in readers.items()
        if name in sizes
    )


def _numbered(count: int, groups: Sequence[Sequence[int]], pins: Mapping[int, int]) -> IntArray:
    """Return [count] the number of each item's group, after uniting groups that share a member, by first members.

    Items that are pinned to different ranks, directly or through their groups, stay apart.
    """
    parent, pin_of = list(range(count)), dict(pins)

    def find(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for first, *rest in groups:
        for other in rest:
            a, b = sorted((find(first), find(other)))
            if a != b and pin_of.get(a, pin_of.get(b)) == pin_of.get(b, pin_of.get(a)):
                parent[b] = a
                if b in pin_of:
                    pin_of[a] = pin_of[b]
    number: dict[int, int] = {}
    return np.array([number.setdefault(find(item), len(number)) for item in range(count)], dtype=np.int64)


def _over_units(per_op: FloatArray, unit_of: IntArray, count: int) -> FloatArray:
    """Sum [K, n] over the ops of each unit: [K, units]."""
    return np.stack([_sums(unit_of, row, count) for row in per_op])


def _sums(group: IntArray, weights: FloatArray, count: int) -> FloatArray:
    """Return [count] the sum of the weights of each group."""
    return np.bincount(group, weights=weights, minlength=count).astype(np.float64)
