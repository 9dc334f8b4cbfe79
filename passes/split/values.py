"""Values while a graph is rewritten into blocks: whole, or in blocks along a dimension; and how readers get at ranges.

take(h, {1: (0, 60)})     where h is     whole                     h_s0 = slice(h, 1, 0, 60)
                                         in blocks [60, 40]        h_b0
                                         in blocks [30, 30, 40]    h_r0 = cat([h_b0, h_b1], 1)
                                         a parameter               a part of it (``passes.split.state``)
whole(h)                                 in blocks                 h_whole = cat([h_b0, h_b1], 1), once
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
from torch import fx

from cost_models.errors import InternalError
from passes.graph.fake_values import FakeValues
from passes.graph.graph import OpGraph, once_per_graph
from passes.graph.nodes import fake_mode_of, nodes_in, origin, reshaping, tensors_of

aten = torch.ops.aten

Range: TypeAlias = tuple[int, int]
"""The first element, and the one behind the last."""
DimRanges: TypeAlias = Mapping[int, Range]
"""Ranges by dimension."""
RangeKey: TypeAlias = tuple[tuple[int, Range], ...]


@dataclass(frozen=True)
class BlockedTensor:
    """A tensor in blocks along ``dim``, in order: nodes of the new graph and how many elements each has there."""

    dim: int
    nodes: tuple[fx.Node, ...]
    sizes: tuple[int, ...]

    @property
    def ranges(self) -> tuple[Range, ...]:
        return ranges_of(self.sizes)


@dataclass(frozen=True)
class BlockedResults:
    """An op with several results, each in blocks: ``nodes`` are the op's runs, ``dims`` and ``sizes`` by result."""

    nodes: tuple[fx.Node, ...]
    dims: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class BlockRanges:
    """Results that are ranges of a value in blocks (chunk along its blocks): no op at all."""

    source: fx.Node
    ranges: tuple[Range, ...]


SplitResult: TypeAlias = fx.Node | BlockedTensor | BlockedResults | BlockRanges


def ranges_of(sizes: tuple[int, ...]) -> tuple[Range, ...]:
    """Return the ranges of blocks of these sizes."""
    return tuple(pairwise((0, *accumulate(sizes))))


def block_name(whole: str, number: int) -> str:
    """Return the name of a block of the op ``whole`` ("_1", "_2", … follow it if the model has an op of that name)."""
    return f"{whole}_b{number}"


@once_per_graph
def _known_values(graph: OpGraph) -> dict[Hashable, Any]:
    """Keep what ops make of fake operands, by ``FakeValues``' keys: every split of the graph adds to it."""
    return {}


