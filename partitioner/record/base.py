"""The base of every part of a plan: data that cannot change and admits nothing unknown, and the version that made it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    SerializerFunctionWrapHandler,
    model_serializer,
)

Natural = NonNegativeInt
"""A number of things, a size in bytes, a rank or a stage."""
Amount = NonNegativeFloat
"""Seconds, or a cost."""


class Record(BaseModel):
    """A part of a plan."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, strict=True
    )


class StageTermsRecord(Record):
    """One stage, or several that are alike and follow each other, in the surrogate of a pipeline."""

    stages: Annotated[int, Field(ge=1)]
    microbatch_seconds: Amount = Field(description="of everything that runs in each micro-batch")
    once_seconds: Amount = Field(description="of what runs once per step")
    cut_seconds: Amount = Field(description="per micro-batch, of what comes from earlier stages")


class BoundTermRecord(Record):
    """An option, or several, and the seconds that none of its pipelines is below; null: nothing fits."""

    option: str
    options: Annotated[int, Field(ge=1)]
    bound_seconds: Amount | None


class PipelineTermsRecord(Record):
    """The numbers that a pipeline's objective and its bound follow from (``partitioner.record.certificate``)."""

    fill: Annotated[float, Field(gt=0, le=1)] = Field(
        description="share of filling and draining that the schedule does not hide"
    )
    microbatches: Annotated[int, Field(ge=1)]
    chunks: Annotated[int, Field(ge=1)] = Field(description="stages of each device group")
    stages: tuple[StageTermsRecord, ...]
    in_flight: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        description="micro-batches that each stage holds at once"
    )
    options: tuple[BoundTermRecord, ...]
    in_turn: bool = Field(
        default=False, description="cuts delay one of their two stages: both directions share one queue"
    )


class CertificateRecord(Record):
    """The quality that the plan is known to have: the surrogate's proved bound, and a bound on the simulated time."""

    objective: str
    objective_seconds: Amount
    bound_seconds: Amount
    gap: float
    simulated_lower_bound_seconds: Amount
    space: str
    method: str
    solver_status: str
    search_seconds: Amount
    whole_ops_bound_seconds: Amount = 0.0
    """Seconds that no plan of whole ops simulates below, in the numbers of micro-batches that the search may choose."""
    terms: PipelineTermsRecord | None = Field(
        default=None, description="what objective and bound are made of, where device groups were searched"
    )

    @model_serializer(mode="wrap")
    def _brief(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the terms of searches that have none."""
        data: dict[str, Any] = handler(self)
        return data if self.terms is not None else {k: v for k, v in data.items() if k != "terms"}


def package_version() -> str:
    """Return the installed version; "source" when run from a checkout that is not installed."""
    try:
        return version("partitioner")
    except PackageNotFoundError:
        return "source"
