"""Messages of a sharded graph's bridges and local ops: their collectives, each by the volume of its ring algorithm.

    n bytes whole along the axis, p ranks          each rank sends (Thakur, Rabenseifner and Gropp, 2005)
    all_reduce                                     2 (p - 1) / p · n
    all_gather, reduce_scatter                     (p - 1) / p · n
    all_to_all                                     (p - 1) / p · n / p

Messages from everybody to everybody (``runtime.mesh.gloo``) send as much.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import sympy
from torch import fx

from cost_models.cluster import ClusterSpec
from cost_models.conversion import AxisLinks, CollectiveKind, group_links
from cost_models.layout import Mesh
from passes.graph.graph import tensor_specs
from passes.shard.sent import StageCollective
from passes.shard.shard import ShardedGraph
from runtime.mesh.ranks_along import JOINT, all_ranks_along
from runtime.ops import bridges
from runtime.ops.attention import HEADS, heads_sent
from runtime.ops.local import run_local

_FACTOR: Mapping[CollectiveKind, float] = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_to_all": 1.0,
}


@dataclass(frozen=True)
class Traffic:
    """One collective of the graph: ``whole_bytes`` is n, per micro-batch; ``axis`` may be several joined.

    ``together_bytes``: n of all that the executor makes one collective of with this one (``runtime.ops.gather_ahead``);
    0 where it is alone. Each takes its part of their seconds.
    """

    node: str
    kind: CollectiveKind
    axis: str
    whole_bytes: int
    backward: bool
    together_bytes: int = 0

    def sent_bytes(self, ranks: int) -> float:
        """Count the bytes that each of ``ranks`` sends."""
        once = _FACTOR[self.kind] * (ranks - 1) / ranks * self.whole_bytes
        return once / ranks if self.kind == "all_to_all" else once

    def seconds(self, links: AxisLinks) -> float:
        """Return the seconds that it takes with these links to itself."""
        if not self.together_bytes:
            return links.seconds(self.kind, self.whole_bytes)
        return links.seconds(self.kind, self.together_bytes) * self.whole_bytes / self.together_bytes


def traffic(sharded: ShardedGraph, microbatch_size: int) -> tuple[Traffic, ...]:
    """List every collective of the local graph, for micro-batches of ``microbatch_size`` samples in all."""
    batch = sharded.graph.batch
    symbols = dict.fromkeys(batch.symbols, 0) | {batch.batch_symbol: microbatch_size // batch.multiple}
    return tuple(
        found
        for node in sharded.graph.ops
        for found in (
            _of_bridge(node, node.name in sharded.graph.needs_grad, symbols)
            if bridges.is_bridge(node)
            else _of_local(node, node.name in sharded.graph.needs_grad, symbols, sharded.mesh)
            if node.target is run_local
            else ()
        )
    )


def together(found: Iterable[Traffic], steps: Iterable[Collection[str]]) -> tuple[Traffic, ...]:
    """Make one collective of those along an axis, and of their ways back, whose nodes are of one of ``steps``."""
    found = tuple(found)
    step_of = {name: number for number, names in enumerate(steps) for name in names}
    whole: dict[tuple[int, str, bool], int] = defaultdict(int)
    for item in found:
        if item.node in step_of:
            whole[step_of[item.node], item.axis, item.backward] += item.whole_bytes
    return tuple(
        replace(item, together_bytes=whole[step_of[item.node], item.axis, item.backward])
        if item.node in step_of
        else item
        for item in found
    )


def priced(found: Iterable[Traffic], mesh: Mesh, cluster: ClusterSpec) -> tuple[StageCollective, ...]:
    """Return the bytes that each rank of the mesh sends, and the seconds that takes, every group of an axis at once."""
    items = tuple(found)
    groups = {item.axis: all_ranks_along(mesh, item.axis.split(JOINT)) for item in items}
    links = {axis: group_links(of_axis, cluster) for axis, of_axis in groups.items()}
    return tuple(
        StageCollective(
            value=item.node,
            kind=item.kind,
            axis=item.axis,
            size_bytes=item.whole_bytes,
            sent_bytes=item.sent_bytes(len(groups[item.axis][0])),
            backward=item.backward,
            seconds=item.seconds(links[item.axis]),
        )
        for item in items
    )


def repeated(sent: Iterable[StageCollective], again: Collection[str]) -> tuple[StageCollective, ...]:
    """List the collectives of forward that backward makes a second time, because it computes the nodes ``again``."""
    return tuple(replace(item, backward=True) for item in sent if item.value in again and not item.backward)


def _of_bridge(node: fx.Node, differentiable: bool, symbols: Mapping[sympy.Symbol, int]) -> Iterator[Traffic]:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    axis, partial = str(node.kwargs["axis"]), bool(node.kwargs.get("partial", False))
    taken, made = (tensor_specs(n)[0].size_bytes(symbols) for n in (source, node))
    there: CollectiveKind | None = None
    back: CollectiveKind | None = None
    whole = max(taken, made)
    match node.target:
        case bridges.all_reduce:
            there, back = "all_reduce", "all_reduce" if partial else None
        case bridges.sum_gradient:
            back = "all_reduce"
        case bridges.split:
            back = "all_gather"
        case bridges.all_gather:
            there, back = "all_gather", "reduce_scatter" if partial else None
        case bridges.reduce_scatter:
            there, back = "reduce_scatter", "all_gather"
        case bridges.all_to_all:
            there = back = "all_to_all"
            whole = taken * int(str(node.kwargs["parts"]))
    if there is not None:
        yield Traffic(node.name, there, axis, whole, False)
    if back is not None and differentiable:
        yield Traffic(node.name, back, axis, whole, True)


def _of_local(
    node: fx.Node, differentiable: bool, symbols: Mapping[sympy.Symbol, int], mesh: Mesh
) -> Iterator[Traffic]:
    """Yield the collectives of ``runtime.ops.cross_entropy``, ``runtime.ops.batch_norm`` and ``runtime.ops.attention``."""
    function, _, roles, first, *rest = node.args
    assert isinstance(roles, dict)
    assert isinstance(first, fx.Node)
    spec = tensor_specs(first)[0]

    def ranks_of(role: str) -> int:
        return math.prod(mesh.shape[mesh.axes.index(name)] for name in str(roles[role]).split(JOINT))

    if function == "attention" and "tokens" in roles:
        ranks, count = ranks_of("tokens"), spec.concrete(symbols)[HEADS]
        for source in rest[:2]:
            (heads,) = tensor_specs(source)  # type: ignore[arg-type]
            keys = heads.concrete(symbols)[HEADS]
            brought = heads.size_bytes(symbols) // keys * heads_sent(count, ranks, keys)[1] * ranks
            for backward in (False, True)[: 1 + differentiable]:
                yield Traffic(node.name, "all_to_all", str(roles["tokens"]), brought * ranks, backward)
    if function == "batch_norm":
        channels = spec.concrete(symbols)[1]
        size_bytes = 2 * channels * max(4, spec.dtype.itemsize)
        ranks = ranks_of("samples")
        yield Traffic(node.name, "all_gather", str(roles["samples"]), size_bytes * ranks, False)
        if differentiable:
            yield Traffic(node.name, "all_reduce", str(roles["samples"]), size_bytes, True)
    if function in ("cross_entropy", "nll_loss"):
        reduction = rest[2] if len(rest) > 2 else 1
        if "classes" in roles:
            (target,) = tensor_specs(rest[0])  # type: ignore[arg-type]
            samples = math.prod(target.concrete(symbols)) * max(4, spec.dtype.itemsize)
            smoothed = 1 if len(rest) > 4 and rest[4] else 0
            yield Traffic(node.name, "all_reduce", str(roles["classes"]), samples, False)
            yield Traffic(node.name, "all_reduce", str(roles["classes"]), samples * (2 + smoothed), False)
        if "samples" in roles and reduction == 1:
            made = tensor_specs(node)[0].size_bytes(symbols)
            yield Traffic(node.name, "all_reduce", str(roles["samples"]), made, False)