class SplitGraph:
    """The new graph as it grows, and what became of each node of the old one.

    ``unparted``: nodes of parameters and buffers that stay whole.
    ``pull``: makes a range of what an op computes from parameters alone, from parts of them; None where it cannot.
    ``blocks``: (name of the whole op, number of the block), by the name that each block was given.
    """

    def __init__(self, old: OpGraph, unparted: frozenset[str] = frozenset()) -> None:
        self.unparted = unparted
        self.new = fx.Graph()
        self.fake = FakeValues(fake_mode_of(old.graph), _known_values(old))
        self.made: dict[fx.Node, SplitResult] = {}
        self.blocks: dict[str, tuple[str, int]] = {}
        self.pull: Callable[[fx.Node, int, Range], fx.Node | None] = lambda node, dim, span: None
        self.requests: dict[fx.Node, dict[RangeKey, fx.Node]] = {}
        """Ranges of parameters and buffers that blocks read: placeholders for now."""
        self._state = {i.node for i in old.inputs if i.kind in ("parameter", "buffer")}
        self._names = set(old.nodes)
        self._wholes: dict[fx.Node, fx.Node] = {}
        self._taken: dict[tuple[fx.Node, RangeKey], fx.Node] = {}

    # ------------------------------------------------------------------------------------------------------
    # Making nodes

    def fresh(self, name: str, counted: str = "") -> str:
        """Return ``name``, or ``name`` + ``counted`` + the first free number; never a name that is in use."""
        found, number = (f"{name}{counted}0", 1) if counted else (name, 0)
        while found in self._names:
            found = f"{name}{counted or '_'}{number}"
            number += 1
        self._names.add(found)
        return found

    def fresh_block(self, whole: str, number: int) -> str:
        """Return a name that is free for a block of the op ``whole``, and note it in ``blocks``."""
        name = self.fresh(block_name(whole, number))
        self.blocks[name] = (whole, number)
        return name

    def emit(
        self, name: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: fx.Node
    ) -> fx.Node:
        """Make a new op called ``name`` (which is free) that comes from where ``like`` does."""
        value = self.fake.of(target, args, kwargs)
        node = self.new.create_node("call_function", target, args, dict(kwargs), name=name)
        node.meta = {**{k: v for k, v in like.meta.items() if k != "tensor_meta"}, **origin(like)}
        node.meta["val"] = value
        return node

    def copy(self, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        """Copy an op of the old graph with its name, on whole operands."""
        operands = zip(nodes_in((args, dict(kwargs))), nodes_in((node.args, dict(node.kwargs))), strict=True)
        target: Any = node.target
        if all(self.fake.key(new) == self.fake.key(old) for new, old in operands):
            copy = self.new.create_node("call_function", target, args, dict(kwargs), name=node.name)
            copy.meta = dict(node.meta)
            return copy
        # A value that was put together may lie in memory in another order than the one that the op was traced with.
        if target is aten.as_strided.default:
            args = (self._contiguous(node), *args[1:])
        return self.emit(node.name, reshaping(target), args, kwargs, node)

    def _contiguous(self, node: fx.Node) -> fx.Node:
        """Lay the operand of an op that reads memory out as it lay there when it was traced."""
        source: Any = node.args[0]
        value = source.meta["val"]
        if value.storage_offset() != 0 or not value.is_contiguous():
            raise InternalError(
                f"split: {node.name} ({node.target}) reads the memory of {source.name}",
                ["that is not in one piece, and its producers are split"],
                ["split other ops"],
            )
        return self.emit(
            self.fresh(f"{source.name}_copy"),
            aten.clone.default,
            (self.whole(source),),
            {"memory_format": torch.contiguous_format},
            source,
        )

    # ------------------------------------------------------------------------------------------------------
    # Reading values

    def is_state(self, node: fx.Node) -> bool:
        """Tell whether it is a parameter or a buffer."""
        return node.name in self._state

    def has_whole(self, node: fx.Node) -> bool:
        """Tell whether the whole value is there already."""
        return isinstance(self.made[node], fx.Node) or node in self._wholes

    def whole(self, node: fx.Node) -> fx.Node:
        """Return the whole value of a node of the old graph; put together once."""
        made = self.made[node]
        if isinstance(made, fx.Node):
            return made
        assert isinstance(made, BlockedTensor), node.name
        if node not in self._wholes:
            name = self.fresh(f"{node.name}_whole")
            self._wholes[node] = self.emit(name, aten.cat.default, (list(made.nodes), made.dim), {}, node)
        return self._wholes[node]

    def take(self, node: fx.Node, ranges: DimRanges) -> fx.Node:
        """Take the elements of a value within ``ranges``, from no more blocks than have some of them."""
        shape = tensors_of(node)[0].shape
        ranges = {d: span for d, span in ranges.items() if span != (0, shape[d])}
        if not ranges:
            return self.whole(node)
        key = (node, tuple(sorted(ranges.items())))
        if key not in self._taken:
            self._taken[key] = self._take(node, dict(ranges))
        return self._taken[key]

    def _take(self, node: fx.Node, ranges: dict[int, Range]) -> fx.Node:
        made = self.made[node]
        if self.is_state(node):
            return self._request(node, ranges)
        if isinstance(made, BlockedTensor) and made.dim in ranges:
            found = self.joined(node, self.within(made, *ranges.pop(made.dim)))
        elif len(ranges) == 1 and (pulled := self.pull(node, *next(iter(ranges.items())))) is not None:
            return pulled
        else:
            found = self.whole(node)
        for dim, (begin, end) in sorted(ranges.items()):
            found = self.sliced(found, dim, begin, end)
        return found

    def within(self, blocks: BlockedTensor, begin: int, end: int) -> BlockedTensor:
        """Take what lies within a range, in blocks still."""
        nodes, sizes = [], []
        for node, (first, last) in zip(blocks.nodes, blocks.ranges, strict=True):
            low, high = max(begin, first), min(end, last)
            if low < high:
                nodes.append(self.sliced(node, blocks.dim, low - first, high - first))
                sizes.append(high - low)
        return BlockedTensor(blocks.dim, tuple(nodes), tuple(sizes))

    def joined(self, node: fx.Node, blocks: BlockedTensor) -> fx.Node:
        """Join some blocks of a value in one piece."""
        if len(blocks.nodes) == 1:
            return blocks.nodes[0]
        name = self.fresh(node.name, "_r")
        return self.emit(name, aten.cat.default, (list(blocks.nodes), blocks.dim), {}, node)

    def sliced(self, node: fx.Node, dim: int, begin: int, end: int) -> fx.Node:
        """Slice a node of the new graph; the node itself if that is all of it."""
        if (begin, end) == (0, node.meta["val"].shape[dim]):
            return node
        key = (node, ((dim, (begin, end)),))
        if key not in self._taken:
            name = self.fresh(node.name, "_s")
            self._taken[key] = self.emit(name, aten.slice.Tensor, (node, dim, begin, end), {}, node)
        return self._taken[key]

    def _request(self, node: fx.Node, ranges: DimRanges) -> fx.Node:
        """Make a placeholder for a part of a parameter or buffer; ``passes.split.state`` decides what it becomes."""
        value = node.meta["val"]
        shape = tuple(
            ranges[d][1] - ranges[d][0] if d in ranges else int(size) for d, size in enumerate(value.shape)
        )
        whole = self.made[node]
        assert isinstance(whole, fx.Node)
        with self.new.inserting_after(whole):
            part = self.new.placeholder(self.fresh(node.name, "_request"))
        part.meta = {k: v for k, v in node.meta.items() if k != "tensor_meta"}
        part.meta["val"] = self.fake.empty(shape, value, lambda size: int(size))
        self.requests.setdefault(node, {})[tuple(sorted(ranges.items()))] = part
        return part
