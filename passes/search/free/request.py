"""What the free search is asked, what it proposes and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cost_models.precision import Precision
from passes.search.certificate import Certificate

Objective = Literal["throughput", "latency"]


@dataclass(frozen=True)
class FreeRequest:
    """What the user fixed and what is left to the search.

    ``objective``: "throughput" (the busiest device, over the micro-batches of a step) or "latency" (the makespan of one
    batch, in one micro-batch if their number is left open). ``pins``: glob over module paths or op names -> rank.
    ``split``: whether ops may be split into blocks of neurons. ``splits``: which are, and into which sizes (glob over
    families of ``passes.split.families``, or an op's name -> sizes of blocks); then no others.
    """

    batch_size: int
    microbatches: int | Literal["auto"] = "auto"
    objective: Objective = "throughput"
    optimizer: str = "adamw"
    precision: Precision = field(default_factory=Precision)
    pins: Mapping[str, int] = field(default_factory=dict)
    split: bool = True
    splits: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    time_limit_seconds: float | None = None
    simulations: int = 12
    """Candidates simulated at most, for each number of micro-batches."""


@dataclass(frozen=True, eq=False)
class FreeCandidate:
    """A placement. Recomputed ops have no rank."""

    rank_of: Mapping[str, int]
    microbatches: int
    description: str = ""


@dataclass(frozen=True, eq=False)
class SimulatedFree:
    """What the simulation of a candidate's programs says. ``peak_memory_bytes``: per rank."""

    candidate: FreeCandidate
    step_seconds: float
    peak_memory_bytes: Sequence[int]


@dataclass(frozen=True, eq=False)
class FreeResult:
    """The chosen candidate and how it was found. ``tried``: what was simulated, fastest first.

    Of the neighbours of good placements, only the one that was chosen.
    """

    best: SimulatedFree
    tried: tuple[SimulatedFree, ...]
    certificate: Certificate


SimulateFree = Callable[[FreeCandidate], SimulatedFree]
