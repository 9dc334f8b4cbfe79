"""Regions of a graph on shards: the ops of a block that backward computes again, with the bridges that it repeats.

    value                                           its bridges for this block
    the block makes it, and reads it itself         in the block: y, a part of a sum, is summed again
    others make it, nobody but the block reads it   gathers in the block: ZeRO-3's w is gathered again, x is kept in parts;
                                                    others outside: what they make is no larger than what they take
    others make it, others read it too              outside: they run once, and what they make is kept

So all that leads out of a block comes after it, and all that leads into it before, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from torch import fx

from passes.graph.blocks import MULTIPLYING
from passes.graph.graph import OpGraph
from passes.graph.nodes import tensors_of
from runtime.ops import bridges
from runtime.ops.bridges import is_bridge


def regions_on_shards(graph: OpGraph, regions: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Name the nodes of each of ``regions`` (ops of the model) in ``graph``, which is what a rank runs of it."""
    region_of = {name: index for index, names in enumerate(regions) for name in names}
    found: list[list[str]] = [[] for _ in regions]
    for node in graph.ops:
        own = _of_bridge(node, region_of) if is_bridge(node) else region_of.get(node.name)
        if own is not None and tensors_of(node):  # sizes are computed from the inputs', ahead of everything
            found[own].append(node.name)
    return tuple(tuple(names) for names in found if not _saves_operands_only(graph, names))


def _saves_operands_only(graph: OpGraph, names: Sequence[str]) -> bool:
    """Tell whether a region is all products: with nothing gathered for them, nothing is made again."""
    return all(graph.nodes[name].target in MULTIPLYING for name in names)


def _of_bridge(bridge: fx.Node, region_of: Mapping[str, int]) -> int | None:
    """Return the region that a bridge is in; None for one that runs once."""
    source, last = bridge, bridge
    while is_bridge(source):
        source = source.all_input_nodes[0]
    while len(last.users) == 1 and is_bridge(next(iter(last.users))):
        last = next(iter(last.users))
    made_in = region_of.get(source.name)
    if made_in is not None and made_in in {region_of.get(node.name) for node in _readers(bridge)}:
        return made_in
    readers = {region_of.get(node.name) for node in _readers(source)}
    return readers.pop() if len(readers) == 1 and _growth(source, last) > 1 else None


def _growth(source: fx.Node, last: fx.Node) -> Fraction:
    """Return the times that a rank has of a value, once it is bridged, what it had of it."""
    times = Fraction(1)
    while last is not source:
        if last.target is bridges.all_gather:
            times *= int(str(last.kwargs["parts"]))
        elif last.target in (bridges.split, bridges.reduce_scatter):
            times /= int(str(last.kwargs["parts"]))
        last = last.all_input_nodes[0]
    return times


def _readers(value: fx.Node) -> Iterator[fx.Node]:
    """Yield what reads a value, as it is or bridged."""
    for user in value.users:
        if is_bridge(user):
            yield from _readers(user)
        else:
            yield user
