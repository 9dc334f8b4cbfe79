"""Seconds of computation: the roofline, and why a segment is not the sum of its ops.

Symbols
    W   floating point operations
    Q   bytes read and written
    P   peak rate for the op's data type, FLOP/s
    B   memory bandwidth, bytes/s
    e   achieved fraction of a peak, per class of op (``cost_models.devices.EFFICIENCY_NAMES``)
    o   seconds the host needs to launch one kernel
    k   seconds in which a kernel starts and ends and does nothing
    s   arithmetic that is done over that which is counted: 1/2 of attention with a causal mask; more than 1 where operands
        are not aligned, as if more of it were done

    GPU kernel    t = k + s·W / (P · e_class) + Q / (B · e_memory)
    CPU kernel    t = max(s·W / (P · e_class), Q / (B · e_memory))      the roofline (Williams, Waterman, Patterson 2009)

On a GPU the two parts add up, for a product's first operands are loaded and its last results stored while nothing is
multiplied: of public tables of matrix products, this fits those of A100 and V100 with a median error of 2.5 and 4.3%, where
the roofline has 3.4 and 5.1%. A CPU core's caches hide the shorter part: one core's products are within 6% of the roofline.

    CPU segment   Σ (o·launches + t)      the host computes, so nothing overlaps
    GPU segment   max(Σ o·launches, Σ t)  the host runs ahead and launches while the device computes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from cost_models.arrays import FloatArray
from cost_models.devices import CountedKind
from cost_models.memory import StateBytes
from cost_models.op_profile import CostLine, OpTimes

OpClass: TypeAlias = Literal["matmul", "attention", "conv", "memory"]

VECTOR_TYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
"""Types that a GPU multiplies in its plain cores, unless it is told to use others (tf32)."""

MOST_ALIGNED_SHARE = 1 / 0.89
"""The largest share of a product whose rows begin at multiples of 16 bytes (its source: ``passes.costs.kernels``).

Others run on the instructions of earlier cards, which a newer one has at a lower rate: its efficiency "unaligned"."""

IndexArray: TypeAlias = NDArray[np.intp] | NDArray[np.bool_]


class ComputeDevice(Protocol):
    """The part of a device that the compute model reads; ``cost_models.devices.Device`` is one."""

    @property
    def counted_as(self) -> CountedKind: ...
    @property
    def memory_bandwidth_bytes_per_second(self) -> float: ...
    @property
    def launch_overhead_seconds(self) -> float: ...
    @property
    def kernel_overhead_seconds(self) -> float: ...
    @property
    def efficiency(self) -> Mapping[str, float]: ...
    def peak_flops(self, dtype: torch.dtype, *, allow_tf32: bool = False) -> float: ...


@dataclass(frozen=True)
class OpWork:
    """The work of one op per micro-batch: arithmetic, memory traffic and kernels, forward and both halves of backward."""

    forward_flops: float = 0.0
    backward_input_flops: float = 0.0
    backward_weight_flops: float = 0.0
    forward_bytes: float = 0.0
    """Bytes read and written, not held."""
    backward_input_bytes: float = 0.0
    backward_weight_bytes: float = 0.0
    forward_launches: float = 0.0
    """Kernels that the host starts: the op's, and at least the op itself if it is a view."""
    backward_input_launches: float = 0.0
    backward_weight_launches: float = 0.0


@dataclass(frozen=True)
class PhaseSeconds:
    """Per op: seconds its kernels run and seconds the host spends launching them. Arrays of shape [ops]."""

    kernel: FloatArray
    launch: FloatArray


def kernel_seconds(
    flops: float | FloatArray,
    transferred_bytes: float | FloatArray,
    device: ComputeDevice,
    dtype: torch.dtype,
    op_class: OpClass,
    *,
    share: float | FloatArray = 1.0,
    backward: bool = False,
) -> FloatArray:
    """Return the time of a kernel (or of an array of them) of one data type and class, without launch overhead.

    ``share``: arithmetic done over arithmetic counted.
    """
    memory = np.asarray(transferred_bytes, dtype=np.float64) / (
        device.memory_bandwidth_bytes_per_second * device.efficiency["memory"]
    )
    if op_class == "memory":
        return memory
    arithmetic = np.asarray(flops, dtype=np.float64)
    if not arithmetic.any():  # do not ask a device for the rate of a type it cannot multiply
        return memory
    computing = share * arithmetic / arithmetic_rate(device, dtype, op_class, backward)
    if op_class == "matmul":
        computing = computing / np.where(
            np.asarray(share) > MOST_ALIGNED_SHARE, device.efficiency["unaligned"], 1.0
        )
    kernel: FloatArray = computing + memory if device.counted_as == "cuda" else np.maximum(computing, memory)
    return kernel


def class_peak_flops(device: ComputeDevice, dtype: torch.dtype, op_class: OpClass) -> float:
    """Return the peak FLOP/s at which a class of op computes: convolutions of float32 take tf32 where the device has it.

    That is torch's default (``torch.backends.cudnn.allow_tf32``); products take it only if they are told to.
    """
    return device.peak_flops(dtype, allow_tf32=op_class == "conv")


