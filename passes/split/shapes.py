"""Ops that only choose among or line up blocks: slices, chunks and concatenation along the blocked dimension.

g            in blocks [60, 40, 60, 40]        chunk(g, 2, 1)      two values in blocks [60, 40]: no op at all
a, b         in blocks [60, 40] and whole      cat([a, b], 1)      in blocks [60, 40, 100]: no op at all
h            in blocks [60, 40]                slice(h, 1, 50)     in blocks [10, 40]: a slice of h_b0, and h_b1
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import fx

from passes.graph.nodes import argument, tensors_of
from passes.shard.rules.shapes import plain
from passes.split.values import BlockedResults, BlockedTensor, BlockRanges, SplitGraph, SplitResult, ranges_of

aten = torch.ops.aten

PARTING = (
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
)
_JOINING = (aten.cat.default,)


def chosen(values: SplitGraph, node: fx.Node) -> SplitResult | None:
    """Make the result of an op that chooses among blocks, or lines them up; None for other ops."""
    if node.target is operator.getitem:
        return _projected(values, node)
    if node.target in _JOINING:
        return _lined_up(values, node)
    source: Any = node.args[0] if node.args else None
    blocks = values.made.get(source) if isinstance(source, fx.Node) else None
    if not isinstance(blocks, BlockedTensor):
        return None
    dim = argument(node, "dim", 0)
    if not isinstance(dim, int) or dim % tensors_of(source)[0].dim() != blocks.dim:
        return None
    if node.target in PARTING:
        sizes = tuple(int(tensor.shape[blocks.dim]) for tensor in tensors_of(node))
        return BlockRanges(source, ranges_of(sizes)) if all(sizes) and read_by_result(node) else None
    length = int(tensors_of(source)[0].shape[blocks.dim])
    if node.target is aten.select.int:
        return _selected(values, node, blocks, plain(argument(node, "index")) % length)
    begin = _begin(node, length)
    return None if begin is None else _within(values, blocks, begin, begin + _length(node, blocks.dim))


def read_by_result(node: fx.Node) -> bool:
    """Tell whether readers of an op with several results take one each."""
    return all(user.target is operator.getitem for user in node.users)


def _begin(node: fx.Node, length: int) -> int | None:
    """Return where a slice of neighbours begins; None for others."""
    if node.target is aten.slice.Tensor and argument(node, "step") == 1:
        start = plain(argument(node, "start")) or 0
    elif node.target is aten.narrow.default:
        start = plain(argument(node, "start"))
    else:
        return None
    if (
        not isinstance(start, int)
        or abs(start) > sys.maxsize // 2
        or not _length(node, argument(node, "dim", 0))
    ):
        return None
    return max(start + length, 0) if start < 0 else start


def _length(node: fx.Node, dim: int) -> int:
    return int(tensors_of(node)[0].shape[dim])


def _within(values: SplitGraph, blocks: BlockedTensor, begin: int, end: int) -> SplitResult:
    found = values.within(blocks, begin, end)
    return found if len(found.nodes) > 1 else found.nodes[0]


def _selected(values: SplitGraph, node: fx.Node, blocks: BlockedTensor, index: int) -> SplitResult:
    for source, (begin, end) in zip(blocks.nodes, blocks.ranges, strict=True):
        if begin <= index < end:
            return values.emit(node.name, node.target, (source, blocks.dim, index - begin), {}, node)
    raise IndexError(index)


def _projected(values: SplitGraph, node: fx.Node) -> SplitResult | None:
    source, index = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(index, int)
    made = values.made[source]
    if isinstance(made, BlockRanges):
        blocks = values.made[made.source]
        assert isinstance(blocks, BlockedTensor)
        return _within(values, blocks, *made.ranges[index])
    if isinstance(made, BlockedResults):
        names = [values.fresh_block(node.name, k) for k in range(len(made.nodes))]
        nodes = [
            values.emit(name, operator.getitem, (run, index), {}, node)
            for name, run in zip(names, made.nodes, strict=True)
        ]
        return BlockedTensor(made.dims[index], tuple(nodes), made.sizes[index])
    return None


def _lined_up(values: SplitGraph, node: fx.Node) -> SplitResult | None:
    sources: Any = argument(node, "tensors")
    rank = tensors_of(node)[0].dim()
    dim = argument(node, "dim", 0) % rank
    made = [values.made[source] for source in sources]
    if not any(isinstance(m, BlockedTensor) and m.dim == dim for m in made):
        return None
    lengths: list[Any] = [
        source.meta["val"].shape[dim] if source.meta["val"].dim() == rank else None for source in sources
    ]
    types = {source.meta["val"].dtype for source in sources}
    if len(types) > 1 or not all(isinstance(n, int) and n > 0 for n in lengths):
        return None
    nodes: list[fx.Node] = []
    sizes: list[int] = []
    for source, value, length in zip(sources, made, lengths, strict=True):
        if isinstance(value, BlockedTensor) and value.dim == dim:
            nodes += value.nodes
            sizes += value.sizes
        else:
            nodes.append(values.whole(source))
            sizes.append(length)
    return BlockedTensor(dim, tuple(nodes), tuple(sizes))
