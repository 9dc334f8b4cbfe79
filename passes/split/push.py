"""Blocks pushed through a graph: seeds in those that were asked for, other ops in those that reach them.

An op that reads blocks goes on in blocks where its rule has a way to; operands that are whole, or in other blocks, are
read range by range. Where no way gives blocks but one sums over the blocked dimension, the sums are added up. Else the
op reads whole operands.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from cost_models.layout import Shard
from passes.graph.graph import OpGraph
from passes.graph.nodes import tensors_of
from passes.graph.recomputed import draws_random_numbers
from passes.shard.rules import makes_tensors
from passes.shard.rules.shapes import shape
from passes.shard.words import operands
from passes.split.rules import SplitWay, block, mapped_args, reads_any_part, ways_to_make, ways_to_read
from passes.split.shapes import chosen, read_by_result
from passes.split.values import BlockedResults, BlockedTensor, Range, SplitGraph, SplitResult, ranges_of
from passes.split.windows import Window, proportional, window, window_from
from runtime.segment.recompute import writes_statistics

aten = torch.ops.aten
log = logging.getLogger("partitioner")


class Pusher:
    """The maker of blocks. ``written``: the buffers that an op's blocks write, by op."""

    def __init__(self, graph: OpGraph, values: SplitGraph) -> None:
        self.graph, self.values = graph, values
        self.written: dict[str, set[str]] = {}
        self.read_whole: set[fx.Node] = set()
        self.of_state = computed_from_state(graph)
        values.pull = self._pull

    def made(self, node: fx.Node, dim: int, sizes: tuple[int, ...]) -> SplitResult | None:
        """Make an op in blocks that were asked for; None if it cannot run in them."""
        spans = ranges_of(sizes)
        for way in ways_to_make(node, dim):
            if way.allows([end for _, end in spans]) and self._may_write(node):
                return self._blocks(way, spans)
        found = window(node, dim)
        if found is not None and found.allows(spans):
            return self._windows(found, spans)
        return chosen(self.values, node)

    def pushed(self, node: fx.Node) -> SplitResult | None:
        """Make what an op gives on blocks that it reads; None if it reads whole operands."""
        result = chosen(self.values, node)
        if result is not None or not makes_tensors(node):
            return result
        sources = [
            (position, source, made)
            for position, source in enumerate(operands(node))
            if isinstance(made := self.values.made[source], BlockedTensor)
        ]
        if not sources or not self._may_write(node):
            return None
        for position, source, made in sources:
            if reads_any_part(node, position):
                args, kwargs = mapped_args(self.values, node, {source: made.nodes[0]})
                return self.values.emit(node.name, node.target, args, kwargs, node)
        ways = [
            (way, made.ranges)
            for position, _, made in sources
            for way in ways_to_read(node, position, made.dim)
            if way.allows([end for _, end in made.ranges])
        ]
        going_on = [(way, spans) for way, spans in ways if not way.summed]
        if going_on:
            best = max(going_on, key=lambda found: self._covered(found[0]))  # the first of equals
            return None if self._better_whole(best[0]) else self._blocks(*best)
        for _, source, _ in sources:
            self.read_whole.update(mere_forms(source, self.of_state))
        if sources[0][0] == 0 and (found := self._windows_from(node, sources[0][2])) is not None:
            return found
        return self._sum(*ways[0]) if ways else None

    # ------------------------------------------------------------------------------------------------------
    # Choosing

    def _covered(self, way: SplitWay) -> int:
        """Count the elements of blocked operands that the way reads in their own blocks' dimension."""
        return sum(
            math.prod(shape(source.meta["val"]))
            for source, need in zip(operands(way.node), way.choice.inputs, strict=True)
            if isinstance(made := self.values.made[source], BlockedTensor)
            and need.placement == Shard(made.dim)
        )

    def _better_whole(self, way: SplitWay) -> bool:
        """Tell whether slicing what is whole costs more than the blocks save.

        An elementwise op joins blocks with a whole value that is larger, or as large when another reader has summed over
        the blocks or put them together already (a residual beside its norm).
        """
        target: Any = way.node.target
        if torch.Tag.pointwise not in target.tags:
            return False
        blocked, whole, assembled = 0, 0, False
        for source in operands(way.node):
            elements = math.prod(shape(source.meta["val"]))
            if isinstance(self.values.made[source], BlockedTensor):
                read = source in self.read_whole or self.values.has_whole(source)
                assembled |= read and elements >= blocked
                blocked = max(blocked, elements)
            elif source.name not in self.of_state:
                whole = max(whole, elements)
        return whole > blocked or (whole == blocked and assembled)

    def _may_write(self, node: fx.Node) -> bool:
        return not writes_statistics(node) or all(map(self.values.is_state, _buffers(node)))

    # ------------------------------------------------------------------------------------------------------
    # Making

    def _blocks(self, way: SplitWay, spans: Sequence[Range]) -> SplitResult | None:
        node = way.node
        several = len(tensors_of(node)) > 1 or isinstance(node.meta["val"], list | tuple)
        if several and not read_by_result(node):
            return None
        nodes = self._attempt(
            node, spans, lambda k, span: block(self.values, way, span, self._name(node, k)), way.dims()
        )
        if nodes is None:
            return None
        if writes_statistics(node):
            self.written[node.name] = {buffer.name for buffer in _buffers(node)}
        sizes = tuple(end - begin for begin, end in spans)
        made = tuple(way.sizes(sizes, result) for result in range(len(way.dims())))
        return (
            BlockedResults(nodes, way.dims(), made)
            if several
            else BlockedTensor(way.dims()[0], nodes, made[0])
        )

    def _windows(self, found: Window, spans: Sequence[Range]) -> SplitResult | None:
        node = found.node
        nodes = self._attempt(
            node, spans, lambda k, span: found.block(self.values, span, self._name(node, k)), (found.dim,)
        )
        sizes = tuple(end - begin for begin, end in spans)
        return None if nodes is None else BlockedTensor(found.dim, nodes, sizes)

    def _windows_from(self, node: fx.Node, made: BlockedTensor) -> SplitResult | None:
        found = window_from(node, made.dim)
        if found is None:
            return None
        sizes = proportional(found, [0, *(end for _, end in made.ranges)])
        spans = ranges_of(sizes)
        return self._windows(found, spans) if len(sizes) > 1 and found.allows(spans) else None

    def _sum(self, way: SplitWay, spans: Sequence[Range]) -> SplitResult | None:
        node = way.node
        parts = self._attempt(
            node, spans, lambda k, span: block(self.values, way, span, self._name(node, k), first=k == 0), ()
        )
        if parts is None:
            return None
        level = list(parts)
        while len(level) > 1:  # a tree: neighbours first
            level = [
                self._added(node, level[i : i + 2], last=len(level) == 2) for i in range(0, len(level), 2)
            ]
        return level[0]

    def _added(self, node: fx.Node, pair: Sequence[fx.Node], last: bool) -> fx.Node:
        if len(pair) == 1:
            return pair[0]
        name = self.values.fresh(f"{node.name}_sum") if last else self.values.fresh(node.name, "_sum")
        return self.values.emit(name, aten.add.Tensor, tuple(pair), {}, node)

    def _name(self, node: fx.Node, number: int) -> str:
        return self.values.fresh_block(node.name, number)

    def _attempt(
        self,
        node: fx.Node,
        spans: Sequence[Range],
        make: Callable[[int, Range], fx.Node],
        dims: tuple[int, ...],
    ) -> tuple[fx.Node, ...] | None:
        """Make the blocks; None unless every one has the shape that it should have (no ``dims``: the op's own)."""
        made = self._tried(node, spans, make)
        if made is None or (all(_fits(node, new, dims) for new in made) and _complete(node, made, dims)):
            return made
        log.debug("split: %s (%s) stays whole: its blocks have other shapes", node.name, node.target)
        return None

    def _tried(
        self, node: fx.Node, spans: Sequence[Range], make: Callable[[int, Range], fx.Node]
    ) -> tuple[fx.Node, ...] | None:
        try:
            return tuple(make(k, span) for k, span in enumerate(spans))
        except (RuntimeError, ValueError, TypeError, IndexError) as problem:
            log.debug("split: %s (%s) stays whole: %s", node.name, node.target, problem)
            return None

    def _pull(self, node: fx.Node, dim: int, span: Range) -> fx.Node | None:
        if node.name not in self.of_state or node.op != "call_function" or not makes_tensors(node):
            return None
        for way in ways_to_make(node, dim):
            if len(way.dims()) == 1 and way.allows(span):
                name = self.values.fresh(node.name, "_s")
                made = self._tried(node, [span], lambda k, s: block(self.values, way, s, name))  # noqa: B023
                return made[0] if made and _fits(node, made[0], (dim,)) else None
        return None


