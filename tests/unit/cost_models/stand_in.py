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

    kind: Literal["cuda", "cpu"] = "cuda"
    memory_bandwidth_bytes_per_second: float = 1e9
    launch_overhead_seconds: float = 1e-6
    kernel_overhead_seconds: float = 0.0
    efficiency: Mapping[str, float] = field(default_factory=lambda: dict(ALL))
    peak: float = 1e9

    def peak_flops(self, dtype: torch.dtype) -> float:
        return self.peak if dtype != torch.float64 else self.peak / 2
