"""The layer-wise problem as numbers: units, what they hold and send, devices, links. No graph, no torch.

Words
    unit         ops that stay together; units are numbered in a topological order
    downset      a set of units that contains every producer of its members; ∅ ⊂ D1 ⊂ … ⊂ Dp = all units
    stage s      the units D(s) \\ D(s-1); it runs on one device and is never empty
    cut s        the boundary into stage s; what is produced before it and read after it crosses it
    k            a stage counted from the end: the last stage has k = 1
    kind         devices that are interchangeable in the search, or one device of a fixed order

Surrogate, minimized exactly by ``passes.search.layer.search``
    t_s   forward + backward seconds of stage s on its device, per micro-batch
    x_s   link seconds of cut s: latency + (activation bytes + gradient bytes) · seconds per byte. A value that skips
          stages is counted at every cut it crosses: an upper estimate
    r_k   round trip of a micro-batch from the k-th stage from the end to the last and back, per micro-batch that this
          stage holds at once (Little's law): Σ over the stages behind it, itself included, of t and of x between them,
          divided by in_flight[k]·v; left out where all m micro-batches are held at once
    q     pair of stages that run one forward and one backward in turn (1F1B): both directions of their cut share
          one queue, in one order. Say the gradient of one micro-batch goes before the activation of the next:
          then the later stage cannot start that forward until its own backward is done and x has passed, so
          t_later + x ≤ T; the other order delays the earlier stage alike. Each such cut is charged to one of
          its two stages, the cheapest way: q = max over s of (t_s + cuts charged to s). Cuts behind a stage
          that holds all m micro-batches at once are not charged.
    T     = max over s of (t_s, x_s, r_s, q)
    step  = fill · Σ_s (t_s + x_s) + (m - fill) · v · T

with m micro-batches and v chunks per device. ``fill`` is the share of the pipeline's filling and draining
that a schedule cannot hide: 1 for GPipe and 1F1B (p equal stages and free links: (m + p - 1)·t, the closed
form), of others less, but not where micro-batches are few (``ScheduleOption.fill``). With v > 1 the busiest device is
bounded from above by v times its largest chunk.

A stage may compute its blocks again in backward (``Recompute``): its t then grows by their forward seconds, ``held``
becomes what its blocks read from outside, and ``working`` has the activations of a block beside it, alive while its
backward runs, and what deferred weight halves need of all of them. Keeping all activations is faster, so a stage
recomputes exactly where it would not fit otherwise (or always, if that was asked for).

Memory, per device: ``state + gradients crossing both cuts + working + whole · held + weights · deferred ≤ capacity``
at every moment (whole, weights) of the schedule: micro-batches held whole, and those of which only the weight half
is left. ``working`` is what a backward holds beyond what was kept for it (``Working``). ``held`` is a union of
storages: one that several ops of the stage save, or that it saves and also sends, is counted once; so is ``deferred``, what
weight halves need and, until these have run, what the stage received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from cost_models.arrays import FloatArray
from passes.search.layer.tuning import TUNING
from passes.search.touches import Crossing, Touch

Assignment: TypeAlias = Literal["unordered", "ordered", "sequence"]

Held: TypeAlias = tuple[int, int]
"""Micro-batches held whole, and micro-batches whose weight half alone is still to run."""

BeyondTables: TypeAlias = Mapping[tuple[int, tuple[Held, ...], bool], Mapping[int, float]]
"""Kind of device, fullest moments, whether blocks are computed again -> pair of downsets (``Geometry``) -> bytes."""


@dataclass(frozen=True, eq=False)
class LayerStructure:
    """The part of a problem that does not change with the micro-batch size.

    ``downsets``: the family of downsets as bit masks (bit u: unit u), or None for the prefixes of the
    numbering.
    """

    units: int
    edges: tuple[tuple[int, int], ...]
    storages: tuple[Touch, ...] = ()
    states: tuple[Touch, ...] = ()
    crossings: tuple[Crossing, ...] = ()
    deferred: tuple[Touch, ...] = ()
    """Storages that are there until a deferred weight half has run: what it needs, and what the stage received."""
    downsets: tuple[int, ...] | None = None
    recomputed: tuple[Touch, ...] = ()
    """Storages as in ``storages``, for stages that compute their blocks again."""


@dataclass(frozen=True, eq=False)
class Working:
    """The bytes that a backward holds beyond what was kept for it; it goes from the last unit to the first.

    A stage's peak is the largest, over its units, of what is there at the unit less what was freed at those behind it.
    """

    beside_bytes: FloatArray
    """[n] the most that is there while backward is at the unit, beside what was kept and is not freed yet."""
    freed_bytes: FloatArray
    """[n] kept storages that nobody needs any more when backward has left the unit."""

    @classmethod
    def none(cls, units: int) -> Working:
        return cls(np.zeros(units), np.zeros(units))

    def peak_bytes(self, stage_of: Sequence[int], stages: int) -> FloatArray:
        """[stages] the peak of each stage."""
        peak, freed = np.zeros(stages), np.zeros(stages)
        for unit in reversed(range(len(stage_of))):
            stage = stage_of[unit]
            peak[stage] = max(peak[stage], self.beside_bytes[unit] - freed[stage])
            freed[stage] += self.freed_bytes[unit]
        return peak


@dataclass(frozen=True, eq=False)
class Recompute:
    """The numbers that change for a stage that computes its blocks again in backward. Shapes as in ``LayerProblem``."""

    seconds: FloatArray
    """[R, n] added to each unit: its second forward."""
    storage_bytes: FloatArray
    """[structure.recomputed] held per micro-batch in flight."""
    working: Working
    """Beside a unit there is also what the largest block with ops in it saves; where weight halves are deferred
    (``moments``) a stage has what they need of all of it on top."""
    always: bool = False
    """Every stage does so, also where its activations would fit."""


@dataclass(frozen=True)
class DevicePool:
    """``count`` interchangeable devices; ``row`` selects their seconds."""

    name: str
    row: int
    capacity_bytes: float
    count: int = 1


@dataclass(frozen=True, eq=False)
class LayerProblem:
    """One micro-batch size, one schedule. Shapes: R rows of seconds, n units, K kinds.

    ``assignment``: "unordered": any kind for any stage, each at most ``count`` times; "ordered": kinds are
    devices in pipeline order and a plan uses any subsequence; "sequence": p stages use the last p entries of
    ``sequence``.
    """

    structure: LayerStructure
    seconds: FloatArray
    """[R, n] forward + backward seconds of each unit."""
    storage_bytes: FloatArray
    """[storages] held per micro-batch in flight."""
    state_bytes: FloatArray
    """[states] parameters, gradients, optimizer state, leaves of the batch."""
    forward_bytes: FloatArray
    """[crossings] activations."""
    gradient_bytes: FloatArray
    """[crossings] their gradients; 0 where none is sent back."""
    working: Working
    kinds: tuple[DevicePool, ...]
    link_latency_seconds: FloatArray
    """[K, K] per cut: the latencies of all its messages of one micro-batch."""
    link_seconds_per_byte: FloatArray
    """[K, K]"""
    in_flight: tuple[int, ...]
    """``in_flight[k - 1]``: micro-batches held at once by the k-th stage from the end; its length bounds the
    stages."""
    microbatches: int = 1
    fill: float = 1.0
    chunks: int = 1
    deferred_bytes: FloatArray = field(default_factory=lambda: np.zeros(0))
    """[deferred] held per micro-batch whose weight half alone is still to run."""
    moments: tuple[tuple[Held, ...], ...] = ()
    """``moments[k - 1]``: when the k-th stage from the end may hold the most. Empty: ``in_flight`` whole ones."""
    alternating: bool = False
    """True where stages run one forward and one backward in turn, so that q counts."""
    assignment: Assignment = "unordered"
    sequence: tuple[int, ...] = ()
    stage_counts: tuple[int, int] = (1, 1 << 30)
    """Fewest and most stages allowed."""
    pins: Mapping[int, int] = field(default_factory=dict)
    """Unit to stage, counted from the front."""
    recompute: Recompute | None = None
    """The recompute that stages may do where they do not fit otherwise; None: they may not."""
    beyond: BeyondTables = field(default_factory=dict)
    """Bytes of stages beyond the memory above, as far as they are known (``passes.search.layer.beyond``)."""

    @property
    def bottleneck_weight(self) -> float:
        """Factor of T in the surrogate."""
        return (self.microbatches - self.fill) * self.chunks

    def held_at(self, k: int) -> tuple[Held, ...]:
        """The fullest moments of the k-th stage from the end."""
        return self.moments[k - 1] if self.moments else ((self.in_flight[k - 1], 0),)

    def charges_cut(self, k: int) -> bool:
        """Tell whether q counts the cut into the k-th stage from the end: the stage before it holds fewer than all."""
        return self.alternating and k < len(self.in_flight) and self.in_flight[k] < self.microbatches

    @property
    def max_stages(self) -> int:
        devices = len(self.sequence) if self.assignment == "sequence" else sum(k.count for k in self.kinds)
        return min(devices, len(self.in_flight), self.stage_counts[1], self.structure.units)


@dataclass(frozen=True)
class StageSplit:
    """A solution: the stage of each unit, the kind of each stage, and what the surrogate says about them."""

    stage_of: tuple[int, ...]
    kinds: tuple[int, ...]
    objective_seconds: float
    bottleneck_seconds: float
    """T, per micro-batch."""
    total_seconds: float
    """Σ_s (t_s + x_s)."""
    memory_bytes: tuple[float, ...]
    """Per stage."""
    recomputed: tuple[bool, ...] = ()
    """True for each stage that computes its blocks again in backward."""
    working_bytes: tuple[float, ...] = ()
    """Per stage, the part of ``memory_bytes`` that is there while a backward runs: one at a time on a device."""

    @property
    def stages(self) -> int:
        return len(self.kinds)

    def bytes_on(self, places: Sequence[int], count: int) -> FloatArray:
        """[count] bytes of each place with all its stages, one of which is in backward at a time. ``places``: per stage."""
        held, working = np.zeros(count), np.zeros(count)
        np.add.at(held, list(places), np.subtract(self.memory_bytes, self.working_bytes))
        np.maximum.at(working, list(places), self.working_bytes)
        return held + working

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for equal splits over equal kinds."""
        return self.stage_of, self.kinds


