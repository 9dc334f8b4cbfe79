"""A device with round numbers, for tests of cost models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from cost_models.devices import EFFICIENCY_NAMES

ALL = dict.fromkeys(EFFICIENCY_NAMES, 1.0)


@dataclass(frozen=True, eq=False)
class StandIn:
    """1 GFLOP/s, 1 GB/s, 1 µs per launch."""

    counted_as: Literal["cuda", "cpu"] = "cuda"
    memory_bandwidth_bytes_per_second: float = 1e9
    launch_overhead_seconds: float = 1e-6
    kernel_overhead_seconds: float = 0.0
    efficiency: Mapping[str, float] = field(default_factory=lambda: dict(ALL))
    peak: float = 1e9
    tf32_peak: float | None = None

    def peak_flops(self, dtype: torch.dtype, *, allow_tf32: bool = False) -> float:
        if allow_tf32 and dtype == torch.float32 and self.tf32_peak is not None:
            return self.tf32_peak
        return self.peak if dtype != torch.float64 else self.peak / 2
