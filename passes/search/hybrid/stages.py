"""The sharding of each stage on its group: the feature-wise search on the stage's own graph, equal stages once.

stage's ops ─► a graph of its own, values of other stages as inputs ─► place_features on the group's mesh
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cost_models.cluster import ClusterSpec
from cost_models.conversion import local_share
from cost_models.errors import InfeasibleError, TimeLimitError, UsageError
from cost_models.layout import Layout, Replicate
from cost_models.units import counted
from passes.costs.costs import costs_of
from passes.graph.blocks import regions_of_stages
from passes.graph.graph import OpGraph
from passes.graph.part import part_of
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.lower.segment import Segmentation
from passes.lower.summarize import shared_state
from passes.search.feature.pins import Pin, pins_of_part
from passes.search.feature.place import FeatureRequest, FeatureResult, place_features
from passes.search.feature.setting import PartPlace
from passes.search.hybrid.decode import only_its_sizes, renamed
from passes.search.hybrid.fixed import Fixed
from passes.search.hybrid.recipes.joints import structure_of
from passes.search.judge import Judge
from passes.search.outcome import ChoiceOrigins
from passes.search.recomputed import Regions
from passes.shard.discover import Discovery
from passes.shard.words import FeaturePlacement, Placements

MAX_AXES = 2
"""Axes of a group's mesh where it is searched: replicas, and what shares an op."""

Axes = tuple[tuple[str, int, str], ...]
"""(name, size, pattern) of each axis of a group's mesh."""


@dataclass(frozen=True)
class StageWish:
    """One stage to shard, and what is fixed of it."""

    ops: tuple[str, ...]
    group: tuple[int, ...]
    axes: Axes | None
    """None: searched."""
    pins: Mapping[str, Pin]
    """The pins of the whole model's nodes."""
    again: Regions = ()
    """The ops of each block that backward computes again."""


@dataclass(frozen=True)
class StageSharded:
    """A stage's placement, where its choices come from, and its seconds by the search's own count."""

    placement: FeaturePlacement
    origins: ChoiceOrigins
    seconds: float


@dataclass
class StageSearch:
    """Shards the stages of one number of micro-batches, in their order."""

    graph: OpGraph
    cluster: ClusterSpec
    job: Job
    microbatches: int
    copied: frozenset[str]
    """Ops of which every stage has copies of its own."""
    shared: frozenset[str]
    """Parameters and buffers that several stages read."""
    time_limit_seconds: float | None
    _known: dict[object, tuple[OpGraph, StageSharded]] = field(default_factory=dict)
    _parts: dict[tuple[str, ...], OpGraph] = field(default_factory=dict)

    def shard(self, stages: Sequence[StageWish]) -> dict[int, StageSharded]:
        """Shard every stage that several devices share. All stages of a group are on one mesh, on which a value or a part
        of the batch arrives in one layout. What is fixed of everything must hold in one stage, in others where it can."""
        found: dict[int, StageSharded] = {}
        meshes: dict[tuple[int, ...], tuple[int, ...]] = {}
        settled: dict[tuple[str, str, tuple[int, ...]], tuple[Placements, Placements]] = {}
        leaving: dict[str, Layout] = {}
        asked, refused = 0, list[UsageError]()
        for number, stage in enumerate(stages):
            if len(stage.group) == 1:
                continue
            part = self._part(stage.ops)
            arriving: dict[tuple[str, str], tuple[Placements, Placements]] = {
                (given.kind, given.name): settled[given.kind, given.name, stage.group]
                for given in part.inputs
                if (given.kind, given.name, stage.group) in settled
            }
            pins = pins_of_part(part, stage.pins, arriving, self.shared)
            try:
                shares = {n: returned_share(leaving.get(n), len(stage.group)) for n in _values_of(part)}
                asked += any(map(_is_about, pins.values()))
                try:
                    own = self._sharded(part, replace(stage, pins=pins), meshes.get(stage.group), shares)
                except UsageError as error:
                    pins = {node: _where_it_can(pin) for node, pin in pins.items()}
                    own = self._sharded(part, replace(stage, pins=pins), meshes.get(stage.group), shares)
                    refused.append(error)
            except (UsageError, InfeasibleError, TimeLimitError) as error:
                because = [f"on {counted(len(stage.group), 'device')}: {error.what}", *error.because]
                raise type(error)(f"cannot shard stage {number}", because, error.suggestions) from error
            found[number], whole = own, (Replicate(),) * len(own.placement.mesh.shape)
            meshes[stage.group] = own.placement.mesh.shape
            for given in part.inputs:
                if given.kind == "batch" and not only_its_sizes(part, given.node):
                    layout = own.placement.batch.get(given.name, whole)
                    settled["batch", given.name, stage.group] = layout, layout
            for name, layout in own.placement.values.items():
                settled.setdefault(
                    ("value", name, stage.group), (layout, own.placement.returned.get(name, layout))
                )
            made = {output.name for output in part.outputs if output.kind == "value"}
            leaving |= {n: Layout(own.placement.mesh, own.placement.values[n]) for n in made}
        if refused and len(refused) == asked:
            first = refused[0]
            raise UsageError("cannot shard any stage so", [first.what, *first.because], first.suggestions)
        return {k: _with_batch(own, stages[k].group, settled) for k, own in found.items()}

    def _part(self, ops: tuple[str, ...]) -> OpGraph:
        if ops not in self._parts:
            self._parts[ops] = part_of(self.graph, ops, self.copied)
        return self._parts[ops]

    def _sharded(
        self,
        part: OpGraph,
        stage: StageWish,
        mesh: tuple[int, ...] | None,
        shares: Mapping[str, float],
    ) -> StageSharded:
        """Search a stage, or read what an equal one was found to be. ``mesh``: that of its group, where it is known.

        ``shares``: of the gradients of values that arrive, as ``PartPlace`` has them.
        """
        if stage.axes is not None:
            mesh = tuple(size for _, size, _ in stage.axes)
        place = PartPlace(
            stage.group,
            tuple(name for name, _, _ in stage.axes or ()),
            self._crossing_seconds_per_byte(stage.group),
            self.shared.intersection((*part.parameters, *part.buffers)),
            shares,
        )
        position = {node.name: number for number, node in enumerate(part.graph.nodes)}
        marks = {node: pin.mark for node, pin in stage.pins.items()}
        devices = tuple(self.cluster.devices[rank] for rank in stage.group)
        key = (
            structure_of(part, {**marks, **dict.fromkeys(_nodes_of(part, place.shared), "shared")}),
            stage.axes,
            mesh,
            tuple(tuple(position[op] for op in names) for names in stage.again),
            place.crossing_seconds_per_byte,
            tuple(shares.values()),
            tuple((d.speed_alone, d.room_bytes, d.node - devices[0].node) for d in devices),
        )
        if key not in self._known:
            request = FeatureRequest(
                self.job,
                microbatches=self.microbatches,
                time_limit_seconds=self.time_limit_seconds,
                mesh=mesh,
                max_axes=MAX_AXES,
                part=place,
            )
            costs = costs_of(part, self.cluster)
            result = place_features(
                part, costs, self.cluster, request, Discovery.stored(), stage.again, stage.pins
            )
            self._known[key] = part, _stage_sharded(result)
        first, known = self._known[key]
        return replace(known, placement=renamed(known.placement, first, part, stage.group))

    def _crossing_seconds_per_byte(self, group: tuple[int, ...]) -> float:
        """Seconds of a byte from the nearest device outside of the group."""
        outside = {group[0] - 1, group[-1] + 1} & set(range(self.cluster.world_size))
        paths = [self.cluster.path(min(group, key=lambda r, o=other: abs(r - o)), other) for other in outside]  # type: ignore[misc]
        return max((1.0 / path.bandwidth_bytes_per_second for path in paths), default=0.0)