def computed_from_state(graph: OpGraph) -> frozenset[str]:
    """Name parameters, buffers, constants and all that is computed from them alone, the same every time.

    Not from running statistics that a batch norm writes in place: what they are depends on when they are read.
    """
    found = {i.node for i in graph.inputs if i.kind != "batch"}
    found -= {source.name for node in graph.ops if writes_statistics(node) for source in _buffers(node)}
    for node in graph.ops:
        sources = node.all_input_nodes
        if sources and not draws_random_numbers(node) and all(source.name in found for source in sources):
            found.add(node.name)
    return frozenset(found)


def _buffers(node: fx.Node) -> Iterator[fx.Node]:
    """Return the buffers that a batch norm writes."""
    return (source for source in node.args[3:5] if isinstance(source, fx.Node))


def mere_forms(node: fx.Node, of_state: frozenset[str]) -> Iterator[fx.Node]:
    """Yield a value, then its source through ops that no other value enters (a cast, a power), and so on."""
    sources = [node]
    while len(sources) == 1:
        yield sources[0]
        sources = [source for source in operands(sources[0]) if source.name not in of_state]


def _fits(node: fx.Node, made: fx.Node, dims: tuple[int, ...]) -> bool:
    """Tell whether a block is as the op's own result is, but for the blocked dimensions."""
    for old, new, dim in zip(tensors_of(node), tensors_of(made), dims or (None,), strict=True):
        if old.dim() != new.dim() or old.dtype != new.dtype:
            return False
        if any(
            d != dim and _size(a) != _size(b)
            for d, (a, b) in enumerate(zip(old.shape, new.shape, strict=True))
        ):
            return False
    return True


def _complete(node: fx.Node, made: Sequence[fx.Node], dims: tuple[int, ...]) -> bool:
    """Tell whether blocks make up the op's results."""
    return all(
        sum(int(tensors_of(new)[i].shape[dim]) for new in made) == int(tensors_of(node)[i].shape[dim])
        for i, dim in enumerate(dims)
    )


def _size(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
