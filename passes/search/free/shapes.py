"""Shapes: families to split, devices and sizes of blocks, ranked by an estimate before any graph is rewritten.

    families ─► those that are large, or pay ─► the fastest n devices ─► sizes ─► estimated, best first

Symbols, seconds per step of m micro-batches: T[f, d] a family f on device d, R[d] all other ops, M[f, d] messages of a
block on d while everything else is on the fastest device; x[k] the share of the k-th device.

    proportional   x[k] ~ speed of device k
    equalized      x[k]·ΣT[f, k] + fixed[k] = level for all k: compute and messages end together
    first          (R + Σ_f max_k (x[k]·T[f, k] + M[f, k])) / m          one micro-batch, family after family
    period         (1 + a quarter of Σ messages on devices in parts of all work) / Σ speeds    all devices as busy
    estimate       first + (1 - 1/m)·period

The estimate ranks; it is no bound: ops that are not split may run beside blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cost_models.arrays import FloatArray
from cost_models.cluster import ClusterSpec
from cost_models.compute import optimizer_seconds
from cost_models.memory import state_bytes
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.search.free.request import FreeRequest
from passes.search.free.splits import proportional
from passes.search.microbatches import spread
from passes.split.families import Family
from passes.split.split import Split

BLOCK_MESSAGE_SHARE = 0.25
"""Share of blocks' messages that a device is kept from computing, between none and all."""


@dataclass(frozen=True)
class BlockChoice:
    """A choice of blocks: block k of every family goes to ``ranks[k]``, the fastest first.

    ``seconds``: estimate of the step.
    """

    families: tuple[Family, ...]
    sizes: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    microbatches: int
    seconds: float

    @property
    def splits(self) -> tuple[Split, ...]:
        """Return the splits that ``split_neurons`` takes."""
        pairs = zip(self.families, self.sizes, strict=True)
        return tuple(split for family, sizes in pairs for split in family.splits(sizes))


@dataclass(frozen=True, eq=False)
class FamilySeconds:
    """Seconds of one number of micro-batches.

    whole      [F, K]   T
    messages   [F, K]   M
    rest       [K]      R
    speeds     [K]      steps of the whole model per second
    """

    whole: FloatArray
    messages: FloatArray
    rest: FloatArray
    speeds: FloatArray


def equalized(unit_seconds: Sequence[float], fixed_seconds: Sequence[float]) -> tuple[float, ...]:
    """Return shares x ≥ 0 with Σ x = 1 and x[k]·unit[k] + fixed[k] equal wherever x[k] > 0, and not less elsewhere.

    >>> equalized((1.0, 3.0), (0.0, 0.0))
    (0.75, 0.25)
    """
    unit = np.maximum(np.asarray(unit_seconds, dtype=np.float64), 1e-30)
    fixed = np.asarray(fixed_seconds, dtype=np.float64)
    order = np.argsort(fixed, kind="stable")
    level = 0.0
    for count in range(1, len(order) + 1):
        used = order[:count]
        level = (1.0 + (fixed[used] / unit[used]).sum()) / (1.0 / unit[used]).sum()
        if count == len(order) or level <= fixed[order[count]]:
            break
    return tuple(np.maximum((level - fixed) / unit, 0.0).tolist())


def shapes(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    request: FreeRequest,
    counts: Sequence[int],
    chosen: Sequence[Family],
) -> list[BlockChoice]:
    """List all distinct shapes, best estimated first.

    ``chosen``: families; ``counts``: numbers of micro-batches.
    """
    found: dict[object, BlockChoice] = {}
    for families in dict.fromkeys((tuple(chosen), alternating(chosen))):
        for m in spread(counts):
            seconds = family_seconds(graph, costs, cluster, request, m, families)
            for shape in _of_one_count(families, m, seconds):
                key = shape.families, shape.sizes, shape.ranks
                if key not in found or shape.seconds < found[key].seconds:
                    found[key] = shape
    return sorted(found.values(), key=lambda shape: shape.seconds)


def alternating(families: Sequence[Family]) -> tuple[Family, ...]:
    """Leave out each family whose seeds sum over the units of one before it.

    The input of such a family arrives in parts and is summed, so that its output is in one piece.
    """
    kept: list[Family] = []
    summed: set[str] = set()
    for family in families:
        if not summed.issuperset(family.ops):
            kept.append(family)
            summed |= set(family.ends)
    return tuple(kept)


def _of_one_count(families: Sequence[Family], m: int, seconds: FamilySeconds) -> Iterator[BlockChoice]:
    """Yield the shapes of one number of micro-batches: by devices, by families and by sizes."""
    fastest = np.argsort(-seconds.speeds, kind="stable").tolist()
    for n in spread(range(2, len(fastest) + 1)):
        ranks = fastest[:n]
        by_speed = seconds.speeds[ranks] / seconds.speeds[ranks].sum()
        paying = [i for i in range(len(families)) if _pays(i, ranks, by_speed, seconds)]
        for members in dict.fromkeys((tuple(range(len(families))), tuple(paying))):
            if not members:
                continue
            of = list(members)
            total, messages = seconds.whole[of].sum(axis=0), seconds.messages[of].sum(axis=0)
            rest = float(seconds.whole.sum(axis=0)[ranks[0]] - total[ranks[0]] + seconds.rest[ranks[0]])
            unit, sent = total[ranks].tolist(), messages[ranks].tolist()
            together = equalized(unit, [rest, *(BLOCK_MESSAGE_SHARE * each for each in sent[1:])])
            after_each_other = equalized(unit, sent)
            for shares in dict.fromkeys((tuple(by_speed.tolist()), together, after_each_other)):
                shape = _shape([families[i] for i in of], of, ranks, shares, m, rest, seconds)
                if shape is not None:
                    yield shape


