"""The surrogate of one candidate as it is defined, op by op.

    stage     its pieces, each with every op, bridge and parameter in it (``passes.search.feature.evaluate``)
    cut       bytes of the values alive there, and of their gradients, over the links between both groups
    step      fill · Σ (stage + cut) + (micro-batches - fill) · chunks · T, T the longest of stages, cuts and waits

It reads a candidate and the graph: the search's recipes, ranges, tables and programs must agree, and are checked by it.
Ops that every piece runs a copy of, and gradients that are summed together, are counted per piece, as the search does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations

from cost_models.cluster import ClusterSpec
from cost_models.conversion import local_share
from cost_models.errors import InternalError
from cost_models.layout import Mesh, Placement, Replicate
from passes.costs.costs import costs_of
from passes.graph.blocks import GATHERS, SELECTIVE, regions_of
from passes.graph.graph import OpGraph, tensor_specs
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.search.certificate import PipelineTerms, StageTerms, in_rows
from passes.search.feature.evaluate import WholeGraph
from passes.search.feature.graph import makes_values
from passes.search.feature.options import bytes_of
from passes.search.feature.setting import PartPlace, Setting, joined_links
from passes.search.hybrid.recipes.joints import Pieces, value_bytes
from passes.search.layer.options import ScheduleOption, in_flight
from passes.search.recomputed import Recomputed
from passes.shard.words import Choice, FeaturePlacement, Need, Placements, operands

AGREEMENT = 1e-9
"""Relative difference that sums in another order may make."""


@dataclass(frozen=True)
class StageCost:
    """One stage, or one piece of it."""

    microbatch_seconds: float
    """Seconds of everything that runs in each micro-batch."""
    once_seconds: float
    """Seconds per step of what runs once in it."""
    state_bytes: float
    """Held all the time: parameters, gradients, optimizer state, buffers, the batch."""
    held_bytes: float
    """Held per micro-batch in flight."""
    buffer_bytes: float
    """The largest buffer of any bridge, and the most that the backward of an op works in."""

    def __add__(self, other: StageCost) -> StageCost:
        return StageCost(
            self.microbatch_seconds + other.microbatch_seconds,
            self.once_seconds + other.once_seconds,
            self.state_bytes + other.state_bytes,
            self.held_bytes + other.held_bytes,
            max(self.buffer_bytes, other.buffer_bytes),
        )


NOTHING = StageCost(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class PipelineCost:
    """The costs of a candidate."""

    stages: tuple[StageCost, ...]
    terms: PipelineTerms

    @property
    def objective_seconds(self) -> float:
        """The surrogate of a step."""
        return self.terms.objective_seconds


@dataclass(eq=False)
class CandidateCost:
    """Evaluates candidates of one model on one cluster."""

    pieces: Pieces
    cluster: ClusterSpec
    job: Job
    shared: frozenset[str]
    """Parameters and buffers of several pieces: whole on every rank."""
    _known: dict[object, StageCost] = field(default_factory=dict)
    _hardware: dict[Mesh, object] = field(default_factory=dict)

    def evaluated(self, candidate: Candidate, values: Mapping[str, Placements]) -> PipelineCost:
        """Return what ``candidate`` costs; O(ops · operands) of the pieces that differ. ``values``: at joints in stages."""
        stages = [NOTHING for _ in candidate.groups]
        for piece, ops in enumerate(self.pieces.ops):
            number = candidate.stage_of[ops[0]]
            stages[number] += self._of_piece(candidate, number, piece, values)
        groups = len(set(candidate.groups))
        chunks = len(stages) // groups
        alone = ScheduleOption(candidate.microbatches, candidate.schedule, chunks)
        held = in_flight(alone, groups, len(stages))[::-1]
        sizes = self._cut_bytes(candidate)
        terms = tuple(
            StageTerms(
                1, own.microbatch_seconds, own.once_seconds, self._cut_seconds(candidate, number, sizes)
            )
            for number, own in enumerate(stages)
        )
        return PipelineCost(
            tuple(stages),
            PipelineTerms(
                alone.fill(groups), candidate.microbatches, chunks, in_rows(terms), tuple(held), ()
            ),
        )

    def _of_piece(
        self,
        candidate: Candidate,
        number: int,
        piece: int,
        values: Mapping[str, Placements],
    ) -> StageCost:
        part, group = self.pieces.parts[piece], candidate.groups[number]
        placed = _placed(part, candidate, number, values)
        blocks = candidate.recomputed_blocks[number] if candidate.recomputed_blocks else ()
        again = bool(self.pieces.blocks[piece]) and self.pieces.blocks[piece] in blocks
        within = tuple(name for name in (GATHERS, SELECTIVE) if name in blocks)
        key = (
            self.pieces.kind[piece],
            self._hardware_of(placed.mesh),
            again,
            within,
            candidate.microbatches,
            _in_order(part, placed),
        )
        if key not in self._known:
            place = PartPlace(group, placed.mesh.axes, shared=self.shared.intersection(part.parameters))
            regions = (self.pieces.ops[piece],) if again else regions_of(part, within)
            setting = Setting(self.cluster, self.job, 0.0, regions, place)
            self._known[key] = _cost(
                _Piece(
                    part,
                    costs_of(part, self.cluster),
                    placed,
                    setting,
                    self.pieces.kind.count(self.pieces.kind[piece]),
                )
            )
        return self._known[key]

    def _hardware_of(self, mesh: Mesh) -> object:
        """Return all of a mesh that costs follow from: its axes, their links, by themselves and together, its devices."""
        if mesh not in self._hardware:
            axes = range(len(mesh.shape))
            together = (some for count in axes for some in combinations(axes, count + 1))
            links = tuple(joined_links(mesh, some, self.cluster) for some in together)
            self._hardware[mesh] = mesh.shape, mesh.axes, links, self.cluster.unlike(mesh.ranks)
        return self._hardware[mesh]

    def _cut_bytes(self, candidate: Candidate) -> list[int]:
        """Return the bytes that cross in front of each stage, values and gradients."""
        graph, stage_of = self.pieces.graph, candidate.stage_of
        found = [0] * len(candidate.groups)
        for node in graph.ops:
            readers = [stage_of[user.name] for user in node.users if user.name in stage_of]
            crossed = range(stage_of.get(node.name, len(found)) + 1, max(readers, default=-1) + 1)
            if crossed:
                size = value_bytes(graph, node.name, self.job.batch_size // candidate.microbatches)
                for number in crossed:
                    found[number] += size * (2 if node.name in graph.needs_grad else 1)
        return found

    def _cut_seconds(self, candidate: Candidate, number: int, sizes: Sequence[int]) -> float:
        """Seconds of the cut in front of a stage, where ``sizes`` bytes cross; 0 of the first."""
        if number == 0:
            return 0.0
        before, behind = candidate.groups[number - 1 : number + 1]
        path = self.cluster.path(before[-1], behind[0])
        rate = path.bandwidth_bytes_per_second * min(len(before), len(behind))
        return 2 * path.latency_seconds + sizes[number] / rate


@dataclass(frozen=True, eq=False)
class _Piece(WholeGraph):
    """A piece of a stage: of what its block saves, when it is computed again, whoever composes pieces takes account."""

    alike: int
    """See ``Recomputed``."""

    @cached_property
    def again(self) -> Recomputed:
        return Recomputed(self.graph, self.costs, self.setting.again, self.alike)


def _cost(whole: WholeGraph) -> StageCost:
    seconds, saved, working = whole.ops()
    bridges, copies, buffer, _, deferred = whole.bridges()
    inside, _ = whole.inside_ops()
    once, kept, _ = whole.placeholders(deferred)
    shape, needs = whole.placement.mesh.shape, whole.needs()
    arriving = sum(
        bytes_of(tensor_specs(whole.graph.nodes[given.node])[0], whole.symbols)
        * local_share(whole.produced((given.node, 0)), shape)
        for given in whole.graph.inputs
        if given.kind == "value" and (given.node, 0) in needs
    )
    hidden = whole.hidden_seconds() + whole.hidden_gather_seconds()
    each = math.fsum(seconds.values()) + bridges - hidden + inside
    return StageCost(each, once, kept - arriving, saved + copies + arriving, buffer + working)


def _placed(
    part: OpGraph, candidate: Candidate, number: int, values: Mapping[str, Placements]
) -> FeaturePlacement:
    """Return the part of a stage's placement that a piece is."""
    own, crossing = candidate.shardings.get(number), _crossing(part)
    ops = [node for node in part.ops if makes_values(node)]
    if own is None:
        whole: Placement = Replicate()
        alone = {
            node.name: (Choice((Need(whole),) * len(operands(node)), (whole,) * len(tensor_specs(node))),)
            for node in ops
        }
        mesh = Mesh(candidate.groups[number], (1,), ("tensor",))
        layouts: dict[str, Placements] = dict.fromkeys(crossing, (whole,))
        return FeaturePlacement(mesh, alone, {}, {}, candidate.microbatches, values=layouts)
    layouts = {name: own.values[name] if name in own.values else values[name] for name in crossing}
    return replace(own, choices={node.name: own.choices[node.name] for node in ops}, values=layouts)


