"""Meshes to try: factorizations of the cluster's ranks that follow its hierarchy.

    8 nodes of 8:   (64)   (8, 8) (16, 4) (32, 2)   (8, 4, 2) (8, 2, 4) (4, 2, 8) (2, 4, 8) (16, 2, 2) …

Ranks are in file order, so the last axis is the innermost. Every suffix of axes fills part of a node or whole nodes, and
the last of several axes lies inside a node where there are several devices in one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from cost_models.layout import Mesh
from passes.search.feature.graph import FeatureGraph
from passes.search.feature.options import options_of
from passes.search.feature.setting import PartPlace, Setting
from passes.search.feature.tuning import TUNING

NAMES = ("outer", "middle", "inner")


def meshes(
    cluster: ClusterSpec,
    max_axes: int,
    fixed: Sequence[int] | None = None,
    part: PartPlace | None = None,
) -> list[Mesh]:
    """Fewer axes first, larger inner axes first; ``fixed`` alone if given. ``part``: of its devices only."""
    ranks = tuple(range(len(cluster.devices))) if part is None else part.ranks
    names, world = () if part is None else part.axes, len(ranks)
    if fixed is not None:
        return [_mesh(tuple(fixed), ranks, names)]
    if world == 1:
        return [_mesh((1,), ranks)]
    per_node = Counter(cluster.devices[rank].node for rank in ranks).values()
    width = min(per_node)
    even = len(set(per_node)) == 1
    shapes: list[tuple[int, ...]] = [(world,)]
    for axes in range(2, max_axes + 1):
        found = [s for s in _factorizations(world, axes) if even and _follows(s, width, len(per_node))]
        shapes += sorted(found, key=lambda s: s[::-1], reverse=True)
    return [_mesh(shape, ranks) for shape in shapes]


def _follows(shape: Sequence[int], width: int, nodes: int) -> bool:
    inside = 1
    for size in reversed(shape):
        inside *= size
        if width % inside != 0 and inside % width != 0:
            return False
    return nodes == 1 or width == 1 or width % shape[-1] == 0


def _factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        if number > 1:
            yield (number,)
        return
    for first in range(2, number + 1):
        if number % first == 0:
            for rest in _factorizations(number // first, parts - 1):
                yield (first, *rest)


def mesh_problems(shape: Sequence[int], world: int) -> Iterator[str]:
    """Name what is wrong with a mesh for ``world`` devices."""
    if not 1 <= len(shape) <= TUNING.most_axes:
        yield f"it has {len(shape)} axes, expected 1 to {TUNING.most_axes}"
    if math.prod(shape) != world:
        yield f"it has {math.prod(shape):,} devices, the cluster {world:,}"


def _examples(world: int) -> list[str]:
    """A few meshes of so many devices, as they are written: "64", "8x8", "16x4"."""
    near = sorted(_factorizations(world, 2), key=lambda shape: abs(shape[0] - shape[1]))[:2]
    return ["x".join(map(str, shape)) for shape in ((world,), *near)]


def _mesh(shape: tuple[int, ...], ranks: tuple[int, ...], names: tuple[str, ...] = ()) -> Mesh:
    world = len(ranks)
    if problems := list(mesh_problems(shape, world)):
        raise UsageError(
            f"cannot use the mesh {'×'.join(map(str, shape)) or 'without axes'}",
            problems,
            [f"{', '.join(_examples(world))}; without a mesh, all of them are searched"],
        )
    searched = ("all",) if len(shape) == 1 else (NAMES[0], *NAMES[1:-1][: len(shape) - 2], NAMES[-1])
    return Mesh(ranks, shape, names or searched)


def split_seconds(space: FeatureGraph, setting: Setting, shape: Sequence[int], microbatches: int) -> float:
    """Lower bound on shardings on a mesh: of each op the least share that its dimensions leave to a rank.

    Neither 256 samples nor 32 heads nor 4,096 channels are divided by 7: on a mesh (7, 8), seven ranks do the same.
    """
    graph, batch_size = space.graph, setting.job.batch_size
    each = [space.costs.seconds(batch_size, device) for device in setting.devices]
    work = np.minimum.reduce([own.forward + own.backward_input + own.backward_weight for own in each])
    batch = graph.batch.batch_symbol
    symbols, total = {**graph.example_sizes, batch: batch_size // microbatches}, 0.0
    for unit in space.units:
        if unit.kind == "op":
            shares = options_of(unit, unit.choices, shape, symbols, batch).work_share
            ops = [space.op_index[name] for name in unit.members]
            total += float(work[ops].sum() * shares.min(initial=1.0))
    return total
