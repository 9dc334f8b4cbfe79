"""What a request of the free search leaves open, and what is said where it leaves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, UsageError
from cost_models.units import format_bytes
from passes.graph.graph import OpGraph
from passes.graph.least_samples import least_samples
from passes.graph.state import owning_groups
from passes.search.free.judge import FreeJudge
from passes.search.free.model import FreeModel
from passes.search.free.request import FreeCandidate, FreeRequest
from passes.search.layer.options import microbatch_counts
from passes.search.pins import resolve_pins


def accepted_counts(graph: OpGraph, request: FreeRequest) -> list[int]:
    """Numbers of micro-batches to try: those whose smallest micro-batch the model accepts; one for latency."""
    least, reason = least_samples(graph)
    wanted = request.microbatches
    if request.objective == "latency" and wanted == "auto":
        wanted = 1
    counts = microbatch_counts(request.batch_size, wanted)
    accepted = [count for count in counts if request.batch_size // count >= max(1, least)]
    if not accepted:
        raise UsageError(
            f"cannot train {graph.model_name} on {request.batch_size} samples in {counts[0]} micro-batches",
            [f"{reason} needs {least} samples or more in every micro-batch"]
            if reason
            else ["every micro-batch needs a sample"],
            [
                f"at most {request.batch_size // least} micro-batches"
                if request.batch_size >= least
                else f"a batch of {least} samples or more"
            ],
        )
    return accepted


def resolved_pins(
    graph: OpGraph, recomputed: frozenset[str], request: FreeRequest, cluster: ClusterSpec
) -> dict[int, int]:
    """Placed op -> rank. Raises UsageError with every conflict; here, ops may be pinned in any order."""
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


def usable_starts(
    model: FreeModel, starts: Sequence[FreeCandidate], counts: Sequence[int]
) -> list[FreeCandidate]:
    """The starts that obey pins, keep together what must be, and have a number of micro-batches that may be used."""
    return [start for start in starts if start.microbatches in counts and _legal(model, start.rank_of)]


def _legal(model: FreeModel, rank_of: Mapping[str, int]) -> bool:
    names = model.layers.names
    if any(name not in rank_of for name in names):
        return False
    if any(rank_of[names[op]] != rank for op, rank in model.pins.items()):
        return False
    return all(len({rank_of[names[op]] for op in group}) == 1 for group in model.together)


def infeasible(
    graph: OpGraph, cluster: ClusterSpec, request: FreeRequest, judge: FreeJudge
) -> InfeasibleError:
    """What overflows least, by how much on which device, and what would help."""
    least = min(judge.tried, key=judge.overflow_bytes)
    because = [
        f"{least.candidate.microbatches} micro-batches, the least-bad of {len(judge.tried)} simulated placements:"
    ]
    for rank, (peak, device) in enumerate(zip(least.peak_memory_bytes, cluster.devices, strict=True)):
        over = peak - device.memory_bytes
        state = f"exceeds it by {format_bytes(over)}" if over > 0 else "fits"
        because.append(
            f"rank {rank} needs {format_bytes(peak)} of {format_bytes(device.memory_bytes)}: {state}"
        )
    ways = ["devices with more memory, or more of them", "a smaller batch"]
    if request.microbatches != "auto":
        ways.insert(0, "more micro-batches, or their number left open")
    if request.pins:
        ways.append("fewer pins")
    ways.append("the layer-wise strategy with recompute")
    return InfeasibleError(
        f"no free placement of {graph.model_name} was found that fits {cluster.name}", because, ways
    )
