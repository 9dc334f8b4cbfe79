"""Choices that a request of the free search leaves open, and the errors where it leaves none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, UsageError
from cost_models.units import counted
from passes.graph.graph import OpGraph
from passes.graph.state import owning_groups
from passes.lower.candidate import Candidate
from passes.search.free.model import FreeModel
from passes.search.free.request import FreeRequest
from passes.search.infeasible import shortfalls
from passes.search.judge import Judge
from passes.search.layer.options import microbatch_counts
from passes.search.microbatches import accepted_counts
from passes.search.pins import resolve_pins


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


def usable_starts(model: FreeModel, starts: Sequence[Candidate], counts: Sequence[int]) -> list[Candidate]:
    """Choose the starts that obey pins, keep together what must be, and have an accepted number of micro-batches."""
    return [start for start in starts if start.microbatches in counts and _legal(model, start.stage_of)]


def _legal(model: FreeModel, rank_of: Mapping[str, int]) -> bool:
    names = model.layers.names
    if any(name not in rank_of for name in names):
        return False
    if any(rank_of[names[op]] != rank for op, rank in model.pins.items()):
        return False
    return all(len({rank_of[names[op]] for op in group}) == 1 for group in model.together)


def infeasible(request: FreeRequest, judge: Judge) -> InfeasibleError:
    """Say what overflows least, by how much on which device, and what would help."""
    least = min(judge.tried, key=lambda s: s.overflow_bytes)
    count = counted(least.candidate.microbatches, "micro-batch")
    ways = ["devices with more memory, or more of them", "a smaller batch"]
    if request.microbatches != "auto":
        ways.insert(0, "more micro-batches, or their number left open")
    if request.pins:
        ways.append("fewer pins")
    ways.append("the layer-wise strategy with recompute")
    return InfeasibleError(
        f"no free placement of {judge.graph.model_name} was found that fits {judge.cluster.name}",
        [
            f"{count}, the least-bad of {counted(len(judge.tried), 'simulated placement')}:",
            *shortfalls(enumerate(least.peak_bytes), judge.cluster.devices),
        ],
        ways,
    )
