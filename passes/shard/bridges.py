"""Conversions between two layouts of one value: ``cost_models.conversion``'s steps as nodes of a graph.

    produced P S(0), needed R R~        all_reduce axis 0 · all_gather axis 1 (gradient: reduce-scatter axis 1)

Each op undoes in backward what it does forward, so the steps of both ways are paired. Where the cheapest way back is not
the way there turned round (some nested shards), the way there is taken both times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cost_models.conversion import AxisChange, Steps, steps
from cost_models.layout import Mesh, Replicate, Shard
from passes.shard.words import Need, Placements
from runtime.ops import bridges


@dataclass(frozen=True)
class BridgeOp:
    """One op of a bridge: ``target(value, *args, **options)``."""

    target: Callable[..., Any]
    args: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def axis(self) -> str:
        """The mesh axis that it runs along."""
        return str(dict(self.options)["axis"])


def bridge_ops(produced: Placements, needed: Sequence[Need], mesh: Mesh) -> tuple[BridgeOp, ...]:
    """List the ops between a value produced so and a consumer's need of it; none if they agree."""
    produced, needed = _without_idle_axes(produced, needed, mesh)
    pairs = _both_ways(*steps(produced, needed, mesh), produced, needed)
    return tuple(op for step, way_back in pairs for op in [_op(step, way_back, mesh)])


def last_sum(there: Steps, back: Steps, produced: Placements, needed: Sequence[Need]) -> AxisChange | None:
    """Return the step back of a bridge's last op, if that sums a gradient and does not sum forward: consumers' gradients of
    parameters may be computed beside it. ``there``, ``back``: the bridge's steps.
    """
    pairs = _both_ways(there, back, produced, needed)
    step, way_back = pairs[-1] if pairs else (None, None)
    if way_back is None or way_back.kind not in ("all_reduce", "reduce_scatter"):
        return None
    return way_back if step is None or step.kind == "all_gather" else None


def first_gradient_op(axis: int, mesh: Mesh) -> BridgeOp:
    """Make a whole gradient count on the axis' first rank only."""
    return BridgeOp(bridges.first_gradient, (), (("axis", mesh.axes[axis]),))


def _without_idle_axes(
    produced: Placements, needed: Sequence[Need], mesh: Mesh
) -> tuple[Placements, tuple[Need, ...]]:
    """Leave out axes of one rank: nothing happens along them."""
    idle = [size == 1 for size in mesh.shape]
    return (
        tuple(Replicate() if i else p for p, i in zip(produced, idle, strict=True)),
        tuple(Need(Replicate()) if i else n for n, i in zip(needed, idle, strict=True)),
    )


BothWays = tuple[AxisChange | None, AxisChange | None]


def _both_ways(there: Steps, back: Steps, produced: Placements, needed: Sequence[Need]) -> list[BothWays]:
    pairs = _paired(there, back[::-1])
    return _turned_round(there, produced, needed) if pairs is None else pairs


def _paired(there: Steps, back: Steps) -> list[BothWays] | None:
    """Pair both ways in one chain of ops, in forward order; None if they do not fit together. ``back``: turned round."""
    pairs: list[BothWays] = []
    i = j = 0
    while i < len(there) or j < len(back):
        step = there[i] if i < len(there) else None
        way_back = back[j] if j < len(back) else None
        if step is not None and way_back is not None and _conjugate(step, way_back):
            pairs.append((step, way_back))
            i, j = i + 1, j + 1
        elif step is not None and step.kind in ("all_reduce", "keep_first"):
            pairs.append((step, None))
            i += 1
        elif way_back is not None and way_back.kind == "all_reduce":
            pairs.append((None, way_back))
            j += 1
        else:
            return None
    return pairs


def _conjugate(step: AxisChange, back: AxisChange) -> bool:
    if step.axis != back.axis:
        return False
    if step.kind == "all_to_all":
        return back.kind == "all_to_all" and (step.dim, step.to_dim) == (back.to_dim, back.dim)
    ways_back = {
        "all_reduce": ("all_reduce",),
        "all_gather": ("slice", "reduce_scatter"),
        "reduce_scatter": ("all_gather",),
        "slice": ("all_gather",),
    }
    return back.kind in ways_back.get(step.kind, ()) and step.dim == back.dim


def _turned_round(there: Steps, produced: Placements, needed: Sequence[Need]) -> list[BothWays]:
    """Return the way there, each step with its own way back."""
    last = {step.axis: number for number, step in enumerate(there)}
    partial = {
        axis
        for axis, need in enumerate(needed)
        if need.partial_gradient and isinstance(need.placement, Replicate)
    }
    pairs: list[BothWays] = [
        (None, AxisChange("all_reduce", axis, -1, 1.0))
        for axis in sorted(partial)
        if axis not in last and not isinstance(produced[axis], Shard)
    ]
    for number, step in enumerate(there):
        summed = step.axis in partial and last[step.axis] == number
        way_back: AxisChange | None = None
        if step.kind == "all_gather":
            way_back = AxisChange("reduce_scatter" if summed else "slice", step.axis, step.dim, step.share)
        elif step.kind == "all_reduce" and summed:
            way_back = step
        elif step.kind in ("slice", "reduce_scatter"):
            way_back = AxisChange("all_gather", step.axis, step.dim, step.share)
        elif step.kind == "all_to_all":
            way_back = AxisChange("all_to_all", step.axis, step.to_dim, step.share, step.dim)
        pairs.append((step, way_back))
    return pairs


def _op(step: AxisChange | None, back: AxisChange | None, mesh: Mesh) -> BridgeOp:
    axis = (step or back).axis  # type: ignore[union-attr]  # one of them is there
    on = (("axis", mesh.axes[axis]),)
    parts = (*on, ("parts", mesh.shape[axis]))
    if step is None:
        return BridgeOp(bridges.sum_gradient, (), on)
    match step.kind:
        case "all_reduce":
            return BridgeOp(bridges.all_reduce, (), (*on, ("partial", True)) if back else on)
        case "keep_first":
            return BridgeOp(bridges.keep_first, (), on)
        case "slice":
            return BridgeOp(bridges.split, (step.dim,), parts)
        case "reduce_scatter":
            return BridgeOp(bridges.reduce_scatter, (step.dim,), parts)
        case "all_to_all":
            return BridgeOp(bridges.all_to_all, (step.to_dim, step.dim), parts)
        case "all_gather":
            summed = back is not None and back.kind == "reduce_scatter"
            return BridgeOp(bridges.all_gather, (step.dim,), (*parts, ("partial", True)) if summed else parts)
