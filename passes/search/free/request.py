"""The request that the free search is given, and what it leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from passes.graph.graph import OpGraph
from passes.graph.state import owning_groups
from passes.search.layer.options import microbatch_counts
from passes.search.microbatches import accepted_counts
from passes.search.outcome import Outcome
from passes.search.pins import resolve_pins
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
    start: Outcome | None = None
    """The pipeline of single devices to begin with; None to plan it first."""


def counts_to_try(graph: OpGraph, request: FreeRequest) -> list[int]:
    """Choose the numbers of micro-batches to try; for latency one, unless the request says otherwise."""
    wanted = 1 if request.objective == "latency" and request.microbatches == "auto" else request.microbatches
    size = request.job.batch_size
    return accepted_counts(graph, size, microbatch_counts(size, wanted))


def resolved_pins(
    graph: OpGraph, recomputed: frozenset[str], request: FreeRequest, cluster: ClusterSpec
) -> dict[int, int]:
    """Return the rank of each pinned op; ops may be pinned in any order. Raises UsageError with every conflict."""
    placed = [node for node in graph.ops if node.name not in recomputed]
    beyond = [
        f"{glob!r} is pinned to rank {rank}; the cluster has ranks 0 to {cluster.world_size - 1}"
        for glob, rank in request.pins.items()
        if not 0 <= rank < cluster.world_size
    ]
    if beyond:
        raise UsageError("cannot use these pins", beyond, ["a rank of the cluster for each module"])
    paths = [str(node.meta.get("module_path", "")) for node in placed]
    together = owning_groups(graph, recomputed)
    return resolve_pins(
        request.pins, [node.name for node in placed], paths, [()] * len(placed), together, place="rank"
    )
