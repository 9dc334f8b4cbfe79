"""Costs of every op of a graph: arithmetic, memory traffic, seconds, and what autograd keeps on its account.

    OpGraph ─► signatures (equal ops) ─► profiles at a few sizes ─► polynomials of the batch size ─► arrays over ops

Words
    storage      memory behind one or more tensors; a view shares its base's. Named by the op that makes it:
                 ``relu_3``, ``split_1.2`` (third output), ``layer_norm~0`` (kept by autograd, not an output)
    saved        the storages that autograd keeps from an op's forward until its backward. Parameters, buffers,
                 constants and batch inputs are there anyway and are not counted
    input half   the part of backward that computes gradients of activations
    weight half  the part that computes gradients of parameters, and adds them to what micro-batches before left

Everything but seconds is independent of the device, except that what dropout and attention keep depends on its kind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cost_models.arrays import FloatArray
from cost_models.cluster import ClusterSpec
from cost_models.compute import (
    ComputeDevice,
    OpClass,
    OpSeconds,
    PhaseSeconds,
    additive_seconds,
    segment_seconds,
)
from cost_models.op_profile import MATH_ATTENTION, kind_of
from passes.costs.extra_work import extra_work
from passes.costs.profiled_once import profile_once
from passes.costs.saved import OpProfile
from passes.costs.seconds import OpRates, OpTable
from passes.costs.size_model import (
    BACKWARD_PEAK_BYTES,
    OUTPUT_BYTES,
    WORK_FIELDS,
    SizeModel,
    at_one_sample,
    at_one_size,
    fit,
)
from passes.costs.storages import StorageTable, name_storages
from passes.graph.graph import OpGraph, once_per_graph
from passes.graph.signatures import Signature, SignatureTable, group_by_signature


@dataclass(frozen=True)
class SegmentSeconds:
    """One segment's time per micro-batch."""

    forward: float
    backward_input: float
    backward_weight: float


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that a segment holds from its forward to its backward, per micro-batch.

    ``saved``: storages saved by autograd, sent outputs and received values, as one union. ``weight_saved``: bytes
    that a deferred weight half still needs, the output gradients included.
    """

    saved: int
    weight_saved: int


@dataclass(frozen=True, eq=False)
class GraphCosts:
    """The costs of an ``OpGraph``; every tuple and array follows ``graph.ops``."""

    ops: tuple[str, ...]
    saved: tuple[tuple[str, ...], ...]
    """Storages that autograd keeps on the op's account; several ops may name one storage."""
    output_storages: tuple[tuple[str | None, ...], ...]
    """Storage of each output; None for one that belongs to a parameter, buffer, constant or batch input."""
    attention_backend: str | None
    """The attention that the costs assume ("flash", or "flash+math" for a mixture); None without attention."""
    estimated: tuple[str, ...]
    """Ops that could not be run alone; their costs come from shapes."""
    uncounted: tuple[tuple[str, ...], ...]
    """Per op: its kernels whose arithmetic nobody counts, so that its time is that of its memory traffic."""
    rates: OpRates = field(repr=False)
    """The rates at which the ops' work is done."""
    _model: SizeModel = field(repr=False)
    _storages: StorageTable = field(repr=False)
    _one_sample: GraphCosts | None = field(repr=False)
    """The same for micro-batches of one sample; None if this is it."""
    _tables: dict[int, OpTable] = field(default_factory=dict, repr=False)
    _phases: dict[object, tuple[PhaseSeconds, ...]] = field(default_factory=dict, repr=False)

    def exact(self, batch_size: int) -> GraphCosts:
        """Choose the costs whose ``saved`` and ``output_storages`` hold for this size: of 1 sample, copies may be views."""
        return self._one_sample if batch_size == 1 and self._one_sample is not None else self

    def at(self, batch_size: int) -> OpTable:
        """Work of every op for micro-batches of ``batch_size`` samples."""
        if self.exact(batch_size) is not self:
            return self.exact(batch_size).at(batch_size)
        if batch_size not in self._tables:
            numbers = self._model.at(batch_size)
            first = np.array(self._model.first_row[:-1], dtype=np.intp)[self.rates.signature_of]
            columns = {name: numbers[first + column] for column, name in enumerate(WORK_FIELDS)}
            columns["output_bytes"] = numbers[first + OUTPUT_BYTES]
            columns["backward_peak_bytes"] = numbers[first + BACKWARD_PEAK_BYTES]
            self.rates.extra.add_to(columns)
            self._tables[batch_size] = OpTable(**columns)
        return self._tables[batch_size]

    def phases(self, batch_size: int, device: ComputeDevice) -> tuple[PhaseSeconds, ...]:
        """Compute kernel and launch seconds per op: forward, input half, weight half."""
        key = (batch_size, self.rates.speed(device))
        if key not in self._phases:
            self._phases[key] = self.rates.phases(self.at(batch_size), device)
        return self._phases[key]

    def seconds(self, batch_size: int, device: ComputeDevice) -> OpSeconds:
        """Compute seconds of every op, in a form that adds up over ops (``cost_models.compute.additive_seconds``)."""
        return OpSeconds(*(additive_seconds(phase, device) for phase in self.phases(batch_size, device)))

    def least_work_seconds(self, batch_size: int, devices: Iterable[ComputeDevice]) -> float:
        """Return the compute seconds of all ops of a step, of the whole batch at once, on the fastest of the devices."""
        each = [self.seconds(batch_size, device) for device in devices]
        return min(float((s.forward + s.backward_input + s.backward_weight).sum()) for s in each)

    def segment_seconds(
        self, op_indices: Sequence[int] | np.ndarray, batch_size: int, device: ComputeDevice
    ) -> SegmentSeconds:
        """Compute seconds of a segment made of these ops: on a GPU launching and running overlap."""
        chosen = np.asarray(op_indices, dtype=np.intp)
        phases = self.phases(batch_size, device)
        return SegmentSeconds(*(segment_seconds(phase, device, chosen) for phase in phases))

    def weight_gradient_seconds(
        self, op_indices: Sequence[int], batch_size: int, device: ComputeDevice
    ) -> float:
        """Compute seconds in which these ops' gradients of parameters are made, not yet added to what others left."""
        ops = np.asarray(op_indices, dtype=np.intp)
        phase = self.rates.rows(ops).weight_gradient_seconds(self.at(batch_size).rows(ops), device)
        return segment_seconds(phase, device)

    def storage_bytes(self, batch_size: int) -> Mapping[str, int]:
        """Return the size of every storage that an op makes, for the names in this object's ``saved`` (see ``exact``)."""
        return self._storages.sizes(self._model.at(batch_size), batch_size)

    @property
    def multiplies(self) -> tuple[bool, ...]:
        """Per op: whether it is a product, which keeps nothing of its result."""
        return self._storages.multiplies

    @property
    def weight_half(self) -> tuple[bool, ...]:
        """Per op: whether the executor can put off gradients of its parameters; weight halves need what it saved."""
        return self._storages.weight_half

    def saved_operands(self, op_index: int) -> frozenset[int]:
        """Return the op's tensor operands (by position) that autograd keeps for it, parameters too."""
        saved = self._model.structures[int(self.rates.signature_of[op_index])].saved
        return frozenset(which for place, which in saved if place == "operand")

    def op_class(self, op_index: int) -> OpClass:
        """Return the class of the op's arithmetic: the peak rate that bounds it."""
        return self.rates.bounds[int(self.rates.signature_of[op_index])][1]

    def saved_bytes(self, op_indices: Iterable[int], batch_size: int) -> int:
        """Count the bytes that autograd keeps for these ops: the union of their storages."""
        if self.exact(batch_size) is not self:
            return self.exact(batch_size).saved_bytes(op_indices, batch_size)
        sizes = self.storage_bytes(batch_size)
        return sum(sizes[name] for name in self._union(op_indices))

    @property
    def reads(self) -> tuple[tuple[tuple[int, str | None], ...], ...]:
        """Per op: (index of the op that made it, its storage) of each op result that it reads."""
        return self._storages.reads

    @property
    def maker(self) -> Mapping[str, int]:
        """Index of the op that makes each storage."""
        return self._storages.maker

    def held_bytes(
        self,
        op_indices: Iterable[int],
        batch_size: int,
        outputs: Iterable[str] = (),
        regions: Iterable[Sequence[int]] = (),
    ) -> HeldBytes:
        """Count what a segment of these ops holds; ``outputs`` names the ops whose results it sends or returns.

        A received value is a buffer of its own, as large as the value, whatever its storage was where it was made.
        ``regions``: ops that are computed again in backward; of each, only what it reads from outside is held.
        """
        if self.exact(batch_size) is not self:
            return self.exact(batch_size).held_bytes(op_indices, batch_size, outputs, regions)
        chosen = [int(index) for index in op_indices]
        sizes = dict(self.storage_bytes(batch_size))
        output_bytes = self.at(batch_size).output_bytes
        received = self._received(chosen, output_bytes)
        sizes.update(received)
        sent = [self._storages.index_of[name] for name in outputs]
        again = [set(region) for region in regions]
        held = self._union(set(chosen).difference(*again)) | set(received)
        held |= {name for region in again for name in self.inputs_of(region)}
        held |= {name for index in sent for name in self.output_storages[index] if name}
        parameterized = [index for index in chosen if self._storages.weight_half[index]]
        deferred = sum(sizes[name] for name in self._union(parameterized)) + output_bytes[parameterized].sum()
        return HeldBytes(sum(sizes[name] for name in held), int(deferred))

    def inputs_of(self, region: Collection[int]) -> set[str]:
        """Name the storages that these ops read and others make."""
        reads = (read for index in region for read in self._storages.reads[index])
        return {storage for producer, storage in reads if storage is not None and producer not in region}

    def _received(self, chosen: Sequence[int], output_bytes: FloatArray) -> dict[str, int]:
        """Count bytes of the buffers for values that ``chosen`` ops read from others, by storage."""
        inside = set(chosen)
        received: dict[str, int] = {}
        arrived: set[int] = set()
        for producer, storage in (read for index in chosen for read in self._storages.reads[index]):
            if producer in inside or producer in arrived:
                continue
            arrived.add(producer)
            name = storage or f"{self.ops[producer]}:received"  # a view of a batch input is a buffer here
            if self._storages.maker.get(name) not in inside:
                received[name] = received.get(name, 0) + int(output_bytes[producer])
        return received

    def _union(self, op_indices: Iterable[int]) -> set[str]:
        return {name for index in op_indices for name in self.saved[index]}


