"""The axes that a segment's bridges and local ops run along, as one rank needs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from runtime.mesh.axis import Axis, WaitFor
from runtime.mesh.ranks_along import JOINT, axis_of, ranks_along
from runtime.mesh.sharding import Sharding
from runtime.ops.bridges import axes_of
from runtime.ranks.groups import Channel
from runtime.segment.code import SegmentCode


def groups_needed(
    codes: Iterable[SegmentCode], shardings: Iterable[Sharding], rank: int
) -> set[tuple[int, ...]]:
    """Return the groups, ranks ascending, in which ``rank`` runs bridges of ``codes`` and shares owners of parameters."""
    wanted = {(code.mesh, name) for code in codes if code.mesh for name in axes_of(code.module.graph)}
    wanted |= {(s.mesh, s.mesh.axes[axis]) for s in shardings for axis, _ in s.cuts}
    return {tuple(sorted(ranks_along(mesh, name.split(JOINT), rank))) for mesh, name in wanted}


def axes_for(code: SegmentCode, rank: int, channels: Mapping[str, Channel], wait: WaitFor) -> dict[str, Axis]:
    """Return the axes that the bridges of ``code`` run along, by name."""
    assert code.mesh is not None
    return {name: axis_of(code.mesh, name, rank, channels, wait) for name in axes_of(code.module.graph)}
