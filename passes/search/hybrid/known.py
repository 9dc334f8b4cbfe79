"""Recipes that people know by name: restrictions of the search that every comparison shows, whatever they take.

row                               --fix                      parameters, gradients, optimizer state
FSDP x64                          data=64 zero=3             in parts on all devices
tensor 8 x data 8                 tensor=8 data=8 zero=1     shards inside a node; replicas part the state
1F1B pipeline x32 x data 2        pipeline=32 data=2 zero=1  by stages; replicas part the state
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError, UsageError
from passes.lower.candidate import Candidate
from passes.search.hybrid.fix import Fix
from passes.search.hybrid.provider import ANY_MEMORY, GroupsProvider
from passes.search.hybrid.request import HybridRequest
from passes.search.hybrid.solve import SolvedOption
from passes.search.provider import Judged, Proposal, Proved, Valued


def recipes(cluster: ClusterSpec, pieces: int) -> Iterator[tuple[str, Fix]]:
    """Yield the name and what is fixed of each; none that would be another one, or needs equal nodes where they are not."""
    world, sizes = cluster.world_size, {len(ranks) for ranks in cluster.ranks_per_node}
    if world == 1:
        return
    yield f"FSDP x{world}", Fix(data=world, zero=3)
    if len(sizes) == 1 and max(sizes) > 1:
        inside = max(sizes)
        yield (
            _around(f"tensor {inside}", world // inside),
            _with_replicas(Fix(tensor=inside), world // inside),
        )
    stages = max(count for count in range(1, min(world, pieces) + 1) if world % count == 0)
    if stages > 1:
        name = _around(f"1F1B pipeline x{stages}", world // stages)
        yield name, _with_replicas(Fix(pipeline=stages), world // stages)


def _around(name: str, replicas: int) -> str:
    return f"{name} x data {replicas}" if replicas > 1 else name


def _with_replicas(fix: Fix, replicas: int) -> Fix:
    return replace(fix, data=replicas, zero=1) if replicas > 1 else replace(fix, data=1)


def known_recipes(groups: GroupsProvider, request: HybridRequest) -> Iterator[KnownRecipe]:
    """Yield every recipe that the batch and the model allow."""
    search = groups.search
    for name, fix in recipes(search.cluster, len(search.pieces)):
        try:
            fitting = search.fixing(replace(request, fix=fix, schedule="auto"))
        except UsageError:  # the batch cannot be cut so
            continue
        leanest = replace(fitting, recompute="full")
        yield KnownRecipe(
            name, *(replace(groups, search=own, only_if="compared") for own in (fitting, leanest))
        )


class KnownRecipe:
    """A recipe as a provider of one pipeline: its fastest that fits, or the leanest where none does.

    By estimate: one that overflows in simulation is solved again with less memory only while it may be the fastest of all.
    """

    words = "recipes that people know"
    learns = False
    quickly_bounded = False
    simulated_first = 1

    def __init__(self, name: str, fitting: GroupsProvider, leanest: GroupsProvider) -> None:
        self.name, self._solving, self._leanest = name, fitting, leanest
        self.objective, self.slack = fitting.objective, fitting.slack

    def proposals(
        self, known_seconds: float, room: float, deadline: float
    ) -> Sequence[Proposal[SolvedOption]]:
        """Return the pipeline, however fast others are."""
        try:
            fitting = self._solving.proposals(math.inf, room, deadline)
            if fitting:
                return [replace(fitting[0], name=self.name)]
            self._solving = self._leanest
            oversized = self._solving.proposals(math.inf, ANY_MEMORY, deadline)
        except UsageError:  # no op of the model can be split so
            return []
        smallest = sorted(oversized, key=lambda own: -own.solved.option.microbatches)[:1]
        return [replace(own, name=self.name) for own in smallest]

    def candidate(self, proposal: Proposal[SolvedOption]) -> Candidate:
        """See ``Provider``."""
        return self._solving.candidate(proposal)

    def leaner(
        self, judged: Judged[SolvedOption], room: float, known_seconds: float
    ) -> tuple[Proposal[SolvedOption], float] | None:
        """Solve it with less memory, unless nothing fits."""
        if self._solving is self._leanest:
            return None
        found = self._solving.leaner(judged, room, known_seconds)
        return None if found is None else (replace(found[0], name=self.name), found[1])

    def proved(self) -> Proved:
        """Return nothing: it is one of the pipelines of device groups, which are bounded together."""
        return Proved("", "", math.inf, ())

    def valued(self, proposal: Proposal[SolvedOption]) -> Valued:
        """See ``Provider``."""
        return self._solving.valued(proposal)

    def refusal(self, tried: Sequence[Judged[SolvedOption]], room: float) -> PartitionerError:
        """See ``Provider``."""
        return self._solving.refusal(tried, room)
