"""Parameters of a feature-wise placement: what keeping, summing, updating and gathering one costs.

Small gradients are summed together (``passes.shard.state``): each is charged its part of such a sum's seconds, so that a
model of a hundred small parameters pays the network's latency a few times and not a hundred times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cost_models.compute import optimizer_seconds
from cost_models.conversion import AxisLinks, CollectiveKind, local_share
from cost_models.layout import Mesh, Replicate, Shard
from cost_models.memory import OPTIMIZERS, StateBytes
from cost_models.precision import ParameterPrecision, Precision
from passes.graph.graph import OpGraph, once_per_graph
from passes.search.feature.setting import Setting, joined_links
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

    kind: CollectiveKind
    axes: tuple[int, ...]
    share: float

    def sent_bytes(self, size_bytes: float, mesh: Mesh) -> float:
        """Bytes that each rank sends of a parameter (or gradient) of ``size_bytes``: the ring's volume."""
        ranks = math.prod(mesh.shape[axis] for axis in self.axes)
        return (2 if self.kind == "all_reduce" else 1) * (ranks - 1) / ranks * self.share * size_bytes


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter as the ranks of a mesh keep it."""

    elements: int
    types: ParameterPrecision
    trained: bool
    mesh: Mesh
    stored: Placements
    state: Placements
    """The layout of its gradient, once summed, and of its optimizer state."""
    deferred: tuple[bool, ...]
    """Per axis: True where its gradient is summed once per step."""

    def gradient_sums(self) -> Iterator[OncePerStep]:
        """After the last backward (``passes.shard.syncs``): scattered where the state is split, then the rest at once."""
        shape = self.mesh.shape
        share = local_share(self.stored, shape)
        left = []
        for axis, (kept, owned, later) in enumerate(zip(self.stored, self.state, self.deferred, strict=True)):
            if not later or shape[axis] == 1:
                continue
            if isinstance(owned, Shard) and isinstance(kept, Replicate):
                yield OncePerStep("reduce_scatter", (axis,), share)
                share /= shape[axis]
            else:
                left.append(axis)
        if left:
            yield OncePerStep("all_reduce", tuple(left), share)

    def gathers(self) -> Iterator[OncePerStep]:
        """After the update (``passes.shard.state``): what each rank has updated a part of."""
        share = local_share(self.stored, self.mesh.shape)
        for axis, (kept, owned) in enumerate(zip(self.stored, self.state, strict=True)):
            if self.mesh.shape[axis] > 1 and kept != owned:
                yield OncePerStep("all_gather", (axis,), share)
                share /= self.mesh.shape[axis]

    def sent_bytes(self) -> float:
        """Bytes that each rank sends of it per step."""
        if not self.trained:
            return 0.0
        gradient, leaf = (
            self.elements * self.types.gradient.itemsize,
            self.elements * self.types.leaf.itemsize,
        )
        return sum(
            sent.sent_bytes(size, self.mesh)
            for size, found in ((gradient, self.gradient_sums()), (leaf, self.gathers()))
            for sent in found
        )

    def costs(
        self, links: Sequence[AxisLinks], setting: Setting, together_bytes: float
    ) -> tuple[float, float, float]:
        """(seconds per step, bytes, of the seconds those of sums that may run beside backward) of keeping it so.

        ``links``: of the mesh's axes; ``together_bytes``: ``sum_bytes``.

        Seconds: the gradient summed over deferred axes into the state's layout, the update of what a rank owns, and the
        updated parameter gathered into its stored layout. Bytes: the parameter, its gradient as micro-batches are summed in
        it (in the stored layout), and where the state is split: the owned part, its gradient, and its optimizer state.
        """
        types, optimizer = self.types, setting.job.optimizer
        held = local_share(self.stored, self.mesh.shape) * self.elements
        parameter_bytes = held * types.leaf.itemsize
        if not self.trained:
            return 0.0, parameter_bytes, 0.0
        owned = local_share(self.state, self.mesh.shape) * self.elements
        rule = OPTIMIZERS[optimizer]
        split = self.stored != self.state
        copy = owned * types.owner.itemsize if types.has_copy or split else 0.0
        gradients = held * types.gradient.itemsize
        gradients += owned * types.owner.itemsize if split else 0.0
        if not split:
            gradients = max(gradients, owned * types.owner.itemsize)
        optimizer_state = rule.copies * owned * types.owner.itemsize + rule.step_bytes
        gradient_bytes = self.elements * types.gradient.itemsize
        # As much is charged as its part of a sum of so many.
        once = max(gradient_bytes, together_bytes) if gradient_bytes < ALONE_BYTES else gradient_bytes

        def sending(sent: OncePerStep, size_bytes: float) -> float:
            alone = len(sent.axes) == 1
            along = links[sent.axes[0]] if alone else joined_links(self.mesh, sent.axes, setting.cluster)
            return along.seconds(sent.kind, size_bytes)

        sums = gathers = 0.0
        for sent in self.gradient_sums():
            sums += sending(sent, sent.share * once) * gradient_bytes / max(once, 1)
        for sent in self.gathers():
            gathers += sending(sent, sent.share * self.elements * types.leaf.itemsize)
        cast = owned * types.owner.itemsize + held * types.leaf.itemsize if types.has_copy else 0.0
        cast += (
            owned * (types.gradient.itemsize + types.owner.itemsize) if types.gradient != types.owner else 0.0
        )
        touched = StateBytes(
            trained=int(owned * types.owner.itemsize), optimizer_state=int(optimizer_state), cast=int(cast)
        )
        slowest = max(optimizer_seconds(touched, device, optimizer, 1) for device in setting.devices)
        held_bytes = parameter_bytes + copy + gradients + optimizer_state
        # what is summed with others waits for the last of them
        early = sums if once == gradient_bytes else 0.0
        return sums + gathers + slowest, held_bytes, early
