"""Seconds of ops: their work at the rates of a device.

    OpTable   how much    FLOPs, bytes and launches of each op and phase       at one micro-batch size
    OpRates   how fast    which rate bounds each op, what it is charged as     at any size, on any device
    phases    ─►          kernel and launch seconds of each op and phase

Rows follow ``GraphCosts.ops``; ``rows(ops)`` takes those of some ops, each as often as it is named, so that the same op
can be priced with several shares of its work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from cost_models.arrays import FloatArray
from cost_models.compute import (
    ComputeDevice,
    IndexArray,
    OpClass,
    PhaseSeconds,
    class_peak_flops,
    kernel_seconds,
)
from cost_models.op_profile import PHASES, OpTimes, Phase, op_phase_seconds
from passes.costs.extra_work import Extra


@dataclass(frozen=True)
class OpTable:
    """The work of ops for one micro-batch size: arrays of shape [rows]."""

    forward_flops: FloatArray
    backward_input_flops: FloatArray
    backward_weight_flops: FloatArray
    forward_bytes: FloatArray
    """Bytes read and written."""
    backward_input_bytes: FloatArray
    backward_weight_bytes: FloatArray
    forward_launches: FloatArray
    backward_input_launches: FloatArray
    backward_weight_launches: FloatArray
    output_bytes: FloatArray
    """Bytes of the op's output tensors, were they sent: elements times element size."""
    backward_peak_bytes: FloatArray
    """The most bytes alive at once in the op's backward of what it makes."""

    def rows(self, ops: IndexArray) -> OpTable:
        """Take the rows of these ops, in this order."""
        return OpTable(**{column.name: getattr(self, column.name)[ops] for column in fields(self)})


@dataclass(frozen=True, eq=False)
class OpRates:
    """The rates at which the work of ops is done, and the sums of gradients that are part of it."""

    signature_of: IndexArray
    """[rows] number of each op's signature (``passes.graph.signatures``): ops with one number are the same op."""
    bounds: tuple[tuple[torch.dtype, OpClass], ...]
    """(data type, class) of each signature's arithmetic."""
    shares: FloatArray
    """Arithmetic that each signature does over that which is counted (``cost_models.compute``)."""
    kinds: tuple[str, ...]
    """The kind that each signature is charged as on a calibrated device (``cost_models.op_profile.kind_of``)."""
    extra: Extra

    def rows(self, ops: IndexArray) -> OpRates:
        """Take the rows of these ops, in this order."""
        return OpRates(self.signature_of[ops], self.bounds, self.shares, self.kinds, self.extra.rows(ops))

    def phases(self, work: OpTable, device: ComputeDevice) -> tuple[PhaseSeconds, ...]:
        """Compute kernel and launch seconds of each row of ``work``: forward, input half, weight half."""
        times: OpTimes | None = getattr(device, "op_times", None)
        if times is not None and times.covers_ops:
            return tuple(self._measured(work, phase, device, times) for phase in PHASES)
        return tuple(self._bounded(work, phase, device) for phase in PHASES)

    def weight_gradient_seconds(self, work: OpTable, device: ComputeDevice) -> PhaseSeconds:
        """Compute seconds of each row's gradients of parameters, without adding them to those of earlier micro-batches."""
        made = replace(
            work,
            backward_weight_bytes=work.backward_weight_bytes - self.extra.accumulated_bytes,
            backward_weight_launches=work.backward_weight_launches - self.extra.parameters,
        )
        return self.phases(made, device)[PHASES.index("backward_weight")]

    def speed(self, device: ComputeDevice) -> tuple[object, ...]:
        """List all that seconds depend on: equal devices share what is computed for one of them."""
        efficiency = tuple(sorted(device.efficiency.items()))
        peaks = tuple(
            class_peak_flops(device, dtype, op_class)
            for dtype, op_class in _sorted_rates(self.bounds)
            if op_class != "memory"
        )
        bandwidth = device.memory_bandwidth_bytes_per_second
        times = getattr(device, "op_times", None)
        overheads = device.launch_overhead_seconds, device.kernel_overhead_seconds
        return device.counted_as, bandwidth, overheads, efficiency, peaks, times

    def _bound_of(self) -> IndexArray:
        """Return the number of the first signature with each row's data type and class: [rows]."""
        first: IndexArray = np.array([self.bounds.index(bound) for bound in self.bounds], dtype=np.intp)
        return first[self.signature_of]

    def _bounded(self, work: OpTable, phase: Phase, device: ComputeDevice) -> PhaseSeconds:
        """Charge each op by the roofline of its data type and class."""
        flops = getattr(work, f"{phase}_flops")
        moved = getattr(work, f"{phase}_bytes")
        kernel = np.zeros(len(self.signature_of))
        bound_of, shares = self._bound_of(), self.shares[self.signature_of]
        for bound in np.unique(bound_of):
            members = bound_of == bound
            dtype, op_class = self.bounds[bound]
            kernel[members] = kernel_seconds(
                flops[members],
                moved[members],
                device,
                dtype,
                op_class,
                share=shares[members],
                backward=phase != "forward",
            )
        launches = getattr(work, f"{phase}_launches")
        kernel += np.where(moved > 0, launches * device.kernel_overhead_seconds, 0.0)  # a view runs no kernel
        return PhaseSeconds(kernel, launches * device.launch_overhead_seconds)

    def _measured(self, work: OpTable, phase: Phase, device: ComputeDevice, times: OpTimes) -> PhaseSeconds:
        """Charge each op what a calibration measured of its kind; launching is part of that."""
        summed = self.extra.fan_out * (phase == self.extra.phase_of_sums())
        moved = getattr(work, f"{phase}_bytes") - 3 * summed * work.output_bytes
        launches = getattr(work, f"{phase}_launches") - summed
        flops = getattr(work, f"{phase}_flops")
        # Gradients of several consumers are summed: k - 1 additions, in place where autograd owns the buffer.
        seconds = summed * op_phase_seconds(
            times, "add", "forward", np.zeros_like(moved), 3 * work.output_bytes, np.ones_like(moved)
        )
        kinds = np.array(self.kinds, dtype=object)[self.signature_of]
        bounds = self._bound_of()
        for kind, bound in sorted({(str(k), int(b)) for k, b in zip(kinds, bounds, strict=True)}):
            chosen = (kinds == kind) & (bounds == bound)
            dtype, _ = self.bounds[bound]
            scale = 1.0
            if flops[chosen].any():
                scale = device.peak_flops(torch.float32) / device.peak_flops(dtype)
            seconds[chosen] += op_phase_seconds(
                times, kind, phase, flops[chosen], moved[chosen], launches[chosen], scale
            )
        return PhaseSeconds(seconds, np.zeros_like(seconds))


def _sorted_rates(rates: Iterable[tuple[torch.dtype, OpClass]]) -> list[tuple[torch.dtype, OpClass]]:
    """List each (data type, class) once, in a stable order."""
    return sorted(set(rates), key=str)