def _is_about(pin: Pin) -> bool:
    """Tell whether a pattern of everything is about this node."""
    return pin.pattern and pin.glob == "*" and any(rule is not None and rule.essential for rule in pin.rules)


def _where_it_can(pin: Pin) -> Pin:
    """Make a pattern of everything one that need not hold: a head alone has no rows to follow its columns."""
    if not _is_about(pin):
        return pin
    return replace(
        pin, rules=tuple(None if rule is None else replace(rule, essential=False) for rule in pin.rules)
    )


def returned_share(leaving: Layout | None, ranks: int) -> float:
    """Return the share of a value's gradient that a part of its sum adds for the busiest rank: of as many ``ranks`` as send
    it back, or of those that have the value as ``leaving``; None: a single rank has it."""
    if leaving is None:
        return 1.0
    received = local_share(leaving.placements, leaving.mesh.shape)
    return received * max(1.0, len(leaving.ranks) / ranks)


def _values_of(part: OpGraph) -> list[str]:
    """List the values of other parts, in the order of the graph."""
    return [given.name for given in part.inputs if given.kind == "value"]


def _with_batch(
    own: StageSharded,
    group: tuple[int, ...],
    settled: Mapping[tuple[str, str, tuple[int, ...]], tuple[Placements, Placements]],
) -> StageSharded:
    """Return a stage that takes the leaves of which it reads only sizes as other stages of its group take them."""
    batch = {
        name: settled.get(("batch", name, group), (layout, layout))[0]
        for name, layout in own.placement.batch.items()
    }
    return replace(own, placement=replace(own.placement, batch=batch))


def _nodes_of(part: OpGraph, names: frozenset[str]) -> list[str]:
    return [given.node for given in part.inputs if given.name in names]


def _stage_sharded(result: FeatureResult) -> StageSharded:
    return StageSharded(result.placement, result.origins, result.cost.seconds)


def shard_stages(judge: Judge, fixed: Fixed, candidate: Candidate) -> dict[int, StageSharded]:
    """Shard each stage of a pipeline as a whole, as it is fixed. Raises what ``StageSearch.shard`` does."""
    stage_of, groups = candidate.stage_of, candidate.groups
    ops: list[list[str]] = [[] for _ in groups]
    for name, stage in stage_of.items():
        ops[stage].append(name)
    regions = regions_of_stages(judge.graph, stage_of, candidate.recomputed_blocks or ((),) * len(groups))
    shared = shared_state(judge.graph, Segmentation(stage_of, groups, judge.recomputed))
    search = StageSearch(
        judge.graph, judge.cluster, judge.job, candidate.microbatches, judge.recomputed, shared,
        fixed.request.time_limit_seconds,
    )  # fmt: skip
    return search.shard(
        [
            StageWish(tuple(own), group, fixed.axes(group), fixed.whole_pins(number, group), again)
            for number, (own, group, again) in enumerate(
                zip(ops, groups, regions or ((),) * len(groups), strict=True)
            )
        ]
    )
