"""A device: how much it holds, how fast it computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from cost_models.errors import ClusterError
from cost_models.op_profile import OpTimes

DeviceKind: TypeAlias = Literal["cuda", "cpu", "rocm", "xpu", "mps", "hpu", "tpu"]
"""The kinds as torch calls them, but for AMD's GPUs, which it calls ``cuda`` too."""
CountedKind: TypeAlias = Literal["cuda", "cpu"]
"""The kinds whose costs have formulas of their own."""


def counted_kind(kind: DeviceKind) -> CountedKind:
    """Return the kind whose formulas count a device's costs: accelerators of all makers are counted as CUDA devices."""
    return "cpu" if kind == "cpu" else "cuda"


RUN_KINDS: frozenset[DeviceKind] = frozenset({"cuda", "cpu"})
"""The kinds that plans were run on. Plans for the others are predictions: nothing of them was run or measured."""

RATE_NAMES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8")
"""Keys of ``flops`` in a cluster file. ``tf32`` is a way to multiply float32, not a dtype."""

EFFICIENCY_NAMES = ("matmul", "attention", "attention_backward", "conv", "vector", "memory", "unaligned")
"""Keys of ``efficiency``: the part of the peak that each kind of kernel reaches. ``vector``: products and convolutions in
float32 and float64, where a GPU's peak is that of its plain cores and easier to reach. ``unaligned``: the part of "matmul"
that is left where rows do not begin at multiples of 16 bytes, beside what that costs an A100."""

DEFAULT_EFFICIENCY: Mapping[CountedKind, Mapping[str, float]] = {
    # Rules of thumb, not measurements of your machine: calibrate to replace them.
    # matmul: cuBLAS reaches 0.7-0.8 of the dense tensor-core peak on large matrices (A100, H100).
    # attention: FlashAttention-2 reports 0.5-0.73 on A100 (Dao 2023, arXiv:2307.08691), less on H100; backward four fifths.
    # memory: STREAM-like copies reach 0.8-0.9 of the data sheet's bandwidth.
    # vector: float32 products reach 0.90-0.97 of an A100's peak, 0.89 of a V100's, 0.77 of an H100's.
    "cuda": {
        "matmul": 0.7,
        "attention": 0.5,
        "attention_backward": 0.4,
        "conv": 0.5,
        "vector": 0.9,
        "memory": 0.8,
        "unaligned": 1.0,
    },
    # A CPU worker's peak is itself a measured matmul rate, so matmul is 1.
    "cpu": {
        "matmul": 1.0,
        "attention": 0.8,
        "attention_backward": 0.8,
        "conv": 1.0,
        "vector": 1.0,
        "memory": 1.0,
        "unaligned": 1.0,
    },
}

_RATE_OF_DTYPE: Mapping[torch.dtype, str] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8",
    torch.float8_e4m3fnuz: "float8",
    torch.float8_e5m2: "float8",
    torch.float8_e5m2fnuz: "float8",
    # A complex multiplication is four real ones, which the FLOP count has to say; the rate is the real one.
    torch.complex64: "float32",
    torch.complex128: "float64",
}


CONTEXT_BYTES = 400_000_000
"""A process's CUDA context where nothing better is known: 300 to 400 MB since CUDA 11.7 loads kernels when they are called
(pytorch issues 109888 and 107667); 256 to 527 MiB were measured on single cards (RTX 3090, RTX 6000 Ada, H100)."""


class Rates(Mapping[str, float]):
    """A mapping from names to numbers that is frozen, hashable and picklable."""

    __slots__ = ("_pairs",)

    def __init__(self, rates: Mapping[str, float]) -> None:
        self._pairs = tuple(sorted(rates.items()))

    def __getitem__(self, name: str) -> float:
        for key, rate in self._pairs:
            if key == name:
                return rate
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __eq__(self, other: object) -> bool:
        return dict(self) == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __repr__(self) -> str:
        return f"Rates({dict(self)})"


@dataclass(frozen=True, slots=True)
class Device:
    """One rank's device. Hashable, so that costs can be cached by it."""

    rank: int
    node: int
    node_name: str
    host: str | None
    """The address of the node for a launch command, None if the file does not say."""
    model: str
    """The name of the preset, or the one that the file gives: ``"H100-80GB"``."""
    kind: DeviceKind
    memory_bytes: int
    """Bytes that a process can have of the memory that the driver reports: memory − memory_reserved."""
    memory_bandwidth_bytes_per_second: float
    flops_per_second: Rates
    """Dense peak per rate name (``RATE_NAMES``)."""
    launch_overhead_seconds: float
    """Host time to start one operation; on a GPU it overlaps with the kernels before it."""
    kernel_overhead_seconds: float
    """Time in which a kernel starts and ends and computes nothing; none on a CPU."""
    efficiency: Rates
    """Part of the peak that is reached, in (0, 1], per kind of kernel (``EFFICIENCY_NAMES``)."""
    op_times: OpTimes | None = None
    """Measured seconds by kind of op, where calibrated: they replace the roofline for these kinds."""
    context_bytes: int = 0
    """Bytes that a process holds of it before any tensor: the driver's context; if it is given, all beside tensors."""
    communicators: Literal["none", "lazy", "eager"] = "none"
    """The way in which their memory is counted (``cost_models.nccl_memory``): none on CPUs, and where what a process holds
    beside tensors is given; "eager" with software of 2023, which connects them before their first use."""
    room_share: float = 1.0
    """Share of ``memory_bytes`` that plans may fill by prediction (``cost_models.room``)."""

    @property
    def room_bytes(self) -> int:
        """Bytes that plans may fill by prediction, with what processes hold beside tensors."""
        return int(self.memory_bytes * self.room_share)

    @property
    def counted_as(self) -> CountedKind:
        """The kind whose formulas count its costs."""
        return counted_kind(self.kind)

    @property
    def speed_alone(self) -> Device:
        """The device without its place and its memory: equal for devices that compute alike."""
        return replace(
            self, rank=0, node=0, node_name="", host=None, memory_bytes=0, room_share=1.0, context_bytes=0
        )

    def supports(self, dtype: torch.dtype) -> bool:
        """Tell whether ``flops`` has a rate for ``dtype``."""
        return _RATE_OF_DTYPE.get(dtype) in self.flops_per_second

    def peak_flops(self, dtype: torch.dtype, *, allow_tf32: bool = False) -> float:
        """Return the dense peak in FLOP/s. With ``allow_tf32``, float32 has the ``tf32`` rate where the device has one.

        Raises ``ClusterError`` for a dtype without a rate: it is unsupported, not guessed.
        """
        name = _RATE_OF_DTYPE.get(dtype)
        if name == "float32" and allow_tf32 and "tf32" in self.flops_per_second:
            name = "tf32"
        if name is None or name not in self.flops_per_second:
            wanted = str(dtype).removeprefix("torch.")
            has = ", ".join(n for n in RATE_NAMES if n in self.flops_per_second)
            raise ClusterError(
                f"{self.model} (rank {self.rank}, node {self.node_name}) does not support {wanted}",
                [f"flops has no rate for {wanted}; it has {has}"],
                [
                    "use one of these dtypes for the model",
                    *([f'add "{name}: <rate>" to device.flops in the cluster file'] if name else []),
                ],
            )
        return self.flops_per_second[name]
