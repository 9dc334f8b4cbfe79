"""Parameters of a feature-wise placement: what keeping, summing, updating and gathering one costs.

Small gradients are summed together (``passes.shard_program``): each is charged its part of such a sum's seconds, so that a
model of a hundred small parameters pays the network's latency a few times and not a hundred times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cost_models.compute import optimizer_seconds
from cost_models.conversion import AxisLinks, local_share, path, steps_seconds
from cost_models.devices import Device
from cost_models.layout import Mesh, Partial, Placement
from cost_models.memory import OPTIMIZERS, StateBytes
from cost_models.precision import ParameterPrecision, Precision
from passes.graph import OpGraph
from passes.shard_program import ALONE_BYTES, BUCKET_BYTES, FIRST_BUCKET_BYTES


def sum_bytes(graph: OpGraph, precision: Precision) -> float:
    """How many bytes of small gradients are summed at once, on average, if all are summed over the same ranks."""
    key = ("sum_bytes", precision)
    if key not in graph.memo:
        sizes = [
            graph.parameters[name].elements * graph.types_of(name, precision).gradient.itemsize
            for name in sorted(graph.trained)
        ]
        small = sum(size for size in sizes if size < ALONE_BYTES)
        first = BUCKET_BYTES if len(sizes) > 0 and max(sizes) >= ALONE_BYTES else FIRST_BUCKET_BYTES
        graph.memo[key] = small / (1 + math.ceil(max(0, small - first) / BUCKET_BYTES))
    return float(graph.memo[key])


def parameter_costs(
    elements: int,
    types: ParameterPrecision,
    trained: bool,
    stored: tuple[Placement, ...],
    state: tuple[Placement, ...],
    deferred: tuple[bool, ...],
    mesh: Mesh,
    links: Sequence[AxisLinks],
    optimizer: str,
    devices: Sequence[Device],
    together_bytes: float,
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
    summed: tuple[Placement, ...] = tuple(
        Partial() if later else place for later, place in zip(deferred, stored, strict=True)
    )
    gradient_bytes = elements * types.gradient.itemsize
    once = max(gradient_bytes, together_bytes) if gradient_bytes < ALONE_BYTES else gradient_bytes
    seconds = steps_seconds(path(summed, state, mesh.shape), once, links) * gradient_bytes / max(once, 1)
    seconds += steps_seconds(path(state, stored, mesh.shape), elements * types.leaf.itemsize, links)
    cast = owned * types.owner.itemsize + held * types.leaf.itemsize if types.has_copy else 0.0
    cast += owned * (types.gradient.itemsize + types.owner.itemsize) if types.gradient != types.owner else 0.0
    touched = StateBytes(
        trained=int(owned * types.owner.itemsize), optimizer_state=int(optimizer_state), cast=int(cast)
    )
    slowest = max(optimizer_seconds(touched, device, optimizer, 1) for device in devices)
    return seconds + slowest, parameter_bytes + copy + gradients + optimizer_state
