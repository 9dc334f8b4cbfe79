"""The memory that an option's groups have for tensors, beside the communicators that they have at least."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from cost_models.cluster import ClusterSpec
from passes.search.beside_tensors import mesh_room_bytes
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.recipes.pieces import GroupKind


@dataclass(eq=False)
class Rooms:
    """Kept by groups: numbers of micro-batches have the same, and schedules but for how many neighbours they make."""

    cluster: ClusterSpec
    _known: dict[Hashable, list[int]] = field(default_factory=dict)

    def of(self, option: GroupOption) -> Sequence[int]:
        """Return the bytes on the smallest device of each group, in the pipeline's order."""
        key = tuple(run.key for run in option.runs), option.chunks > 1
        if key not in self._known:
            self._known[key] = self._of(option)
        return self._known[key]

    def _of(self, option: GroupOption) -> list[int]:
        groups, found = option.ranks, []
        everyone = tuple(rank for ranks in groups for rank in ranks)
        for number, (run, _) in enumerate(option.members):
            beside = [number - 1, number + 1]
            if option.chunks > 1:  # values go on from the last group to the first
                beside = [other % len(groups) for other in beside]
            near = {other for other in beside if 0 <= other < len(groups)} - {number}
            mesh = GroupKind(groups[number], run.replicas, run.tensor).mesh
            peers = [groups[other][0] for other in sorted(near)]
            found.append(mesh_room_bytes(self.cluster, mesh, everyone, peers))
        return found
