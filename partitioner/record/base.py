"""The base of every part of a plan: data that cannot change and admits nothing unknown, and the version that made it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
"""A number of things, a size in bytes, a rank or a stage."""
Seconds = Annotated[float, Field(ge=0)]


class Record(BaseModel):
    """A part of a plan."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, strict=True
    )


def package_version() -> str:
    """Return the installed version; "source" when run from a checkout that is not installed."""
    try:
        return version("partitioner")
    except PackageNotFoundError:
        return "source"
