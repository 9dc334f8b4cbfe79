"""Messages among the ranks of a stage's mesh, as costs and plans name them: per micro-batch, and once per step.

Each is sent by every group of ranks along its axes at once; several axes taken together are joined by +.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from cost_models.conversion import CollectiveKind
from cost_models.layout import Mesh
from runtime.mesh.ranks_along import JOINT, all_ranks_along
from runtime.program.program import Collective


@dataclass(frozen=True)
class StageCollective:
    """Communication inside the stage: once per micro-batch, by every group of devices along ``axis``."""

    value: Annotated[str, Field(description="the bridge, or the op that talks by itself")]
    kind: CollectiveKind
    axis: Annotated[str, Field(description="of the mesh; several taken together are joined by +")]
    size_bytes: Annotated[
        NonNegativeInt, Field(description="of the tensor, whole along the axis, per micro-batch")
    ]
    sent_bytes: Annotated[
        NonNegativeFloat, Field(description="by each device, by the volume of the ring algorithm")
    ]
    backward: bool
    seconds: Annotated[
        NonNegativeFloat,
        Field(description="per micro-batch, nothing else on its links; plans of schema 1 do not say"),
    ] = 0.0


@dataclass(frozen=True)
class GradientSum:
    """Gradients summed together after the last backward, by every group of devices along ``axes``."""

    parameters: tuple[str, ...]
    axes: tuple[str, ...]
    scattered: Annotated[
        bool, Field(description="each device keeps its part of the sums only (ZeRO-1 and 2)")
    ]
    size_bytes: Annotated[
        tuple[NonNegativeInt, ...],
        Field(description="of each parameter's gradient on a device, as it begins"),
    ]
    seconds: NonNegativeFloat
    ready: Annotated[
        float,
        Field(
            ge=0.0,
            le=1.0,
            description="share of the stage's last backward after which the gradients are there, and the sum may start",
        ),
    ] = 1.0


@dataclass(frozen=True)
class UpdateGather:
    """Parameters of which each device updates a part, put together after the update along ``axis`` (ZeRO-1 and 2)."""

    axis: str
    parameters: tuple[str, ...]
    size_bytes: Annotated[NonNegativeInt, Field(description="of what each device has afterwards")]
    seconds: NonNegativeFloat


def collectives(sent: Sequence[StageCollective], mesh: Mesh) -> tuple[Collective, ...]:
    """Return the collectives as a segment has them, each by every group of ranks of the mesh."""
    groups = {axis: all_ranks_along(mesh, axis.split(JOINT)) for axis in {item.axis for item in sent}}
    return tuple(
        Collective(item.kind, groups[item.axis], item.sent_bytes, item.backward, item.seconds, item.axis)
        for item in sent
    )


def gather_collectives(gathers: Iterable[UpdateGather], mesh: Mesh) -> Iterator[Collective]:
    """Yield the same of what is gathered after the update."""
    for item in gathers:
        groups = all_ranks_along(mesh, (item.axis,))
        sent_bytes = (len(groups[0]) - 1) / len(groups[0]) * item.size_bytes
        yield Collective("all_gather", groups, sent_bytes, backward=False)
