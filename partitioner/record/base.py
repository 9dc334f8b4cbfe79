"""What every part of a plan is: data that cannot change and admits nothing unknown."""

from __future__ import annotations

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