def _pays(family: int, ranks: Sequence[int], shares: FloatArray, seconds: FamilySeconds) -> bool:
    """Tell whether the family's blocks end before the whole would on the fastest device."""
    each = shares * seconds.whole[family, ranks] + seconds.messages[family, ranks]
    return bool(each.max() < seconds.whole[family, ranks[0]])


def _shape(
    families: Sequence[Family],
    of: Sequence[int],
    ranks: Sequence[int],
    shares: Sequence[float],
    m: int,
    rest: float,
    seconds: FamilySeconds,
) -> BlockChoice | None:
    """Make a shape with its estimate; None if fewer than two devices have a share.

    Devices without a share, and families of a single unit, are left out.
    """
    used = [(rank, share) for rank, share in zip(ranks, shares, strict=True) if share > 0]
    several = [(i, family) for i, family in zip(of, families, strict=True) if family.units > 1]
    if len(used) < 2 or not several:
        return None
    sizes = [proportional(family.units, [share for _, share in used]) for _, family in several]
    own = [rank for rank, _ in used]
    first, away = rest, np.zeros(len(seconds.speeds))
    for (i, family), blocks in zip(several, sizes, strict=True):
        at = own[: len(blocks)]
        part = np.array(blocks) / family.units
        first += float((part * seconds.whole[i, at] + seconds.messages[i, at]).max())
        away[at] += seconds.messages[i, at]
        away[own[0]] += seconds.messages[i, at].sum()
    lost = float((BLOCK_MESSAGE_SHARE * away * seconds.speeds).sum())
    period = (1.0 + lost) / float(seconds.speeds.sum())
    estimate = first / m + (1 - 1 / m) * period
    return BlockChoice(tuple(family for _, family in several), tuple(sizes), tuple(own), m, estimate)


def family_seconds(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    request: FreeRequest,
    m: int,
    families: Sequence[Family],
) -> FamilySeconds:
    """Return the seconds of families and of all other ops on each device, and of messages of blocks.

    Messages are those of a block that is not on the fastest device, while everything else is.
    """
    size = -(-request.job.batch_size // m)
    position = {name: number for number, name in enumerate(costs.ops)}
    each = []
    for device in cluster.devices:
        s = costs.seconds(size, device)
        each.append(
            m * (np.asarray(s.forward) + np.asarray(s.backward_input) + np.asarray(s.backward_weight))
        )
    per_op = np.stack(each)
    seeds = {name for family in families for name in family.ops}
    parted = [replace(family, ends=tuple(set(family.ends) - seeds)) for family in families]
    families = [replace(f, members=tuple(dict.fromkeys((*f.members, *f.ends)))) for f in parted]
    members = [[position[name] for name in family.members] for family in families]
    inside = np.zeros(len(position), dtype=bool)
    for own in members:
        inside[own] = True
    whole = np.stack([per_op[:, own].sum(axis=1) for own in members])
    for number, family in enumerate(families):
        whole[number] += _optimizer(graph, cluster, request, family)
    rest = per_op[:, ~inside].sum(axis=1)
    speeds = 1.0 / np.maximum(whole.sum(axis=0) + rest, 1e-30)
    fastest = int(np.argmax(speeds))
    sent = [_sent(graph, position, costs.at(size).output_bytes, family) for family in families]
    messages = np.zeros_like(whole)
    for d in range(cluster.world_size):
        if d != fastest:
            path = cluster.path(fastest, d)
            for number, (count, total) in enumerate(sent):
                took = count * path.latency_seconds + total / path.bandwidth_bytes_per_second
                messages[number, d] = m * took
    return FamilySeconds(whole, messages, rest, speeds)


def _optimizer(graph: OpGraph, cluster: ClusterSpec, request: FreeRequest, family: Family) -> FloatArray:
    """Return [K] seconds of the optimizer's step for the family's parameters."""
    read = {source.name for name in family.members for source in graph.nodes[name].all_input_nodes}
    given = [graph.input_of[name] for name in read if name in graph.input_of]
    names = sorted({i.name for i in given if i.kind == "parameter" and i.name in graph.trained})
    counted = [(graph.parameters[n].elements, graph.types_of(n, request.job.precision), True) for n in names]
    held = state_bytes(counted, request.job.optimizer)
    return np.array([optimizer_seconds(held, d, request.job.optimizer, len(names)) for d in cluster.devices])


def _sent(
    graph: OpGraph, position: dict[str, int], output_bytes: FloatArray, family: Family
) -> tuple[int, float]:
    """Count messages and bytes of a block that is away, per micro-batch: its inputs, and its part of the outputs."""
    members, ends = set(family.members), set(family.ends)
    read = {
        source.name
        for name in family.members
        for source in graph.nodes[name].all_input_nodes
        if source.name in position and source.name not in members
    }
    made = {
        name for name in family.members if any(user.name not in members for user in graph.nodes[name].users)
    }
    count, total = 0, 0.0
    for name in (*read, *made):
        both = 2 if name in graph.needs_grad else 1
        part = 0.5 if name in made and name not in ends else 1.0  # blocks of it, instead of parts of its sum
        count += both
        total += both * part * float(output_bytes[position[name]])
    return count, total
