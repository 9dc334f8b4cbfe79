"""Windows: a block of a convolution's pixels reads only the pixels under its windows.

    outputs [a, b)  ◄─  inputs [a·stride - padding, (b - 1)·stride - padding + extent)

What lies outside of the image is padded by an op of its own, so that the block's own padding is zero there:

    y = conv2d(x, w, stride 1, padding 1)  [b, c, 8, 8]    x in blocks [4, 4] along 2, y in blocks [4, 4]
    x_b1_s0  = slice(x_b1, 2, 0, 1)                 the one row of the neighbour that block 0 reads
    x_r0     = cat([x_b0, x_b1_s0], 2)              rows [-1, 5) without the border
    y_b0_pad = constant_pad_nd(x_r0, [0, 0, 1, 0], 0.0)
    y_b0     = conv2d(y_b0_pad, w, padding [0, 1])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from passes.graph.nodes import argument, replaced
from passes.shard.rules.shapes import operands_shapes, plain
from passes.shard.words import operands
from passes.split.rules import mapped_args
from passes.split.values import Range, SplitGraph

aten = torch.ops.aten


@dataclass(frozen=True)
class Window:
    """The inputs along ``source_dim`` of the first operand that each output along ``dim`` reads.

    ``per_row``: outputs along ``dim`` that a row of windows makes (``im2col`` has its rows one after another).
    """

    node: fx.Node
    dim: int
    source_dim: int
    stride: int
    padding: int
    extent: int
    fill: float
    target: Any
    changes: Mapping[str, Any]
    """Arguments of the op on an operand that is padded already."""
    per_row: int = 1

    def reads(self, span: Range) -> Range:
        """Return the inputs under outputs ``span``; it may reach over the border."""
        first, last = span[0] // self.per_row, -(-span[1] // self.per_row) - 1
        low = first * self.stride - self.padding
        return low, (last - first) * self.stride + low + self.extent

    def allows(self, spans: Sequence[Range]) -> bool:
        """Tell whether every block reads something of the operand."""
        length = operands(self.node)[0].meta["val"].shape[self.source_dim]
        return isinstance(length, int) and all(
            max(low, 0) < min(high, length) for low, high in map(self.reads, spans)
        )

    def block(self, values: SplitGraph, span: Range, name: str) -> fx.Node:
        """Make the op on one block of its outputs."""
        source = operands(self.node)[0]
        length = int(source.meta["val"].shape[self.source_dim])
        low, high = self.reads(span)
        taken = values.take(source, {self.source_dim: (max(low, 0), min(high, length))})
        if low < 0 or high > length:
            after = source.meta["val"].dim() - 1 - self.source_dim
            widths = [0, 0] * after + [max(-low, 0), max(high - length, 0)]
            padded = values.fresh(f"{name}_pad")
            args = (taken, widths, self.fill)
            taken = values.emit(padded, aten.constant_pad_nd.default, args, {}, self.node)
        args, kwargs = mapped_args(values, self.node, {source: taken})
        for argument_name, value in self.changes.items():
            args, kwargs = replaced(self.node, args, kwargs, argument_name, value)
        if self.per_row == 1:
            return values.emit(name, self.target, args, kwargs, self.node)
        rows = values.emit(values.fresh(f"{name}_rows"), self.target, args, kwargs, self.node)
        first = span[0] // self.per_row * self.per_row
        begin, end = span[0] - first, span[1] - first
        if (begin, end) == (0, rows.meta["val"].shape[self.dim]):
            return rows
        return values.emit(name, aten.slice.Tensor, (rows, self.dim, begin, end), {}, self.node)


def window(node: fx.Node, dim: int) -> Window | None:
    """Return how outputs along a dimension of windows read the operand; None for other dimensions and ops."""
    find = _WINDOWS.get(node.target)
    return find(node, dim) if find is not None else None


def window_from(node: fx.Node, source_dim: int) -> Window | None:
    """Return the same for a dimension of the first operand."""
    for dim in range(node.meta["val"].dim()) if isinstance(node.meta["val"], torch.Tensor) else ():
        found = window(node, dim)
        if found is not None and found.source_dim == source_dim:
            return found
    return None


def proportional(window: Window, boundaries: Sequence[int]) -> tuple[int, ...]:
    """Choose blocks of outputs, cut where the operand's ``boundaries`` (0 first, its length last) are in proportion.

    A mere border goes to the first and the last block.
    """
    rows = int(window.node.meta["val"].shape[window.dim]) // window.per_row
    length = boundaries[-1]
    if window.extent == window.stride == 1:
        inner = {boundary + window.padding for boundary in boundaries[1:-1]}
    else:
        inner = {(boundary * rows + length // 2) // length for boundary in boundaries}
    cuts = sorted({cut for cut in inner if 0 < cut < rows} | {0, rows})
    return tuple((high - low) * window.per_row for low, high in pairwise(cuts))


# ----------------------------------------------------------------------------------------------------------
# Ops with windows


def _listed(given: Any, count: int) -> list[int]:
    """Return a setting per dimension of pixels: one number may stand for all."""
    numbers = plain(given)
    numbers = [numbers] if isinstance(numbers, int) else list(numbers)
    return numbers * count if len(numbers) == 1 else numbers


def _without(padding: Sequence[int], at: int) -> list[int]:
    return [0 if i == at else p for i, p in enumerate(padding)]


def _convolution(node: fx.Node, dim: int) -> Window | None:
    image, kernel = operands_shapes(node)[:2]
    pixels = len(kernel) - 2
    at = dim - (len(image) - pixels)
    if at < 0 or argument(node, "transposed", False):
        return None
    dilation, stride = (_listed(argument(node, name), pixels) for name in ("dilation", "stride"))
    target: Any = node.target
    given = argument(node, "padding")
    extents = [d * (k - 1) + 1 for d, k in zip(dilation, kernel[2:], strict=True)]
    if isinstance(given, str):
        if given == "same" and any(extent % 2 == 0 for extent in extents):
            return None  # padded on one side more than on the other
        given = [0 if given == "valid" else extent // 2 for extent in extents]
        target = _BY_NUMBERS[target]
    padding = _listed(given, pixels)
    changes = {"padding": _without(padding, at)}
    return Window(node, dim, dim, stride[at], padding[at], extents[at], 0.0, target, changes)


def _pool(pixels: int, largest: bool) -> Callable[[fx.Node, int], Window | None]:
    def find(node: fx.Node, dim: int) -> Window | None:
        rank = len(operands_shapes(node)[0])
        at = dim - (rank - pixels)
        if at < 0:
            return None
        kernel = _listed(argument(node, "kernel_size"), pixels)
        stride = _listed(argument(node, "stride") or kernel, pixels)
        padding = _listed(argument(node, "padding"), pixels)
        dilation = _listed(argument(node, "dilation", 1), pixels)
        extent = dilation[at] * (kernel[at] - 1) + 1
        if not largest and not _averages_full_windows(node, dim, (kernel[at], stride[at], padding[at])):
            return None
        changes = {"padding": _without(padding, at)}
        fill = -math.inf if largest else 0.0
        return Window(node, dim, dim, stride[at], padding[at], extent, fill, node.target, changes)

    return find


def _averages_full_windows(node: fx.Node, dim: int, sizes: tuple[int, int, int]) -> bool:
    """Tell whether each window counts all its pixels, the border's zeros too, so that padding may come before."""
    kernel, stride, padding = sizes
    made, length = node.meta["val"].shape[dim], operands_shapes(node)[0][dim]
    over = (made - 1) * stride + kernel > length + 2 * padding
    counted = argument(node, "count_include_pad", True) or argument(node, "divisor_override") is not None
    return not over and (padding == 0 or bool(counted))