def cost_graph(
    graph: OpGraph,
    *,
    attention: str | None = None,
    device_kind: str = "cpu",
    only_size: int | None = None,
) -> GraphCosts:
    """Cost every op of ``graph`` for any batch size, or for ``only_size`` samples in a fifth of the time.

    ``attention``: the backend to assume where it applies (``cost_models.attention.BACKENDS``); None for what devices of
    ``device_kind`` ("cuda" or "cpu") choose themselves.
    """
    table = group_by_signature(graph)

    def profiler(signature: int, batch_size: int) -> OpProfile:
        sizes = {**graph.example_sizes, graph.batch.batch_symbol: batch_size}
        return profile_once(table.signatures[signature], sizes, attention=attention, device_kind=device_kind)

    if only_size is not None:
        return _assemble(graph, table, at_one_size(len(table.signatures), profiler, only_size), None)
    model = fit(len(table.signatures), profiler)
    return _assemble(graph, table, model, _assemble(graph, table, at_one_sample(model), None))


def costs_of(graph: OpGraph, cluster: ClusterSpec) -> GraphCosts:
    """Return the graph's costs on devices of the cluster's kind; computed once per graph."""
    return _costs_on(graph, cluster.devices[0].counted_as)


@once_per_graph
def _costs_on(graph: OpGraph, device_kind: str) -> GraphCosts:
    return cost_graph(graph, device_kind=device_kind)


