"""One stage that all devices share, sharded over one mesh or another, as a proposal: the cheapest sharding that fits.

recompute     searches
none          keeping all activations, and all parameters that were gathered
gathers       gathering these again in backward
full          with all blocks computed again in backward
auto          the first; where nothing fits, the second, then the third
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from cost_models.errors import InfeasibleError, PartitionerError, TimeLimitError, UsageError
from cost_models.units import counted, format_bytes
from passes.graph.blocks import GATHERS, SELECTIVE, attention_of, block_of, regions_of
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate
from passes.search.beside_tensors import mesh_room_bytes
from passes.search.certificate import BoundTerm, PipelineTerms, StageTerms
from passes.search.feature.place import OBJECTIVE, FeatureRequest, FeatureResult, MeshSurvey, survey_meshes
from passes.search.feature.tuning import TUNING
from passes.search.judge import Judge
from passes.search.model import read_state_bytes
from passes.search.outcome import MeshTried, ShardingDetails
from passes.search.provider import Judged, Proposal, Proved, Valued
from passes.search.words import RecomputeMode
from passes.shard.discover import Discovery
from passes.shard.words import FeaturePlacement

SCHEDULE = "1f1b"
"""The order of the one stage's work: each micro-batch's backward follows its forward."""
SLACK = 1.6
"""Shardings whose cost is above that of the fastest step by this factor are not looked for. The simulation launches ops
while others run and hides sums of gradients, which the surrogate adds up: on ViT on 64 H100 it is 53% too high."""


@dataclass(frozen=True, eq=False)
class RecomputedSharding:
    """A sharding, and the blocks that backward computes again under it."""

    result: FeatureResult
    blocks: tuple[str, ...]


@dataclass(eq=False)
class MeshProvider:
    """Proposes the cheapest sharding of one stage over all devices, on meshes of up to two axes."""

    judge: Judge
    request: FeatureRequest
    discovery: Discovery
    words = "one stage on all devices"
    objective = OBJECTIVE
    learns = False
    quickly_bounded = False
    simulated_first = 2
    slack = SLACK
    _surveys: list[MeshSurvey] = field(default_factory=list)
    _failures: list[InfeasibleError | TimeLimitError] = field(default_factory=list)

    @cached_property
    def _modes(self) -> list[tuple[str, ...]]:
        """List what backward may compute again, cheapest first."""
        every = tuple(dict.fromkeys(block_of(self.judge.graph).values()))
        attention: list[tuple[str, ...]] = [(SELECTIVE,)] if attention_of(self.judge.graph) else []
        modes: dict[RecomputeMode | None, list[tuple[str, ...]]] = {
            "none": [()],
            "gathers": [(GATHERS,)],
            "selective": attention or [()],
            "full": [every],
        }
        return list(dict.fromkeys(modes.get(self.request.recompute, [(), (GATHERS,), *attention, every])))

    def proposals(
        self, known_seconds: float, room: float, deadline: float
    ) -> Sequence[Proposal[RecomputedSharding]]:
        """Return the cheapest sharding, keeping activations if one fits so, and data parallelism; see ``Provider``."""
        found = self._cheapest_of_modes(known_seconds, room, deadline)
        return [*found, *self._data_parallel(room, deadline)]

    def _cheapest_of_modes(
        self, known_seconds: float, room: float, deadline: float
    ) -> list[Proposal[RecomputedSharding]]:
        for blocks in self._modes:
            found = self._cheapest(known_seconds, room, deadline, blocks)
            if found is not None:
                return [found]
            if not self._failures or not isinstance(self._failures[-1], InfeasibleError):
                return []  # some may fit, none of them below what is known, or found in time
        return []

    def _data_parallel(self, room: float, deadline: float) -> list[Proposal[RecomputedSharding]]:
        """Return the batch split over all devices, everything else whole on each, if that can be.

        Its sums are hidden behind the last backward, and the surrogate charges them: it may simulate best.
        """
        cluster, request = self.judge.cluster, self.request
        if request.pins or request.mesh is not None or cluster.world_size == 1:
            return []
        if read_state_bytes(self.judge.graph, request.job) > self._smallest_bytes:  # each holds all of it
            return []
        other = replace(request, pins={"*": "data"}, mesh=(cluster.world_size,))
        alone = MeshProvider(self.judge, other, self.discovery)
        try:
            return alone._cheapest_of_modes(math.inf, room, deadline)
        except UsageError:  # the batch, or an op, cannot be split so
            return []

    def _cheapest(
        self, known_seconds: float, room: float, deadline: float, blocks: tuple[str, ...]
    ) -> Proposal[RecomputedSharding] | None:
        """Search with ``blocks`` computed again; None where nothing that fits is below what is known."""
        judge, left = self.judge, deadline - time.perf_counter()
        smallest = self._smallest_bytes
        request = replace(
            self.request,
            reserved_bytes=self.request.reserved_bytes + (1 - room) * smallest,
            time_limit_seconds=max(left, 0.0) if math.isfinite(left) else None,
        )
        self._failures.clear()
        survey = survey_meshes(
            judge.graph, judge.costs, judge.cluster, request, self.discovery,
            regions_of(judge.graph, blocks), known_seconds=known_seconds * self.slack,
            closely_seconds=known_seconds,
        )  # fmt: skip
        self._surveys.append(survey)
        if survey.failure is not None:
            self._failures.append(survey.failure)
        if survey.best is None:
            return None
        seconds = survey.best.cost.seconds
        tried = min(survey.proof.tried, key=lambda own: own.seconds)
        return Proposal(RecomputedSharding(survey.best, blocks), seconds, option=_words(tried))

    @property
    def _smallest_bytes(self) -> int:
        return min(device.room_bytes for device in self.judge.cluster.devices)

    def candidate(self, proposal: Proposal[RecomputedSharding]) -> Candidate:
        """Make the sharding one stage."""
        return sharded_candidate(self.judge.graph, proposal.solved.result.placement, proposal.solved.blocks)

    def leaner(
        self, judged: Judged[RecomputedSharding], room: float, known_seconds: float
    ) -> tuple[Proposal[RecomputedSharding], float] | None:
        """Search with as much less memory as the simulation needs more; with more computed again where none fits so."""
        smallest, found = self._smallest_bytes, judged.proposal.solved
        planned = mesh_room_bytes(self.judge.cluster, found.result.placement.mesh)
        unseen = planned + judged.simulated.overflow_bytes - found.result.cost.memory_bytes
        room = 1 - max((1 - room) + TUNING.least_reserve, unseen / smallest)
        until = time.perf_counter() + (self.request.time_limit_seconds or math.inf)
        smaller = self._cheapest(known_seconds, room, until, found.blocks)
        for blocks in self._modes[self._modes.index(found.blocks) + 1 :]:
            if smaller is None:
                room = 1.0
                smaller = self._cheapest(known_seconds, room, until, blocks)
        return None if smaller is None else (smaller, room)

    def proved(self) -> Proved:
        """Return the bound over all meshes and numbers of micro-batches, keeping activations if any fits so."""
        proofs = [own.proof for own in self._surveys]
        proof = next((own for own in proofs if math.isfinite(own.bound_seconds)), proofs[0])
        return Proved(
            proof.space,
            "dual ascent, then integer program over what it leaves",
            proof.bound_seconds,
            tuple(BoundTerm.of(f"mesh {_words(own)}", 1, own.bound_seconds) for own in proof.tried),
            "time limit" if proof.late else "",
        )

    def valued(self, proposal: Proposal[RecomputedSharding]) -> Valued:
        """Return the sum over the whole graph, which the search was checked by (``feature.place.check_agreement``)."""
        result = proposal.solved.result
        cost, m = result.cost, result.placement.microbatches
        details = ShardingDetails(cost.seconds, result.proof.tried, {0: result.origins})
        stage = StageTerms(1, (cost.op_seconds + cost.bridge_seconds) / m, cost.parameter_seconds, 0.0)
        return Valued(cost.seconds, PipelineTerms(1.0, m, 1, (stage,), (1,), ()), details)

    def refusal(self, tried: Sequence[Judged[RecomputedSharding]], room: float) -> PartitionerError:
        """Say why no sharding fits."""
        if not tried:
            return self._failures[-1]
        over = min(own.simulated.overflow_bytes for own in tried)
        return InfeasibleError(
            f"no sharding of {self.judge.graph.model_name} was found whose simulated step fits {self.judge.cluster.name}",
            [f"the best of {counted(len(tried), 'search')} exceeds a device by {format_bytes(over)}"],
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


def _words(tried: MeshTried) -> str:
    return f"{'×'.join(map(str, tried.shape))}, {counted(tried.microbatches, 'micro-batch')}"
