"""The base of every part of a plan: data that cannot change and admits nothing unknown, and the version that made it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt

Natural = NonNegativeInt
"""A number of things, a size in bytes, a rank or a stage."""
Amount = NonNegativeFloat
"""Seconds, or a cost."""


class Record(BaseModel):
    """A part of a plan."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, strict=True
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


def package_version() -> str:
    """Return the installed version; "source" when run from a checkout that is not installed."""
    try:
        return version("partitioner")
    except PackageNotFoundError:
        return "source"
