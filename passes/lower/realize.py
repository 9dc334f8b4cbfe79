"""The one way from a placement to a simulated step, whatever the strategy.

candidate ─► segments ─► their costs, sums of gradients, state ─► one program per group ─► simulated step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from cost_models.cluster import ClusterSpec
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.graph.state import owning_units
from passes.lower.candidate import Candidate
from passes.lower.costed import Costed, costed_segments
from passes.lower.job import Job
from passes.lower.mesh_stages import MeshStages
from passes.lower.segment import Segmentation, by_reach, by_stage
from passes.lower.step import left_beside, programs_for, simulate_step
from runtime.program.members import GroupPrograms
from runtime.program.program import Program
from runtime.simulate.simulation import Simulation


@dataclass(frozen=True, eq=False)
class Realized(Costed):
    """A placement carried through to programs and their simulation."""

    groups_programs: GroupPrograms = field(kw_only=True)
    """One program per group of ranks that run segments together."""
    simulation: Simulation = field(kw_only=True)
    """The simulated step of these programs."""

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """One program per rank."""
        return self.groups_programs.all()


def realize(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    job: Job,
    candidate: Candidate,
    segmentation: Segmentation | None = None,
    stages: MeshStages | None = None,
) -> Realized:
    """Carry a candidate through segments, schedule, order and simulation.

    ``segmentation``: the candidate's segments, where they are known or were merged; ``stages``: those of other candidates.
    """
    segmentation = segmentation or segmented(graph, candidate, recomputed_ops(graph))
    costed = costed_segments(graph, costs, cluster, job, candidate, segmentation, stages)
    programs = programs_for(
        costed.segments,
        cluster,
        candidate.schedule,
        candidate.microbatches,
        costed.tied,
        left_bytes=left_beside(costed.step.state_bytes, (d.room_bytes for d in cluster.devices)),
        one_queue=candidate.one_queue,
    )
    sizes = job.sizes(candidate.microbatches)
    simulation = simulate_step(programs, cluster, costed.step, sizes)
    return Realized(**vars(costed), groups_programs=programs, simulation=simulation)


def segmented(
    graph: OpGraph,
    candidate: Candidate,
    recomputed: frozenset[str],
    unit_of: Mapping[str, int] | None = None,
) -> Segmentation:
    """The segments of a candidate.

    ``unit_of``: the ops that are never parted (``passes.graph.state.owning_units``), where that is known.
    """
    if candidate.contiguous:
        meshes = [
            candidate.shardings[stage].mesh if stage in candidate.shardings else None
            for stage in range(len(candidate.groups))
        ]
        elsewhere = recomputed.difference(candidate.stage_of)
        blocks = candidate.recomputed_blocks
        return by_stage(graph, candidate.stage_of, candidate.groups, elsewhere, blocks, meshes)
    group_of = {name: candidate.groups[stage] for name, stage in candidate.stage_of.items()}
    if unit_of is None:
        unit_of = owning_units(graph, recomputed)
    return by_reach(graph, group_of, recomputed, unit_of)
