"""Random pipelines of sharded stages: cuts before any ops, groups of any sizes, every layout drawn at random.

    python -m benchmarks.fuzz --strategies hybrid [--models 0:50] [--plans 20]

The search plans each stage on its group as always; then every op, parameter, part of the batch, and value that arrives or
leaves is given some way that divides. Only what another stage of the group has settled is left as it is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from cost_models.layout import Partial
from passes.graph.graph import OpGraph
from passes.search.feature.options import Options
from passes.search.feature.place import FeatureRequest, FeatureResult, place_features
from passes.search.feature.result import assemble
from passes.search.hybrid.fixed import stages_at_borders
from passes.search.hybrid.provider import GroupsProvider
from passes.search.hybrid.solve import SolvedOption
from passes.search.provider import Proposal
from runtime.schedules import SCHEDULES

GROUPS = (
    (2,),
    (3,),
    (4,),
    (1, 1),
    (1, 2),
    (2, 1),
    (2, 2),
    (1, 3),
    (3, 1),
    (1, 1, 1),
    (2, 1, 1),
    (1, 2, 1),
    (1, 1, 2),
    (1, 1, 1, 1),
)
"""Every division of at most four devices."""
MESHES: dict[int, tuple[tuple[int, ...], ...]] = {2: ((2,),), 3: ((3,),), 4: ((4,), (2, 2))}
SAMPLES = (3, 4, 6, 12)
"""Of a micro-batch: what groups of two, of three and of four divide, and what they do not."""


def random_pipeline(draw: random.Random, graph: OpGraph) -> tuple[ClusterSpec, dict[str, Any]]:
    """Draw a cluster and options of ``partition``. Raises UsageError for a model that cannot be cut so often."""
    groups = draw.choice(GROUPS)
    schedule = draw.choice([name for name in SCHEDULES if not name.startswith("list")])
    chunks = SCHEDULES[schedule].chunks or draw.choice([2, 3])
    stages = len(groups) * chunks
    microbatches = draw.choice(
        [m for m in (1, 2, 3, 4) if not SCHEDULES[schedule].check(stages, len(groups), m)]
    )
    fix: dict[str, Any] = {"groups": groups, "recompute": draw.choice(["none", "none", "full"])}
    if stages > 1:
        fix |= {"borders": _borders(draw, graph, stages), "interleave": chunks}
    options = {
        "strategy": "hybrid",
        "fix": fix,
        "schedule": schedule,
        "microbatches": microbatches,
        "batch_size": microbatches * draw.choice(SAMPLES),
        "optimizer_memory": draw.choice(["none", "sgd", "momentum", "adamw"]),
    }
    return ClusterSpec.local(sum(groups)), options


def _borders(draw: random.Random, graph: OpGraph, stages: int) -> tuple[str, ...]:
    """Draw the ops that begin the second stage, and so on, where nothing that must stay together is parted."""
    names = [node.name for node in graph.ops][1:]
    for _ in range(50):
        places = sorted(draw.sample(range(len(names)), min(stages - 1, len(names))))
        borders = tuple(names[place] for place in places)
        try:
            stage_of = stages_at_borders(graph, borders, stages)
        except UsageError:
            continue
        if len(set(stage_of.values())) == stages:
            return borders
    raise UsageError(f"cannot cut {graph.model_name} into {stages} stages", [f"it has {len(names)} ops"])


@contextmanager
def random_layouts(draw: random.Random) -> Iterator[None]:
    """Let the hybrid search find anything for a stage that would give the right numbers."""

    def placed(*arguments: Any) -> FeatureResult:
        graph, costs, cluster, request, discovery, again, pins = arguments
        assert isinstance(request, FeatureRequest)
        if request.mesh is None:
            assert request.part is not None
            request = replace(request, mesh=draw.choice(MESHES[len(request.part.ranks)]))
        found = place_features(graph, costs, cluster, request, discovery, again, pins)
        options = []
        for unit, numbers in zip(found.problem.space.units, found.problem.units, strict=True):
            detail = numbers.detail
            ways = list(range(detail.count if isinstance(detail, Options) else len(detail)))
            if (pin := pins.get(unit.name)) is not None and pin.firm:
                ways = numbers.index.tolist()
            if (
                unit.kind == "value" and draw.random() < 0.5
            ):  # of many ways, the few whose gradient goes back in parts
                assert not isinstance(detail, Options)
                summed = [k for k in ways if any(isinstance(way.state, Partial) for way in detail[k])]
                ways = summed or ways
            options.append(draw.choice(ways) if ways else 0)
        return replace(found, placement=assemble(found.problem, options))

    proposals = GroupsProvider.proposals

    def drawn(self: GroupsProvider, *asked: float) -> Sequence[Proposal[SolvedOption]]:
        """Leave out the pipeline of the search's own layouts, which is faster."""
        found = proposals(self, *asked)
        return [own for own in found if own.identity is not None] or found

    with (
        mock.patch("passes.search.hybrid.stages.place_features", placed),
        mock.patch.object(GroupsProvider, "proposals", drawn),
    ):
        yield