def evaluate(
    problem: LayerProblem,
    stage_of: Sequence[int],
    kinds: Sequence[int],
    recomputed: Sequence[bool] | None = None,
) -> StageSplit:
    """The surrogate and the memory of one split, by their definitions. The reference that the solvers are
    tested with.

    ``recomputed``: which stages compute their blocks again; by default those that would not fit otherwise.
    """
    p = len(kinds)
    _, gradient = cut_bytes(problem, stage_of, p)
    memory, working = _memory(problem, stage_of, gradient, again=False)
    again = _recomputed(problem, kinds, memory) if recomputed is None else list(recomputed)
    seconds, link = stage_and_link_seconds(problem, stage_of, kinds, again)
    if problem.recompute is not None and any(again):
        lean = _memory(problem, stage_of, gradient, again=True)
        memory, working = np.where(again, lean[0], memory), np.where(again, lean[1], working)
    round_trip = _round_trips(problem, seconds, link).max()
    bottleneck = float(max(seconds.max(), link.max(), round_trip, _charged(problem, seconds, link)))
    total = float(seconds.sum() + link.sum())
    objective = problem.fill * total + problem.bottleneck_weight * bottleneck
    return StageSplit(
        tuple(stage_of),
        tuple(kinds),
        objective,
        bottleneck,
        total,
        tuple(map(float, memory)),
        tuple(map(bool, again)),
        tuple(map(float, working)),
    )


