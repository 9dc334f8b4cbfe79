"""The setting of a feature-wise search: cluster, job, and the memory that it may plan with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cost_models.cluster import ClusterSpec
from cost_models.conversion import AxisLinks, axis_links
from cost_models.devices import Device
from cost_models.layout import Mesh
from passes.lower.job import Job


@dataclass(frozen=True, eq=False)
class Setting:
    """Everything that is the same for every mesh and micro-batch count of a search."""

    cluster: ClusterSpec
    job: Job
    reserved_bytes: float = 0.0
    """Memory of every device that is not to be planned with."""
    recomputed_blocks: tuple[str, ...] = ()
    """Blocks that backward computes again."""

    @property
    def capacity_bytes(self) -> float:
        """Memory of the smallest device: all have equal parts."""
        return min(device.memory_bytes for device in self.cluster.devices) - self.reserved_bytes

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """One of each kind of device: ops take what they take on the slowest."""
        return tuple({device.speed_alone: device for device in self.cluster.devices}.values())

    def links(self, mesh: Mesh) -> tuple[AxisLinks, ...]:
        """The links along each axis of a mesh of the cluster."""
        return tuple(axis_links(mesh, axis, self.cluster) for axis in range(len(mesh.shape)))
