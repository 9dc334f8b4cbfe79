"""The options that decide about a plan, for every command that plans: ``plan`` and ``fit``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from cyclopts import Parameter

from partitioner.commands.options import Dims, Flag, WholeNumber
from partitioner.planning.option_table import with_command_help


@with_command_help
@Parameter(name="*")
@dataclass(frozen=True)
class PlanChoices:
    """The options of a plan, but for its batch and micro-batches, whose defaults differ.

    Parameters
    ----------
    """

    strategy: str = "auto"
    micro_couplings: Flag = False
    schedule: str = "auto"
    optimizer_memory: str = "adamw"
    precision: str | None = None
    loss_reduction: str | None = None
    min_stages: WholeNumber | None = None
    max_stages: WholeNumber | None = None
    recompute: str | None = None
    pin: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()
    mesh: str | None = None
    fix: str | None = None
    objective: str | None = None
    split: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()
    batch_dims: Dims = ()
    dynamic_dims: Dims = ()
    opaque: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()
    check: str = "on"
    risk: str = "5%"
    time_limit: float | None = None

    def arguments(self) -> dict[str, Any]:
        """Return them by name, as they were given."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


AS_USUAL = PlanChoices()