def stage_and_link_seconds(
    problem: LayerProblem, stage_of: Sequence[int], kinds: Sequence[int], again: Sequence[bool]
) -> tuple[FloatArray, FloatArray]:
    """[p] t_s, and [p] x_s, by their definitions. ``again``: per stage, whether it computes its blocks again."""
    p = len(kinds)
    rows = [problem.kinds[kind].row for kind in kinds]
    seconds = np.zeros(p)
    for unit, stage in enumerate(stage_of):
        seconds[stage] += problem.seconds[rows[stage], unit]
        if problem.recompute is not None and again and again[stage]:
            seconds[stage] += problem.recompute.seconds[rows[stage], unit]
    forward, gradient = cut_bytes(problem, stage_of, p)
    link = np.zeros(p)
    for s in range(1, p):
        a, b = kinds[s - 1], kinds[s]
        link[s] = (
            problem.link_latency_seconds[a, b]
            + (forward[s] + gradient[s]) * problem.link_seconds_per_byte[a, b]
        )
    return seconds, link


def _recomputed(problem: LayerProblem, kinds: Sequence[int], memory: FloatArray) -> list[bool]:
    """Tell which stages compute their blocks again, given what it holds otherwise."""
    if problem.recompute is None:
        return [False] * len(kinds)
    room = [problem.kinds[kind].capacity_bytes * (1 + TUNING.memory_tolerance) for kind in kinds]
    return [problem.recompute.always or used > free for used, free in zip(memory, room, strict=True)]


