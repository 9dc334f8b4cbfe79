"""A plan as data: what was chosen, what it should cost, why, and how sure. JSON, safe to load from anyone."""

from __future__ import annotations

from itertools import islice
from typing import Self, TypeVar

from pydantic import PrivateAttr, model_validator

from partitioner.models.workload import MadeWith
from partitioner.record.checks import inconsistencies
from partitioner.record.file import MOST_PROBLEMS
from partitioner.record.intervals import PlanIntervals, plan_intervals
from partitioner.record.records import PlanFields
from runtime.segment.microbatch import microbatch_sizes


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
    def world_size(self) -> int:
        """Number of processes that run it: one for each used device."""
        return len(self.used_devices)

    @property
    def intervals(self) -> PlanIntervals:
        """The intervals of the predicted step and peak, from how far off measured runs of such plans were."""
        return plan_intervals(self, self.used_devices, self.fullest_device)


PlanT = TypeVar("PlanT", bound=PlanData)
"""The class of plans that a caller wants made."""
