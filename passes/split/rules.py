"""Ways to run ops in blocks: the sharding rules (``passes.shard.rules``) read for blocks of any sizes.

    choice of the rule            in blocks
    R S0 S0 -> S1                 each block reads all of x and its rows of weight and bias
    S1 S1 P -> P                  each block reads its columns of x and weight: a part of the sum; the bias once

Boundaries are scaled where dimensions that go together differ in size ([b, s, 32] viewed as [b, s, 4, 8]: block [8, 32)
is heads [1, 4)); a boundary within a head has no counterpart, and the value is put together instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from cost_models.layout import Partial, Replicate, Shard
from passes.graph.nodes import argument, given_argument, replaced, reshaping, tensors_of
from passes.shard.rules import choices
from passes.shard.rules.local import explicit
from passes.shard.rules.reductions import MEAN
from passes.shard.rules.shapes import plain
from passes.shard.sizes import COUNTS, SIZE_ARGUMENTS
from passes.shard.words import Choice, operands
from passes.split.values import Range, SplitGraph

aten = torch.ops.aten

_RANDOM = "random:"

_WITHOUT_SUMMAND = {
    aten.addmm.default: aten.mm.default,
    aten.baddbmm.default: aten.bmm.default,
    aten.addmv.default: aten.mv.default,
}
"""The product alone, for the blocks after the first: what is added is added once."""

CONVOLUTIONS = frozenset(
    {
        aten.conv1d.default,
        aten.conv2d.default,
        aten.conv3d.default,
        aten.conv1d.padding,
        aten.conv2d.padding,
        aten.conv3d.padding,
        aten.conv_transpose1d.default,
        aten.conv_transpose2d.input,
        aten.conv_transpose3d.input,
        aten.convolution.default,
    }
)
_OPTIONAL_BIAS = CONVOLUTIONS | {aten.linear.default, aten.bilinear.default}


@dataclass(frozen=True)
class SplitWay:
    """One way to run an op in blocks. ``length``: elements of the dimension that blocks are given in."""

    node: fx.Node
    choice: Choice
    length: int
    summed: bool

    def dims(self) -> tuple[int, ...]:
        """Return the blocked dimension of each result."""
        return tuple(p.dim for p in self.choice.outputs if isinstance(p, Shard))

    def allows(self, boundaries: Sequence[int]) -> bool:
        """Tell whether every dimension that is cut has elements at these boundaries (counts of groups too)."""
        lengths: list[Any] = [
            tensor.shape[placement.dim]
            for tensor, placement in _placed(self.node, self.choice)
            if isinstance(placement, Shard)
        ]
        return all(isinstance(n, int) for n in lengths) and all(
            boundary * n % self.length == 0
            for n in (*lengths, *self.choice.divides)
            for boundary in boundaries
        )

    def scaled(self, span: Range, length: int) -> Range:
        """Return a block in elements of another dimension that goes with it."""
        return span[0] * length // self.length, span[1] * length // self.length

    def sizes(self, sizes: Sequence[int], result: int) -> tuple[int, ...]:
        """Return blocks' sizes in elements of a result's blocked dimension."""
        length = int(tensors_of(self.node)[result].shape[self.dims()[result]])
        return tuple(size * length // self.length for size in sizes)


def _placed(node: fx.Node, choice: Choice) -> Iterator[tuple[torch.Tensor, Any]]:
    for source, need in zip(operands(node), choice.inputs, strict=True):
        yield source.meta["val"], need.placement
    yield from zip(tensors_of(node), choice.outputs, strict=True)


def ways_to_make(node: fx.Node, dim: int) -> Iterator[SplitWay]:
    """Yield ways that give the first result in blocks along ``dim``."""
    for choice in _usable(node):
        if choice.outputs[0] == Shard(dim) and all(isinstance(p, Shard) for p in choice.outputs):
            yield SplitWay(node, choice, int(tensors_of(node)[0].shape[dim]), summed=False)


def ways_to_read(node: fx.Node, position: int, dim: int) -> Iterator[SplitWay]:
    """Yield ways that take an operand in blocks along ``dim``: those that give blocks first, then those that give sums."""
    sums = []
    for choice in _usable(node):
        if choice.inputs[position].placement != Shard(dim):
            continue
        way = SplitWay(node, choice, int(operands(node)[position].meta["val"].shape[dim]), summed=False)
        if all(isinstance(p, Shard) for p in choice.outputs):
            yield way
        elif all(isinstance(p, Partial) for p in choice.outputs) and len(choice.outputs) == 1:
            sums.append(SplitWay(node, choice, way.length, summed=True))
    yield from sums


def reads_any_part(node: fx.Node, position: int) -> bool:
    """Tell whether the op takes no more from an operand than its type (``new_zeros``)."""
    return any(
        isinstance(choice.inputs[position].placement, Shard)
        and all(isinstance(p, Replicate) for p in choice.outputs)
        for choice in _usable(node)
    )


def _usable(node: fx.Node) -> Iterator[Choice]:
    for choice in choices(node):
        added = [need for need in choice.inputs if isinstance(need.placement, Partial)]
        if choice.local and choice.local != MEAN and not choice.local.startswith(_RANDOM):
            continue  # ranks do something else there than run the op on their parts
        if added and not _bias_can_be_left_out(node):
            continue
        yield choice


def _bias_can_be_left_out(node: fx.Node) -> bool:
    if node.target in _WITHOUT_SUMMAND:
        return bool(argument(node, "beta", 1) == 1 and argument(node, "alpha", 1) == 1)
    return node.target in _OPTIONAL_BIAS


# ----------------------------------------------------------------------------------------------------------
# Making blocks


def block(values: SplitGraph, way: SplitWay, span: Range, name: str, first: bool = True) -> fx.Node:
    """Make the op on one block: a block of the result, or a part of the sum. ``first``: add what is added once."""
    node, needs = way.node, iter(way.choice.inputs)

    def part(given: Any) -> Any:
        if not isinstance(given, fx.Node):
            return given
        value = given.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return values.whole(given)
        placement = next(needs).placement
        if isinstance(placement, Shard):
            return values.take(given, {placement.dim: way.scaled(span, value.shape[placement.dim])})
        return None if isinstance(placement, Partial) and not first else values.whole(given)

    args, kwargs = map_aggregate((node.args, dict(node.kwargs)), part)
    args, kwargs = tuple(args), dict(kwargs)
    if way.summed:
        return _summand(values, way, span, name, (args, kwargs), first)
    args, kwargs = _resized(way, span, args, kwargs)
    target, args = explicit(node, args)
    return values.emit(name, reshaping(target), args, kwargs, node)


def _summand(
    values: SplitGraph,
    way: SplitWay,
    span: Range,
    name: str,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    first: bool,
) -> fx.Node:
    node, (args, kwargs) = way.node, given
    target: Any = node.target
    if target in _WITHOUT_SUMMAND and not first:
        args = tuple(a for a in args if a is not None)
        target, kwargs = _WITHOUT_SUMMAND[target], {}
        return values.emit(name, target, args[:2], kwargs, node)
    if way.choice.local != MEAN:
        return values.emit(name, target, args, kwargs, node)
    mean = values.emit(values.fresh(f"{name}_mean"), target, args, kwargs, node)
    return values.emit(name, aten.mul.Tensor, (mean, (span[1] - span[0]) / way.length), {}, node)


def _resized(way: SplitWay, span: Range, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return sizes and counts among the arguments as the block has them."""
    node, target = way.node, way.node.target
    if target in SIZE_ARGUMENTS and isinstance(target, torch._ops.OpOverload):
        name, _ = SIZE_ARGUMENTS[target]
        sizes, at = list(argument(node, name)), way.dims()[0]
        rank = tensors_of(node)[0].dim()
        if target is aten.unflatten.int:
            at -= argument(node, "dim") % operands(node)[0].meta["val"].dim()
        else:
            at -= rank - len(sizes)  # tile may name fewer dimensions than there are
        grows = name not in ("repeats", "dims") or not _cut(way, 0)
        if grows and 0 <= at < len(sizes):
            begin, end = way.scaled(span, int(tensors_of(node)[0].shape[way.dims()[0]]))
            sizes[at] = end - begin
            given = given_argument(target, args, kwargs, name)
            sizes = [size if i == at else given[i] for i, size in enumerate(sizes)]
            args, kwargs = replaced(node, args, kwargs, name, sizes)
    for count in way.choice.divides:
        name = next(name for name in COUNTS if argument(node, name) is not None)
        begin, end = way.scaled(span, int(plain(count)))
        args, kwargs = replaced(node, args, kwargs, name, end - begin)
    return args, kwargs


def _cut(way: SplitWay, position: int) -> bool:
    return isinstance(way.choice.inputs[position].placement, Shard)


def mapped_args(values: SplitGraph, node: fx.Node, known: Mapping[fx.Node, fx.Node]) -> Any:
    """Return (args, kwargs) of an op in the new graph: ``known`` operands, and all others whole."""

    def mapped(given: Any) -> Any:
        if not isinstance(given, fx.Node):
            return given
        return known.get(given) or values.whole(given)

    args, kwargs = map_aggregate((node.args, dict(node.kwargs)), mapped)
    return tuple(args), dict(kwargs)