def arithmetic_rate(device: ComputeDevice, dtype: torch.dtype, op_class: OpClass, backward: bool) -> float:
    """Return the FLOP/s that a class of op, not "memory", reaches on a device."""
    peak = class_peak_flops(device, dtype, op_class)
    narrower = peak != device.peak_flops(dtype)
    name = "conv" if narrower else efficiency_name(device.counted_as, op_class, dtype, backward)
    return peak * device.efficiency[name]


def efficiency_name(kind: CountedKind, op_class: OpClass, dtype: torch.dtype, backward: bool) -> str:
    """Return the key of ``ComputeDevice.efficiency`` that bounds the arithmetic of a class of op."""
    if op_class == "attention":
        return "attention_backward" if backward else op_class
    return "vector" if kind == "cuda" and dtype in VECTOR_TYPES else op_class


@dataclass(frozen=True)
class OpSeconds:
    """Seconds of one op, or arrays over ops, by phase."""

    forward: FloatArray
    backward_input: FloatArray
    backward_weight: FloatArray


def segment_seconds(phase: PhaseSeconds, device: ComputeDevice, ops: IndexArray | None = None) -> float:
    """Time of a segment's phase: ``max(Σ launch, Σ kernel)`` on a GPU, ``Σ (launch + kernel)`` on a CPU.

    ``ops`` selects the segment's ops (indices or a mask of shape [all ops]); None means all of them.
    """
    kernel = phase.kernel if ops is None else phase.kernel[ops]
    launch = phase.launch if ops is None else phase.launch[ops]
    kernels, launches = float(kernel.sum()), float(launch.sum())
    return max(kernels, launches) if device.counted_as == "cuda" else kernels + launches


def additive_seconds(phase: PhaseSeconds, device: ComputeDevice) -> FloatArray:
    """Return per-op seconds, shape [ops], that add up to ``segment_seconds`` of the whole model.

    On a GPU whichever of launching and running bounds the whole is charged to each op. For a part of the model the
    sum is then at most the part's own ``segment_seconds``, and equal to it when the same side bounds both.
    """
    if device.counted_as != "cuda":
        return phase.kernel + phase.launch
    return phase.kernel if phase.kernel.sum() >= phase.launch.sum() else phase.launch


OPTIMIZER_PASSES: Mapping[str, int] = MappingProxyType(
    {"sgd": 3, "momentum": 8, "adam": 18, "adamw": 20, "fused-adamw": 7, "amsgrad": 21}
)
"""Times that the bytes of the trained parameters are read or written by ``torch.optim`` with ``foreach``, its default on
GPUs: the operands and results of the kernels of ``_multi_tensor_sgd`` and ``_multi_tensor_adam``. AdamW: decay 2, first
moment 3, second 2 + 3, its root 2, two kernels on that 4, update 4. The one kernel of ``fused=True`` reads 4, writes 3."""
OPTIMIZER_LAUNCHES: Mapping[str, float] = MappingProxyType(
    {"sgd": 0.16, "momentum": 0.35, "adam": 1.2, "adamw": 1.2, "fused-adamw": 0.24, "amsgrad": 1.2}
)
"""The host's time for each tensor of parameters in these steps, in launches of an op: 2.3, 5.1, 17.8, 17.3, fused 3.6 us
beside 14.5 on an H100's host (``make gpu``, docs/10). It does not pass beside the device's: where there are several
ranks, the executor waits for that before. One rank does not wait, and is charged it all the same."""


def optimizer_seconds(
    state: StateBytes, device: ComputeDevice, optimizer: str | None = None, tensors: int = 0
) -> float:
    """Time of an optimizer step, bound by memory: parameters and state read and written, gradients read once.

    ``t = (passes · trained + cast) / (B · e_memory)`` with B the memory bandwidth in bytes/s. On a GPU ``passes`` are those
    of torch's default implementation, kernel by kernel over many tensors (``OPTIMIZER_PASSES``), and the host's time for
    each of ``tensors`` adds (``OPTIMIZER_LAUNCHES``); elsewhere, where small
    tensors stay in caches from one kernel to the next, and for other optimizers ``passes · trained = 3·trained + 2·state``,
    as if all was done at once. Gradients have the owners' type by then, ``cast`` is the traffic of the casts to it and of
    the updated owners to the leaves. Frozen parameters are not touched.

    Where a calibration measured ``optimizer`` on the device: ``o · tensors + trained · seconds per byte``, and the casts.
    """
    times: OpTimes | None = getattr(device, "op_times", None)
    measured = None if times is None or optimizer is None else times.get(f"optimizer {optimizer}", "forward")
    bandwidth = device.memory_bandwidth_bytes_per_second * device.efficiency["memory"]
    if isinstance(measured, CostLine):
        step = tensors * measured.overhead_seconds + state.trained * measured.seconds_per_byte
        return step + state.cast / bandwidth
    passes = OPTIMIZER_PASSES.get(optimizer or "") if device.counted_as == "cuda" else None
    if passes is None:
        return (3 * state.trained + 2 * state.optimizer_state + state.cast) / bandwidth
    host = tensors * OPTIMIZER_LAUNCHES[optimizer or ""] * device.launch_overhead_seconds
    return host + (passes * state.trained + state.cast) / bandwidth
