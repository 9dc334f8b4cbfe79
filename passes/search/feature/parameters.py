"""Parameters of a feature-wise placement: what keeping, summing, updating and gathering one costs.

Small gradients are summed together (``passes.shard.state``): each is charged its part of such a sum's seconds, so that a
model of a hundred small parameters pays the network's latency a few times and not a hundred times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cost_models.cluster import ClusterSpec
from cost_models.compute import optimizer_seconds
from cost_models.conversion import AxisLinks, Kind, local_share
from cost_models.devices import Device
from cost_models.layout import Mesh, Replicate, Shard
from cost_models.memory import OPTIMIZERS, StateBytes
from cost_models.precision import ParameterPrecision, Precision
from passes.graph.graph import OpGraph, once_per_graph
from passes.search.feature.local import joined_links
from passes.shard.state import ALONE_BYTES, BUCKET_BYTES, FIRST_BUCKET_BYTES
from passes.shard.words import Placements


@once_per_graph
def sum_bytes(graph: OpGraph, precision: Precision) -> float:
    """Bytes of small gradients that are summed at once, on average, if all are summed over the same ranks."""
    sizes = [
        graph.parameters[name].elements * graph.types_of(name, precision).gradient.itemsize
        for name in sorted(graph.trained)
    ]
    small = sum(size for size in sizes if size < ALONE_BYTES)
    first = BUCKET_BYTES if len(sizes) > 0 and max(sizes) >= ALONE_BYTES else FIRST_BUCKET_BYTES
    return small / (1 + math.ceil(max(0, small - first) / BUCKET_BYTES))


@dataclass(frozen=True)
class OncePerStep:
    """A collective about one parameter. ``share``: of the parameter's elements, what is whole along ``axes``."""

    kind: Kind
    axes: tuple[int, ...]
    share: float

    def sent_bytes(self, size_bytes: float, mesh: Mesh) -> float:
        """Bytes that each rank sends of a parameter (or gradient) of ``size_bytes``: the ring's volume."""
        ranks = math.prod(mesh.shape[axis] for axis in self.axes)
        return (2 if self.kind == "all_reduce" else 1) * (ranks - 1) / ranks * self.share * size_bytes


def gradient_sums_of(
    stored: Placements, state: Placements, deferred: Sequence[bool], mesh: Mesh
) -> Iterator[OncePerStep]:
    """After the last backward (``passes.shard.syncs``): scattered where the state is split, then what is left at once."""
    share = local_share(stored, mesh.shape)
    left = []
    for axis, (kept, owned, later) in enumerate(zip(stored, state, deferred, strict=True)):
        if not later or mesh.shape[axis] == 1:
            continue
        if isinstance(owned, Shard) and isinstance(kept, Replicate):
            yield OncePerStep("reduce_scatter", (axis,), share)
            share /= mesh.shape[axis]
        else:
            left.append(axis)
    if left:
        yield OncePerStep("all_reduce", tuple(left), share)


def gathers_of(stored: Placements, state: Placements, mesh: Mesh) -> Iterator[OncePerStep]:
    """After the update (``passes.shard.state``): what each rank has updated a part of."""
    share = local_share(stored, mesh.shape)
    for axis, (kept, owned) in enumerate(zip(stored, state, strict=True)):
        if mesh.shape[axis] > 1 and kept != owned:
            yield OncePerStep("all_gather", (axis,), share)
            share /= mesh.shape[axis]


def _links(sent: OncePerStep, mesh: Mesh, links: Sequence[AxisLinks], cluster: ClusterSpec) -> AxisLinks:
    return links[sent.axes[0]] if len(sent.axes) == 1 else joined_links(mesh, sent.axes, cluster)


def parameter_costs(
    elements: int,
    types: ParameterPrecision,
    trained: bool,
    stored: Placements,
    state: Placements,
    deferred: tuple[bool, ...],
    mesh: Mesh,
    links: Sequence[AxisLinks],
    optimizer: str,
    devices: Sequence[Device],
    together_bytes: float,
    cluster: ClusterSpec,
) -> tuple[float, float]:
    """(seconds per step, bytes) of keeping one parameter so. ``together_bytes``: see ``sum_bytes``.

    Seconds: the gradient summed over deferred axes into the state's layout, the update of what a rank owns, and the
    updated parameter gathered into its stored layout. Bytes: the parameter, its gradient as micro-batches are summed in it
    (in the stored layout), and where the state is split: the owned part, its gradient, and its optimizer state.
    """
    held = local_share(stored, mesh.shape) * elements
    parameter_bytes = held * types.leaf.itemsize
    if not trained:
        return 0.0, parameter_bytes
    owned = local_share(state, mesh.shape) * elements
    rule = OPTIMIZERS[optimizer]
    split = stored != state
    copy = owned * types.owner.itemsize if types.has_copy or split else 0.0
    gradients = held * types.gradient.itemsize
    gradients += owned * types.owner.itemsize if split else 0.0
    if not split:
        gradients = max(gradients, owned * types.owner.itemsize)
    optimizer_state = rule.copies * owned * types.owner.itemsize + rule.step_bytes
    gradient_bytes = elements * types.gradient.itemsize
    # As much is charged as its part of a sum of so many.
    once = max(gradient_bytes, together_bytes) if gradient_bytes < ALONE_BYTES else gradient_bytes
    seconds = 0.0
    for sent in gradient_sums_of(stored, state, deferred, mesh):
        whole = sent.share * once
        seconds += (
            _links(sent, mesh, links, cluster).seconds(sent.kind, whole) * gradient_bytes / max(once, 1)
        )
    for sent in gathers_of(stored, state, mesh):
        whole = sent.share * elements * types.leaf.itemsize
        seconds += _links(sent, mesh, links, cluster).seconds(sent.kind, whole)
    cast = owned * types.owner.itemsize + held * types.leaf.itemsize if types.has_copy else 0.0
    cast += owned * (types.gradient.itemsize + types.owner.itemsize) if types.gradient != types.owner else 0.0
    touched = StateBytes(
        trained=int(owned * types.owner.itemsize), optimizer_state=int(optimizer_state), cast=int(cast)
    )
    slowest = max(optimizer_seconds(touched, device, optimizer, 1) for device in devices)
    return seconds + slowest, parameter_bytes + copy + gradients + optimizer_state
