"""A graph and its costs as arrays over ops: everything that searches over whole ops read of an ``OpGraph``.

    OpGraph, GraphCosts ─► LayerModel (ops as arrays)

Recomputed ops (masks, rotary tables) are not in it: every stage runs its own copies, and they never cross.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from cost_models.devices import Device
from cost_models.memory import state_bytes
from passes.costs.backward_peak import backward_work
from passes.costs.costs import GraphCosts
from passes.graph.blocks import block_of
from passes.graph.graph import OpGraph
from passes.graph.leaves import leaf_bytes, leaf_readers
from passes.graph.recomputed import recomputed_ops
from passes.graph.state import colocated, state_readers
from passes.lower.job import Job
from passes.search.blocks import Blocks, storage_sizes, touches
from passes.search.bound import PhaseTimes
from passes.search.touches import BoolArray, Touch


@dataclass(frozen=True, eq=False)
class LayerModel:
    """The placed ops of a graph, 0 … n-1 in the order of the model's own code, and what they touch."""

    graph: OpGraph
    costs: GraphCosts
    names: tuple[str, ...]
    rows: IntArray
    """[n] positions in ``costs.ops``."""
    readers: tuple[tuple[int, ...], ...]
    differentiable: BoolArray
    storages: tuple[tuple[str, Touch], ...]
    """Storage keys of ``costs``, with the ops that make a stage hold them."""
    deferred: tuple[tuple[str, Touch], ...]
    """Storages that are there until weight halves have run: with the ops whose weight halves need them, and those that read
    them where they are received."""
    parameterized: IntArray
    """Ops with a weight half; each also needs the gradient of its output."""
    states: tuple[tuple[float, Touch], ...]
    """Bytes of each parameter (gradient and optimizer state included) or buffer, with the ops that use it."""
    together: tuple[tuple[int, ...], ...]
    loss: int | None
    blocks: Blocks
    """Blocks that recompute works on."""

    def output_bytes(self, size: int) -> FloatArray:
        """[n] bytes of each op's result, were it sent, for micro-batches of ``size`` samples."""
        return np.asarray(self.costs.at(size).output_bytes, dtype=np.float64)[self.rows]

    def seconds(self, size: int, device: Device) -> FloatArray:
        """[n] forward + backward seconds per micro-batch."""
        s = self.costs.seconds(size, device)
        return np.asarray(s.forward + s.backward_input + s.backward_weight)[self.rows]

    def again_seconds(self, size: int, device: Device) -> FloatArray:
        """[n] seconds of each op's second forward, where its block is computed again."""
        return np.asarray(self.costs.seconds(size, device).forward)[self.rows] * self.blocks.again

    def smallest_times(self, batch_size: int, microbatches: int, devices: Sequence[Device]) -> PhaseTimes:
        """Seconds by phase of the smallest micro-batch, for the bound on simulated time.

        As the simulation has them: the largest one's, in proportion to samples.
        """
        share = smallest_share(batch_size, microbatches)
        each = [self.costs.seconds(-(-batch_size // microbatches), device) for device in devices]
        return PhaseTimes(
            self.readers,
            share * np.stack([np.asarray(s.forward)[self.rows] for s in each]),
            share * np.stack([np.asarray(s.backward_input)[self.rows] for s in each]),
            share * np.stack([np.asarray(s.backward_weight)[self.rows] for s in each]),
            self.differentiable,
            self.loss,
        )

    def working_bytes(self, size: int) -> tuple[FloatArray, FloatArray]:
        """[n] bytes of each op's backward: beside saved storages, and of those that it frees (``BackwardWork``)."""
        work = backward_work(self.graph, self.costs, size)
        return work.beside_bytes[self.rows], work.freed_bytes[self.rows]

    def storage_sizes(self, size: int) -> FloatArray:
        """[storages] bytes per micro-batch of ``size`` samples."""
        return storage_sizes(self.costs, self.storages, size)

    def deferred_sizes(self, size: int) -> FloatArray:
        """[deferred + parameterized] bytes there until weight halves have run, per micro-batch of ``size`` samples."""
        saved = storage_sizes(self.costs, self.deferred, size)
        return np.concatenate([saved, self.output_bytes(size)[self.parameterized]])

    @cached_property
    def state_sizes(self) -> FloatArray:
        """[states]"""
        return np.array([size for size, _ in self.states], dtype=np.float64)


def read_model(graph: OpGraph, costs: GraphCosts, job: Job) -> LayerModel:
    """Collect the arrays. Costs and graph must list the same ops in the same order."""
    skipped = recomputed_ops(graph)
    position = {name: row for row, name in enumerate(costs.ops)}
    placed = [node for node in graph.ops if node.name not in skipped]
    index = {node.name: i for i, node in enumerate(placed)}
    readers = tuple(tuple(sorted(index[u.name] for u in node.users if u.name in index)) for node in placed)
    rows = np.array([position[node.name] for node in placed], dtype=np.int64)
    needed = (costs.saved[row] if costs.weight_half[row] else () for row in rows)
    return LayerModel(
        graph=graph,
        costs=costs,
        names=tuple(node.name for node in placed),
        rows=rows,
        readers=readers,
        differentiable=np.array([node.name in graph.needs_grad for node in placed], dtype=bool),
        storages=touches(costs, rows.tolist(), readers, (costs.saved[row] for row in rows)),
        deferred=touches(costs, rows.tolist(), readers, needed, keeps_sent=False),
        parameterized=np.array([u for u, row in enumerate(rows) if costs.weight_half[row]], dtype=np.int64),
        states=_states(graph, index, job),
        together=tuple(
            tuple(sorted(index[name] for name in group if name in index))
            for group in colocated(graph)
            if any(name in index for name in group)
        ),
        loss=index.get(graph.loss or ""),
        blocks=_blocks(graph, costs, [node.name for node in placed], rows, readers),
    )


def _blocks(
    graph: OpGraph,
    costs: GraphCosts,
    names: Sequence[str],
    rows: IntArray,
    readers: tuple[tuple[int, ...], ...],
) -> Blocks:
    found = block_of(graph)
    index = {block: i for i, block in enumerate(dict.fromkeys(found.values()))}
    of = np.array([index.get(found.get(name, ""), -1) for name in names], dtype=np.int64)
    return Blocks(costs, tuple(index), of, rows, readers)


def _states(graph: OpGraph, index: Mapping[str, int], job: Job) -> tuple[tuple[float, Touch], ...]:
    """List parameters, buffers and batch leaves: bytes on each device that reads them, and their readers."""
    states = []
    for name, ops in state_readers(graph, index).items():
        spec = graph.parameters.get(name) or graph.buffers[name]
        count = spec.elements, graph.types_of(name, job.precision), name in graph.trained
        states.append((float(state_bytes([count], job.optimizer).total), Touch(tuple(sorted(ops)))))
    sizes = leaf_bytes(graph, job.batch_size)
    leaves = leaf_readers(graph, index).items()
    states += [(float(sizes[name]), Touch(tuple(sorted(ops)))) for name, ops in leaves if name in sizes]
    return tuple(states)


def read_state_bytes(graph: OpGraph, job: Job) -> int:
    """Count parameters that ops read, their gradients and optimizer state: of tied ones once."""
    read = {given.name for given in graph.inputs if graph.nodes[given.node].users}
    counts = [
        (spec.elements, graph.types_of(name, job.precision), name in graph.trained)
        for name, spec in graph.parameters.items()
        if name in read
    ]
    return state_bytes(counts, job.optimizer).total


def smallest_share(batch_size: int, microbatches: int) -> float:
    """Samples of the smallest micro-batch over those of the largest; 1 where they are equal."""
    return (batch_size // microbatches) / -(-batch_size // microbatches)