def _assemble(
    graph: OpGraph, table: SignatureTable, model: SizeModel, one_sample: GraphCosts | None
) -> GraphCosts:
    structures = [model.structures[index] for index in table.of]
    storages = name_storages(graph, table, model)
    backends = sorted({s.attention_backend for s in structures if s.attention_backend})
    return GraphCosts(
        ops=tuple(node.name for node in graph.ops),
        saved=storages.saved,
        output_storages=storages.outputs,
        attention_backend="+".join(backends) or None,
        estimated=tuple(n.name for n, s in zip(graph.ops, structures, strict=True) if s.estimated),
        uncounted=tuple(structure.uncounted for structure in structures),
        _model=model,
        _storages=storages,
        rates=OpRates(
            signature_of=np.array(table.of, dtype=np.intp),
            bounds=tuple(
                (_dtype(signature), structure.op_class)
                for signature, structure in zip(table.signatures, model.structures, strict=True)
            ),
            shares=np.array([structure.share for structure in model.structures], dtype=np.float64),
            kinds=tuple(
                MATH_ATTENTION if structure.attention_backend == "math" else kind_of(signature.target)
                for signature, structure in zip(table.signatures, model.structures, strict=True)
            ),
            extra=extra_work(graph, table, storages),
        ),
        _one_sample=one_sample,
    )


def _dtype(signature: Signature) -> torch.dtype:
    """Return the type the op computes in: its first floating-point output's."""
    return next((s.dtype for s in signature.outputs if s.dtype.is_floating_point), torch.float32)
