"""The outcome of a search, whatever the strategy: the best candidate, what else was looked at, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cost_models.units import counted
from passes.lower.candidate import Candidate, Trail
from passes.search.certificate import Certificate
from passes.search.judge import Carried, Judge, Simulated
from passes.split.split import Split


@dataclass(frozen=True)
class PlacedWay:
    """One way that something could have been placed, and the step with it, everything else as it is. Seconds per step."""

    layout: str
    """The layout, or the device, by its name."""
    step_seconds: float
    """Seconds of the step."""
    computes_seconds: float
    """Seconds of the ops themselves, all equals together."""
    sends_seconds: float
    """Seconds of messages, bridges, sums of gradients and updates."""
    memory_bytes: float
    """Memory of one device."""
    chosen: bool
    possible: bool = True
    """True if its bridges may be used at all."""


@dataclass(frozen=True)
class Label:
    """A candidate in a few words, and the kind by which runner-ups are told apart."""

    text: str
    kind: tuple[object, ...]

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def of(candidate: Candidate) -> Label:
        """Label a pipeline, of single devices or of groups, or a sharding of all ops."""
        if not candidate.shardings:
            return Label.of_stages(candidate)
        if len(candidate.groups) == 1:
            return Label.of_mesh(candidate.shardings[0].mesh.shape, candidate.microbatches)
        return Label.of_groups(candidate)

    @staticmethod
    def of_stages(candidate: Candidate) -> Label:
        """Label a pipeline: ``8 stages, 1f1b, 32 micro-batches, 2 stages recompute``; splits of a schedule are alike."""
        schedule, count = candidate.schedule, candidate.microbatches
        text = f"{counted(len(candidate.groups), 'stage')}, {schedule}, {counted(count, 'micro-batch')}"
        if recomputing := sum(map(bool, candidate.recomputed_blocks)):
            text += f", {counted(recomputing, 'stage')} recompute"
        return Label(text, (schedule, count))

    @staticmethod
    def of_groups(candidate: Candidate) -> Label:
        """Label a pipeline of sharded stages: ``4 groups of data 2 × tensor 2, 1f1b, 8 micro-batches``."""
        plan, sharding = Label.of_stages(candidate), next(iter(candidate.shardings.values()), None)
        groups = len(dict.fromkeys(candidate.groups))
        if sharding is None:
            return plan
        mesh = " × ".join(
            f"{axis} {size}" for axis, size in zip(sharding.mesh.axes, sharding.mesh.shape, strict=True)
        )
        head = f"{mesh}, " if groups == 1 else f"{counted(groups, 'group')} of {mesh}, "
        return Label(f"{head}{plan}", (*plan.kind, groups, sharding.mesh.axes, sharding.mesh.shape))

    @staticmethod
    def of_layer_wise(candidate: Candidate) -> Label:
        """Label the layer-wise plan that a free search began with."""
        plan = Label.of_stages(candidate)
        return Label(f"layer-wise: {plan}", ("layer-wise", *plan.kind))

    @staticmethod
    def of_trail(trail: Trail, microbatches: int) -> Label:
        """Label a free placement by the way it was found: ``earliest finish, moved, 8 micro-batches``, numbers aside."""
        origins = tuple(origin for origin, _ in trail.steps)
        return Label(f"{trail}, {counted(microbatches, 'micro-batch')}", (origins, microbatches))

    @staticmethod
    def of_variant(segments: int, microbatches: int, splits: int) -> Label:
        """Label the best free placement of one graph: ``14 segments, 2 micro-batches, 3 ops split`` in blocks."""
        text = f"{counted(segments, 'segment')}, {counted(microbatches, 'micro-batch')}"
        text += f", {counted(splits, 'op')} split" if splits else ""
        return Label(text, (segments, microbatches, splits))

    @staticmethod
    def of_mesh(shape: tuple[int, ...], microbatches: int) -> Label:
        """Label a sharding of all ops: ``mesh 2×4, 8 micro-batches``."""
        text = f"mesh {'×'.join(map(str, shape))}, {counted(microbatches, 'micro-batch')}"
        return Label(text, (shape, microbatches))


@dataclass(frozen=True)
class RunnerUp:
    """A candidate that was not chosen."""

    label: Label
    step_seconds: float
    """Seconds of the simulated step, or the bound that excluded it."""
    peak_bytes: int
    """Peak memory of the fullest device, simulated or as the search estimates it."""
    overflow_bytes: int = 0
    """Bytes beyond the room of the fullest device; 0 or less if all fit."""
    chance: float | None = None
    """Chance that a device needs more memory than it has; None where a peak is estimated on one of unlike devices."""
    bounded: bool = False
    """True where it was proved slower without a simulation."""
    named: bool = False
    """True for the plan that the search began with, and those that people know by name: always listed, even among many
    faster ones."""

    @property
    def fits(self) -> bool:
        """True if every device has the room for it."""
        return self.overflow_bytes <= 0

    @staticmethod
    def of(label: Label, simulated: Simulated) -> RunnerUp:
        """Keep the figures of a simulated candidate."""
        peak_bytes = max(simulated.peak_bytes)
        return RunnerUp(label, simulated.step_seconds, peak_bytes, simulated.overflow_bytes, simulated.chance)


@dataclass(frozen=True)
class MeshTried:
    """One mesh and number of micro-batches that the feature-wise search looked at."""

    shape: tuple[int, ...]
    microbatches: int
    status: str
    """The end of its search: a status of ``passes.search.feature.solve``."""
    seconds: float
    """Seconds of its best sharding by the search's own count; infinite where none was better than the best before."""
    bound_seconds: float
    search_seconds: float


@dataclass(frozen=True)
class ChoiceOrigins:
    """Origins of the choices of a sharding, in ops."""

    by_rule: int
    discovered: int
    replicated: tuple[str, ...]
    """Ops that can only run whole on every rank."""
    replicated_seconds: float
    """Seconds of a step that those take."""
    replicated_matmul_share: float
    """Share of the FLOPs of matrix products, convolutions and attention in ops that an axis or more does not split."""
    whole: Mapping[str, float]
    """Ops of which only one way is known, for want of a rule or by it, with the seconds of a step that they and what is
    sent for them take. (Numbers that are counted or compared aside: masks, positions.)"""


@dataclass(frozen=True)
class ShardingDetails:
    """The search of shardings. ``seconds``: a step's by the search's own count, to compare ``tried`` with."""

    seconds: float
    tried: tuple[MeshTried, ...]
    origins: Mapping[int, ChoiceOrigins]
    """Stage -> origins of its choices."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The answer of every search."""

    best: Simulated
    judge: Judge
    """The judge that simulated it; it knows the graph that was placed, and keeps what the best became."""
    certificate: Certificate
    runner_ups: tuple[RunnerUp, ...] = ()
    splits: tuple[Split, ...] = ()
    """Ops of the model that run in blocks of neurons."""
    details: ShardingDetails | None = None
    """The search of the sharding; None for placements of whole ops."""

    @property
    def carried(self) -> Carried:
        """The best candidate with its programs and their simulation."""
        return self.judge.carried(self.best.candidate)

    @property
    def label(self) -> Label:
        """The best candidate in a few words."""
        candidate = self.best.candidate
        if candidate.contiguous or candidate.shardings:
            return Label.of(candidate)
        return Label.of_variant(len(self.carried.realized.groups), candidate.microbatches, len(self.splits))
