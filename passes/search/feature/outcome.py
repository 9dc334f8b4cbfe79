"""The sharding that the search found, carried to a simulated step; searched for again while that does not fit.

recompute     searches
none          keeping all activations
full          with all blocks computed again in backward
auto          the first; where nothing fits, the second
"""

from __future__ import annotations

import logging
from dataclasses import replace

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from cost_models.units import format_bytes
from passes.costs.costs import GraphCosts
from passes.graph.blocks import block_of, regions_of
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate
from passes.search.feature.place import FeatureRequest, place_features
from passes.search.feature.tuning import TUNING
from passes.search.judge import Judge, memory_rounds
from passes.search.outcome import Outcome, ShardingDetails
from passes.shard.discover import Discovery
from passes.shard.words import FeaturePlacement

log = logging.getLogger("partitioner")

SCHEDULE = "1f1b"
"""The order of the one stage's work: each micro-batch's backward follows its forward."""


def place_sharded(
    graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, request: FeatureRequest, judge: Judge
) -> Outcome:
    """Search, with blocks computed again as the request says; raises as :func:`place_features`."""
    blocks = tuple(dict.fromkeys(block_of(graph).values()))
    if request.recompute == "full":
        return _that_fits(graph, costs, cluster, request, judge, blocks)
    try:
        return _that_fits(graph, costs, cluster, request, judge, ())
    except InfeasibleError:
        if request.recompute == "none" or not blocks:
            raise
        log.info("no sharding fits that keeps activations: searching with blocks computed again in backward")
        return _that_fits(graph, costs, cluster, request, judge, blocks)


def _that_fits(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    request: FeatureRequest,
    judge: Judge,
    blocks: tuple[str, ...],
) -> Outcome:
    """Search until the simulated step of what was found fits too. ``blocks``: those that backward computes again."""
    smallest = min(device.memory_bytes for device in cluster.devices)
    outcomes: list[Outcome] = []
    again = regions_of(graph, blocks)

    def search(number: int, reserved_bytes: float) -> float | None:
        """Search with so much less memory; the memory to leave next, or None."""
        found = place_features(
            graph, costs, cluster, replace(request, reserved_bytes=reserved_bytes), Discovery.stored(), again
        )
        simulated = judge.simulate(sharded_candidate(graph, found.placement, blocks))
        details = ShardingDetails(found.cost.seconds, found.tried, {0: found.origins})
        outcomes.append(Outcome(simulated, judge, found.certificate, details=details))
        if simulated.fits:
            return None
        excess = simulated.overflow_bytes
        log.info("the simulated step exceeds a device by %s: searching again", format_bytes(excess))
        unseen = smallest + excess - found.cost.memory_bytes  # by the search, of what is simulated
        return max(reserved_bytes + TUNING.least_reserve * smallest, unseen)

    memory_rounds(search, request.reserved_bytes)
    last = outcomes[-1]
    if last.best.fits:
        return last
    raise InfeasibleError(
        f"no sharding of {graph.model_name} was found whose simulated step fits {cluster.name}",
        [
            f"the last of {len(outcomes)} searches exceeds a device by {format_bytes(last.best.overflow_bytes)}"
        ],
        ["a smaller batch, more devices, an optimizer with less state, or the layer-wise strategy"],
    )


def sharded_candidate(graph: OpGraph, placement: FeaturePlacement, blocks: tuple[str, ...] = ()) -> Candidate:
    """The candidate of a sharding: one stage that all devices of the mesh share, computing ``blocks`` again."""
    return Candidate(
        stage_of={node.name: 0 for node in graph.ops},
        groups=(placement.mesh.ranks,),
        microbatches=placement.microbatches,
        schedule=SCHEDULE,
        recomputed_blocks=(blocks,) if blocks else (),
        shardings={0: placement},
    )
