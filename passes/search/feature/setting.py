"""The setting of a feature-wise search: cluster, job, and the memory that it may plan with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property

from cost_models.cluster import ClusterSpec
from cost_models.conversion import AxisLinks, axis_links
from cost_models.devices import Device
from cost_models.layout import Mesh
from passes.lower.job import Job
from passes.search.beside_tensors import mesh_room_bytes
from passes.search.recomputed import Regions


@dataclass(frozen=True)
class PartPlace:
    """The devices that share a part of a model, and the way of values to it."""

    ranks: tuple[int, ...]
    axes: tuple[str, ...] = ()
    """Names of the mesh's axes, where the mesh is fixed; empty: the search's own."""
    crossing_seconds_per_byte: float = 0.0
    """Seconds that each byte takes to a rank from the ranks of another part."""
    shared: frozenset[str] = frozenset()
    """Parameters and buffers that other parts read too: they are whole on every rank."""
    returned_share: Mapping[str, float] = field(default_factory=dict)
    """The share of a value's gradient that a rank sends back, or that one is sent, whichever is more, by the node of the
    value; all of it if not listed."""


@dataclass(frozen=True, eq=False)
class Setting:
    """Everything that is the same for every mesh and micro-batch count of a search."""

    cluster: ClusterSpec
    job: Job
    reserved_bytes: float = 0.0
    """Memory of every device that is not to be planned with."""
    again: Regions = ()
    """The ops of each block that backward computes again."""
    part: PartPlace | None = None
    """The place of the part that is searched; None: a whole model, on all devices of the cluster."""

    @property
    def crossing_seconds_per_byte(self) -> float:
        """Seconds that each byte takes to a rank from the ranks of another part."""
        return 0.0 if self.part is None else self.part.crossing_seconds_per_byte

    def returned_share(self, value: str) -> float:
        """Return the share of a value's gradient that each part of its sum adds to what crosses, on the busiest rank."""
        return 1.0 if self.part is None else self.part.returned_share.get(value, 1.0)

    @cached_property
    def sharing(self) -> tuple[Device, ...]:
        """The devices that share the ops."""
        devices = self.cluster.devices
        return devices if self.part is None else tuple(devices[rank] for rank in self.part.ranks)

    def capacity_bytes(self, mesh: Mesh) -> float:
        """Room for tensors on the smallest device: all have equal parts."""
        return mesh_room_bytes(self.cluster, mesh) - self.reserved_bytes

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """One of each kind of device: ops take what they take on the slowest."""
        return self.cluster.unlike(device.rank for device in self.sharing)

    def links(self, mesh: Mesh) -> tuple[AxisLinks, ...]:
        """The links along each axis of a mesh of the cluster."""
        return tuple(axis_links(mesh, axis, self.cluster) for axis in range(len(mesh.shape)))


@cache
def joined_links(mesh: Mesh, axes: tuple[int, ...], cluster: ClusterSpec) -> AxisLinks:
    """The links of collectives over ``axes`` taken together, the first outermost."""
    kept = [axis for axis in range(len(mesh.shape)) if axis not in axes]
    order = (*kept, *axes)
    strides = [math.prod(mesh.shape[axis + 1 :]) for axis in range(len(mesh.shape))]
    places = [0]
    for axis in order:
        places = [place + i * strides[axis] for place in places for i in range(mesh.shape[axis])]
    shape = (*(mesh.shape[axis] for axis in kept), math.prod(mesh.shape[axis] for axis in axes))
    names = (*(mesh.axes[axis] for axis in kept), "+".join(mesh.axes[axis] for axis in axes))
    joined = Mesh(tuple(mesh.ranks[place] for place in places), shape, names)
    return axis_links(joined, len(kept), cluster)