def _unfold(node: fx.Node, dim: int) -> Window | None:
    rank = len(operands_shapes(node)[0])
    if dim != argument(node, "dimension") % rank:
        return None
    step, size = argument(node, "step"), argument(node, "size")
    return Window(node, dim, dim, step, 0, size, 0.0, node.target, {})


def _columns(node: fx.Node, dim: int) -> Window | None:
    """Find windows of ``im2col``: (batch, channels, height, width) -> (batch, channels · kernel, locations), row by row."""
    image = operands_shapes(node)[0]
    if dim != node.meta["val"].dim() - 1:
        return None
    kernel, dilation, padding, stride = (
        _listed(argument(node, name), 2) for name in ("kernel_size", "dilation", "padding", "stride")
    )
    extent = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    width = (image[-1] + 2 * padding[1] - extent[1]) // stride[1] + 1
    row = len(image) - 2
    changes = {"padding": _without(padding, 0)}
    return Window(node, dim, row, stride[0], padding[0], extent[0], 0.0, node.target, changes, width)


def _pad(node: fx.Node, dim: int) -> Window | None:
    rank = len(operands_shapes(node)[0])
    widths = list(plain(argument(node, "pad")))
    at = 2 * (rank - 1 - dim)
    if argument(node, "mode", "constant") != "constant" or at >= len(widths) or min(widths) < 0:
        return None
    changes = {"pad": [0 if i in (at, at + 1) else width for i, width in enumerate(widths)]}
    fill = float(argument(node, "value") or 0.0)
    return Window(node, dim, dim, 1, widths[at], 1, fill, node.target, changes)


_BY_NUMBERS = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}

_WINDOWS: Mapping[object, Callable[[fx.Node, int], Window | None]] = {
    **dict.fromkeys((*_BY_NUMBERS, *_BY_NUMBERS.values(), aten.convolution.default), _convolution),
    aten.max_pool1d.default: _pool(1, largest=True),
    aten.max_pool2d.default: _pool(2, largest=True),
    aten.max_pool3d.default: _pool(3, largest=True),
    aten.avg_pool1d.default: _pool(1, largest=False),
    aten.avg_pool2d.default: _pool(2, largest=False),
    aten.avg_pool3d.default: _pool(3, largest=False),
    aten.unfold.default: _unfold,
    aten.im2col.default: _columns,
    aten.pad.default: _pad,
    aten.constant_pad_nd.default: _pad,
}
