"""A plan as data: what was chosen, what it should cost, why, and how sure. JSON, safe to load from anyone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import PrivateAttr, ValidationError, model_validator

from cost_models.errors import PlanError
from partitioner.models.made_with import MadeWith
from partitioner.record.checks import inconsistencies
from partitioner.record.file import ANEW, MOST_PROBLEMS, read_json, read_text, validation_problems, write_text
from partitioner.record.records import SCHEMA_VERSION, PlanFields


class PlanData(PlanFields):
    """A partitioning plan as it stands in its file. :class:`partitioner.plan.Plan` adds what people do with one."""

    _made_with: MadeWith = PrivateAttr(default=MadeWith())

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = list(islice(inconsistencies(self), MOST_PROBLEMS))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. Atomic: a crash leaves the previous file, never half of a new one."""
        write_text(Path(path), self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan file; safe with files from anyone. Raises PlanError with every problem found."""
        return cls.from_json(read_text(path), source=str(path))

    @classmethod
    def from_json(cls, text: str, *, source: str = "<text>") -> Self:
        """Parse a plan; ``source`` names it in errors."""
        read_json(text, source, SCHEMA_VERSION)
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise PlanError(
                f"{source} is not a valid plan",
                because=validation_problems(error),
                suggestions=[f"{ANEW}; plans are not meant to be edited"],
            ) from error

    def to_dict(self) -> Mapping[str, Any]:
        """Return the plan as plain JSON data."""
        data: dict[str, Any] = json.loads(self.model_dump_json())
        return data

    @property
    def used_devices(self) -> tuple[int, ...]:
        """The devices that run something, in the cluster's order. Idle ones get no process."""
        return tuple(sorted({device for stage in self.stages for device in stage.devices}))

    @property
    def world_size(self) -> int:
        """Number of processes that run it: one for each used device."""
        return len(self.used_devices)


PlanT = TypeVar("PlanT", bound=PlanData)
"""The class of plans that a caller wants made."""