def _memory(
    problem: LayerProblem, stage_of: Sequence[int], gradient: FloatArray, *, again: bool
) -> tuple[FloatArray, FloatArray]:
    """[p] bytes of each stage at its fullest, and [p] the part of them that is there while a backward runs.

    ``again``: computing its blocks again in backward.
    """
    structure, recompute = problem.structure, problem.recompute
    p = len(gradient)
    deferred = touched_bytes(structure.deferred, problem.deferred_bytes, stage_of, p)
    if again:
        assert recompute is not None
        held = touched_bytes(structure.recomputed, recompute.storage_bytes, stage_of, p)
        working = recompute.working.peak_bytes(stage_of, p)
        if problem.moments:
            working += deferred
    else:
        held = touched_bytes(structure.storages, problem.storage_bytes, stage_of, p)
        working = problem.working.peak_bytes(stage_of, p)
    state = touched_bytes(structure.states, problem.state_bytes, stage_of, p)
    fullest = [
        max(whole * held[s] + weights * deferred[s] for whole, weights in problem.held_at(p - s))
        for s in range(p)
    ]
    return np.array(state + gradient + np.append(gradient[1:], 0.0) + working + fullest), working


def _round_trips(problem: LayerProblem, seconds: FloatArray, link: FloatArray) -> FloatArray:
    """r_s of each stage from the front, shape [p]; 0 where all micro-batches are held at once."""
    p = len(seconds)
    behind = np.cumsum((seconds + link)[::-1])[::-1] - link
    held = np.array(problem.in_flight[:p][::-1])
    return np.where(held < problem.microbatches, behind / (held * problem.chunks), 0.0)


def _charged(problem: LayerProblem, seconds: FloatArray, link: FloatArray) -> float:
    """q: the least, over all ways to charge each cut to one of its stages, of max over s of (t_s + its cuts)."""
    p = len(seconds)
    charge = [link[s] if problem.charges_cut(p - s) else 0.0 for s in range(p)] + [0.0]
    # least maximum so far, by who pays for the cut into the stage at hand: the stage before it, or itself
    settled, pending = 0.0, np.inf
    for s, own in enumerate(seconds):
        with_cut = own + charge[s]
        settled, pending = (
            min(max(settled, own + charge[s + 1]), max(pending, with_cut + charge[s + 1])),
            min(max(settled, own), max(pending, with_cut)),
        )
    return float(min(settled, pending))


def cut_bytes(problem: LayerProblem, stage_of: Sequence[int], p: int) -> tuple[FloatArray, FloatArray]:
    """Activation and gradient bytes of each cut, shape [p]; entry s is the cut into stage s, entry 0 is
    zero."""
    forward, gradient = np.zeros(p), np.zeros(p)
    for index, crossing in enumerate(problem.structure.crossings):
        first = stage_of[crossing.producer]
        last = max((stage_of[u] for u in crossing.readers), default=first)
        forward[first + 1 : last + 1] += problem.forward_bytes[index]
        gradient[first + 1 : last + 1] += problem.gradient_bytes[index]
    return forward, gradient


def touched_bytes(touches: Sequence[Touch], sizes: FloatArray, stage_of: Sequence[int], p: int) -> FloatArray:
    """Bytes of the storages that each stage holds, shape [p]."""
    total = np.zeros(p)
    for index, touch in enumerate(touches):
        stages = {stage_of[u] for u in touch.savers}
        if touch.producer >= 0:
            home = stage_of[touch.producer]
            away = {stage_of[u] for u in touch.readers} - {home}
            stages |= away | ({home} if away and touch.keeps_sent else set())
        for stage in stages:
            total[stage] += sizes[index]
    return total
