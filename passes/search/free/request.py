"""The request that the free search is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from passes.search.free.tuning import DEFAULT, FreeTuning
from passes.search.outcome import Outcome
from passes.search.request import Request
from passes.search.words import StrategyName

Objective = Literal["throughput", "latency"]


@dataclass(frozen=True)
class FreeRequest(Request):
    """A free placement is wanted. ``pins``: glob over module paths or op names -> rank."""

    strategy: ClassVar[StrategyName] = "free"

    pins: Mapping[str, int] = field(default_factory=dict)
    objective: Objective = "throughput"
    """Throughput: the busiest device, over the micro-batches of a step. Latency: the makespan of one batch, in one
    micro-batch if their number is left open."""
    split: bool = True
    """True if ops may be split into blocks of neurons."""
    splits: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Glob over families of ``passes.split.families``, or an op's name -> sizes of its blocks; then no others are split."""
    tuning: FreeTuning = DEFAULT
    """Numbers that steer the search."""
    start: Outcome | None = None
    """The pipeline of single devices to begin with; None to plan it first."""
