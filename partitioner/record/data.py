"""A plan as data: what was chosen, what it should cost, why, and how sure. JSON, safe to load from anyone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self, TypeVar

from pydantic import PrivateAttr, model_validator

from cost_models.devices import RUN_KINDS, DeviceKind
from cost_models.intervals import Interval, PlanKind
from cost_models.layout import Shard
from cost_models.room import FILLS, chance_of_not_fitting, peak_spread
from cost_models.spec.provenance import RateOrigin
from cost_models.spreads import STEP_SECONDS
from partitioner.models.workload import MadeWith
from partitioner.record.checks import inconsistencies
from partitioner.record.file import MOST_PROBLEMS
from partitioner.record.records import PlanFields
from passes.lower.job import Job
from passes.shard.words import read_placements
from runtime.segment.microbatch import microbatch_sizes


@dataclass(frozen=True)
class PlanIntervals:
    """The ranges in which nine of ten runs lie (``cost_models.intervals.SHARE``)."""

    step_seconds: Interval | None
    """None where nothing like it was measured: CPU workers without a calibration, kinds of devices that were never run."""
    peak_memory_bytes: Interval
    """Peak of the device that takes the largest share of its memory."""
    chance_of_not_fitting: float
    """Probability that a device's peak exceeds its memory."""
    kind: PlanKind
    """The kind of plan, which decides how far off its step is taken to be."""
    origin: RateOrigin
    """The origin of the rates, as they are known today."""
    measured_runs: int
    """Measured steps of this kind, with rates of this origin, that the interval of the step rests on."""


def kind_of(plan: PlanFields, used: Sequence[int]) -> PlanKind:
    """Tell which plans this one errs like."""
    if len(used) == 1:
        return "one device"
    if all(len(stage.devices) == 1 for stage in plan.stages):
        return "pipeline"
    return "data parallel" if len(plan.stages) == 1 and _whole_parameters(plan) else "sharded"


def _whole_parameters(plan: PlanFields) -> bool:
    """Tell whether the only stage's ops read every parameter whole, as replicas do, with ZeRO or without.

    Lookups do not count: a table of positions has no samples to split, and may be read by columns. Plans without
    ``layouts``, which say how ops read parameters, count as sharded.
    """
    sharding = plan.stages[0].sharding
    rows = sharding.layouts if sharding is not None else ()
    taken = [row.taken for row in rows if row.taken and row.op != "embedding"]
    return bool(taken) and not any(
        isinstance(layout, Shard) for text in taken for layout in read_placements(text)
    )


class PlanData(PlanFields):
    """A partitioning plan as it stands in its file. :class:`partitioner.plan.Plan` adds what people do with one."""

    _made_with: MadeWith = PrivateAttr(default=MadeWith())

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = list(islice(inconsistencies(self), MOST_PROBLEMS))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def placements(self) -> dict[str, tuple[int, ...]]:
        """Return the devices of every placed op; made anew each time."""
        return {op: stage.devices for stage in self.stages for op in stage.ops}

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """The samples of each micro-batch of a whole batch."""
        return microbatch_sizes(self.batch_size, self.microbatches)

    @property
    def used_devices(self) -> tuple[int, ...]:
        """The devices that run something, in the cluster's order. Idle ones get no process."""
        return tuple(sorted({device for stage in self.stages for device in stage.devices}))

    @property
    def fullest_device(self) -> int:
        """The used device whose peak takes the largest share of its memory."""
        peaks, devices = self.prediction.peak_memory_bytes, self.cluster.devices
        return max(self.used_devices, key=lambda rank: peaks[str(rank)] / devices[rank].memory_bytes)

    @property
    def room_bytes(self) -> tuple[int, ...]:
        """Bytes that the plan keeps within on each device of the cluster, by prediction."""
        if self.risk is None:
            return tuple(device.memory_bytes for device in self.cluster.devices)
        return tuple(self.risk.room_bytes[str(rank)] for rank in range(self.cluster.world_size))

    @property
    def job(self) -> Job:
        """The step that it was planned for; where nothing was safe, at a risk at which predictions fill the memory."""
        safe = self.risk is not None and self.risk.chance <= self.risk.allowed
        risk = self.risk.allowed if self.risk is not None and safe else FILLS
        return Job(self.batch_size, self.optimizer_memory, self.precision, risk)

    @property
    def is_too_risky(self) -> bool:
        """True if its chance of not fitting is above what was allowed, by how far off peaks are known to be today."""
        allowed = FILLS if self.risk is None else self.risk.allowed
        return allowed < FILLS and self.intervals.chance_of_not_fitting > allowed

    @property
    def world_size(self) -> int:
        """Number of processes that run it: one for each used device."""
        return len(self.used_devices)

    @property
    def unrun_kinds(self) -> tuple[DeviceKind, ...]:
        """The kinds of used devices on which no plan was ever run: there it is a prediction, and is not run."""
        return tuple(sorted({self.cluster.devices[rank].kind for rank in self.used_devices} - RUN_KINDS))

    @property
    def intervals(self) -> PlanIntervals:
        """The intervals of the predicted step and peak, from how far off measured runs of such plans were.

        They stand in no file: they follow from the plan's facts and ``cost_models.spreads``, for earlier plans too.
        """
        used, fullest, prediction = self.used_devices, self.fullest_device, self.prediction
        kind, origin = kind_of(self, used), self.cluster.origin(used)
        step = None if origin.rates is None else STEP_SECONDS[kind, origin.rates]
        memory, peaks = peak_spread(self.cluster.devices[fullest]), prediction.peak_memory_bytes
        return PlanIntervals(
            None if step is None else step.interval(prediction.step_seconds),
            memory.interval(peaks[str(fullest)]),
            chance_of_not_fitting((peaks[str(rank)], self.cluster.devices[rank]) for rank in used),
            kind,
            origin,
            0 if step is None else step.runs,
        )


PlanT = TypeVar("PlanT", bound=PlanData)
"""The class of plans that a caller wants made."""
