"""The certificate: what was minimized, over which space, how close to the proved minimum, and what no plan can beat.

Two bounds on simulated time stand in it, each for the plans that it is proved for and no others:

    simulated_lower_bound_seconds   every plan of the step, whatever its strategy (``passes.search.any_plan``)
    whole_ops_bound_seconds         plans that run every op whole on one device (``passes.search.bound``)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from cost_models.errors import InternalError

ROUNDING = 1e-9
"""Relative difference that sums in another order may make."""
AtLeastOne = Annotated[int, Field(ge=1)]
NAMED = 16
"""Options that a family of pipelines names in a certificate. By hand: more than anybody reads."""


@dataclass(frozen=True)
class StageTerms:
    """One stage, or several that are alike and follow each other, in the surrogate of a pipeline."""

    stages: AtLeastOne
    microbatch_seconds: Annotated[
        NonNegativeFloat, Field(description="of everything that runs in each micro-batch")
    ]
    once_seconds: Annotated[
        NonNegativeFloat,
        Field(description="of what runs once per step: sums of gradients, updates, gathers"),
    ]
    cut_seconds: Annotated[
        NonNegativeFloat,
        Field(description="per micro-batch, of what comes from earlier stages, and of its gradients"),
    ]


def in_rows(stages: Iterable[StageTerms]) -> tuple[StageTerms, ...]:
    """Join single stages that are alike and follow each other."""
    return tuple(replace(row, stages=len([*alike])) for row, alike in itertools.groupby(stages))


@dataclass(frozen=True)
class BoundTerm:
    """An option, or several, and the lower bound on its pipelines; null: nothing fits."""

    option: str
    options: AtLeastOne
    bound_seconds: NonNegativeFloat | None

    @staticmethod
    def of(option: str, options: int, bound_seconds: float) -> BoundTerm:
        """Make a term of seconds that are infinite where nothing fits."""
        return BoundTerm(option, options, bound_seconds if math.isfinite(bound_seconds) else None)


@dataclass(frozen=True)
class PipelineTerms:
    """The numbers that a pipeline's objective and its bound follow from (``partitioner.record.certificate``).

        t_s = microbatch_seconds + once_seconds / microbatches         x_s = cut_seconds, in front of stage s
        T   = max(t_s, x_s, what stage s may wait for / (in_flight_s · chunks), where in_flight_s < microbatches, q)
        objective = fill · Σ (t_s + x_s) + (microbatches - fill) · chunks · T         bound = min over options

    What stage s may wait for: t_s and everything behind it. q, of stages that run in turn: each x_s behind a stage with
    in_flight < microbatches is charged to one of its two stages, the cheapest way; q is the longest t_s with its charges.
    """

    fill: Annotated[
        float, Field(gt=0, le=1, description="share of filling and draining that the schedule does not hide")
    ]
    microbatches: AtLeastOne
    chunks: Annotated[AtLeastOne, Field(description="stages of each device group")]
    stages: tuple[StageTerms, ...]
    in_flight: Annotated[
        tuple[AtLeastOne, ...], Field(description="micro-batches that each stage holds at once")
    ]
    options: Annotated[
        tuple[BoundTerm, ...], Field(description="all of the space, the lowest bounds by name")
    ]
    in_turn: Annotated[
        bool, Field(description="cuts delay one of their two stages: both directions share one queue")
    ] = False

    @property
    def objective_seconds(self) -> float:
        """The surrogate of a step, q left out."""
        m, behind, longest = self.microbatches, 0.0, 0.0
        each = [row for row in self.stages for _ in range(row.stages)]
        for stage, in_flight in zip(reversed(each), reversed(self.in_flight), strict=True):
            own = stage.microbatch_seconds + stage.once_seconds / m
            behind += own
            longest = max(longest, own, stage.cut_seconds)
            if in_flight < m:
                longest = max(longest, behind / (in_flight * self.chunks))
            behind += stage.cut_seconds
        return self.fill * behind + (m - self.fill) * self.chunks * longest


@dataclass(frozen=True)
class Certificate:
    """The quality that a plan is known to have: the surrogate's proved bound, and bounds on the simulated time.

    ``objective_seconds`` and ``bound_seconds`` are about the surrogate named by ``objective``, over ``space``. Of a cost
    graph, everything called seconds but ``search_seconds`` is in the graph's own unit.
    """

    objective: str
    objective_seconds: NonNegativeFloat
    bound_seconds: NonNegativeFloat
    gap: Annotated[
        float, Field(description="(objective - bound) / objective; 0: proved optimal over the space")
    ]
    simulated_lower_bound_seconds: Annotated[
        NonNegativeFloat,
        Field(description="that no plan simulates below; the compile proves it, searches leave it at 0"),
    ]
    space: str
    method: str
    solver_status: str
    search_seconds: NonNegativeFloat
    whole_ops_bound_seconds: Annotated[
        NonNegativeFloat,
        Field(
            description="that no plan of whole ops simulates below, in the numbers of micro-batches that the search may "
            "choose; 0 where the search is about other plans"
        ),
    ] = 0.0
    terms: Annotated[
        PipelineTerms | None,
        Field(description="what objective and bound are made of, where the search is over pipelines"),
    ] = None

    def __post_init__(self) -> None:
        if self.bound_seconds > self.objective_seconds * (1 + ROUNDING):
            raise ValueError(f"bound {self.bound_seconds} s above the objective {self.objective_seconds} s")

    def refuse_broken_bounds(self, step_seconds: float, *, whole_ops: bool) -> None:
        """Raise ``InternalError`` if the plan that was found is below a bound that it falls under: the proof is wrong."""
        bounds = {"any plan": self.simulated_lower_bound_seconds}
        if whole_ops:
            bounds["a plan of whole ops"] = self.whole_ops_bound_seconds
        because = [
            f"the plan simulates in {step_seconds:.9g} s, and {kind} was proved to take {seconds:.9g} s at least"
            for kind, seconds in bounds.items()
            if step_seconds < seconds * (1 - ROUNDING)
        ]
        if because:
            raise InternalError("certify a plan: its own bound is broken", because)


@dataclass(frozen=True)
class Alternative:
    """Another way that was looked at, and why it was not chosen."""

    strategy: str
    feasible: bool
    reason: str
    step_seconds: NonNegativeFloat | None
    """Seconds that it would take, even where it does not fit."""
    peak_memory_bytes: NonNegativeInt | None
    chance_of_not_fitting: Annotated[float, Field(ge=0, le=1)] | None = None
    """Chance that a device needs more memory than it has; None where that is not known."""


def relative_gap(objective_seconds: float, bound_seconds: float) -> float:
    """(objective - bound) / objective, never negative."""
    if objective_seconds <= 0:
        return 0.0
    return max(0.0, (objective_seconds - bound_seconds) / objective_seconds)
