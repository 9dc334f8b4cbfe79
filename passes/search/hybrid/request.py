"""The request of the hybrid search: what is fixed of a pipeline of sharded stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from passes.search.hybrid.fix import Fix
from passes.search.hybrid.options import SEARCHED
from passes.search.request import Request
from passes.search.words import RecomputeMode, StrategyName


@dataclass(frozen=True)
class HybridRequest(Request):
    """A pipeline of sharded stages is wanted. ``pins``: layouts, for all stages or as ``stage 2:GLOB`` for one."""

    strategy: ClassVar[StrategyName] = "hybrid"

    pins: Mapping[str, str] = field(default_factory=dict)
    schedule: str = "auto"
    fix: Fix = field(default_factory=Fix)
    recompute: RecomputeMode = "auto"
    """Used where ``fix`` says nothing of it."""

    @property
    def open(self) -> bool:
        """Nothing is fixed about devices and layouts."""
        nothing = replace(self.fix, queues=None, recompute=None) == Fix() and not self.pins
        return nothing and self.schedule in ("auto", *SEARCHED)