def _crossing(part: OpGraph) -> list[str]:
    """List the values that a part takes and makes."""
    found = [given.name for given in part.inputs if given.kind == "value"]
    return found + [output.name for output in part.outputs if output.kind == "value"]


def _in_order(part: OpGraph, placed: FeaturePlacement) -> object:
    """Return a part's placement without names: equal for equal parts that are placed alike."""
    whole = (Replicate(),) * len(placed.mesh.shape)
    given = tuple(
        (placed.stored.get(x.name, whole), placed.sharded_state.get(x.name), placed.batch.get(x.name))
        for x in part.inputs
    )
    choices = tuple(placed.choices.get(node.name) for node in part.ops)
    returned = tuple(placed.returned.get(name) for name in _crossing(part))
    return choices, given, tuple(placed.values[name] for name in _crossing(part)), returned


def check_agreement(cost: PipelineCost, objective_seconds: float, unlike: Collection[str]) -> None:
    """Raise ``InternalError`` if a search's objective is not what its candidate costs.

    ``unlike``: what pieces of a stage would place in unlike ways; the stage has one of them, and so costs something else.
    """
    off = AGREEMENT * max(cost.objective_seconds, objective_seconds)
    if abs(cost.objective_seconds - objective_seconds) > off and not unlike:
        raise InternalError(
            "hybrid search: its objective is not what the pipeline costs",
            [
                f"{cost.objective_seconds!r} s of every op, bridge, parameter and cut",
                f"{objective_seconds!r} s by its tables",
                f"{len(cost.stages)} stages, {cost.terms.microbatches} micro-batches",
            ],
            ["fix='pipeline=… tensor=…', and a report with the model"],
        )
