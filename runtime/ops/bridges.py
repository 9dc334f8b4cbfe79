"""Bridges: collectives as ops of a graph, each with its conjugate in backward.

    in the graph                                    forward                 backward
    all_reduce(x, axis="tensor")                    sum                     nothing
    all_reduce(x, axis="tensor", partial=True)      sum                     sum
    sum_gradient(x, axis="tensor")                  nothing                 sum
    split(x, 1, axis="tensor", parts=2)             this rank's part        gather
    all_gather(x, 1, axis="tensor", parts=2)        gather                  this rank's part
    all_gather(x, 1, …, partial=True)               gather                  sum, this rank's part (reduce-scatter)
    reduce_scatter(x, 1, axis="tensor", parts=2)    sum, this rank's part   gather
    all_to_all(x, 1, 0, axis="tensor", parts=2)     cut along 1, join along 0    cut along 0, join along 1
    keep_first(x, axis="tensor")                    zeros but on the axis' first rank    nothing
    first_gradient(x, axis="tensor")                nothing                 zeros but on the axis' first rank

``partial``: the gradient that consumers give is one rank's part of a sum. ``parts``: ranks on the axis.

A graph only names its axes, so it can travel between processes. ``bind`` gives them process groups. Before that, bridges
work on fake tensors only: they tell shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial as given
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor

from cost_models.errors import InternalError
from runtime.mesh.axis import Axis
from runtime.ops.fused_linear import RecomputedBlocks, fuse, linears_behind
from runtime.ops.gather_ahead import StepWays, WaitForGather, gather_steps, start_ahead
from runtime.ops.local import run_local, with_axes
from runtime.ops.products import PRODUCTS, multiplies

TensorFunction = Callable[[Tensor], Tensor]


# ----------------------------------------------------------------------------------------------------------
# Bridges in a graph: shapes only. R replicated, S(d) sharded along d, P parts of a sum.


def all_reduce(x: Tensor, *, axis: str, partial: bool = False) -> Tensor:
    """Stand for P -> R: the sum."""
    return _fake(x).clone(memory_format=torch.contiguous_format)


def sum_gradient(x: Tensor, *, axis: str) -> Tensor:
    """Stand for R -> R, for consumers whose gradients are parts of a sum."""
    return _fake(x).view_as(x)


def split(x: Tensor, dim: int, *, axis: str, parts: int) -> Tensor:
    """Stand for R -> S(dim): this rank's part."""
    return _fake(x).narrow(dim, 0, x.shape[dim] // parts).clone(memory_format=torch.contiguous_format)


def all_gather(x: Tensor, dim: int, *, axis: str, parts: int, partial: bool = False) -> Tensor:
    """Stand for S(dim) -> R: the parts joined."""
    return torch.cat([_fake(x)] * parts, dim)


def reduce_scatter(x: Tensor, dim: int, *, axis: str, parts: int) -> Tensor:
    """Stand for P -> S(dim): this rank's part of the sum."""
    return split(x, dim, axis=axis, parts=parts)


def all_to_all(x: Tensor, cut: int, join: int, *, axis: str, parts: int) -> Tensor:
    """Stand for S(join) -> S(cut): cut along one dimension, joined along the other."""
    return torch.cat([_fake(x).narrow(cut, 0, x.shape[cut] // parts)] * parts, join)


def keep_first(x: Tensor, *, axis: str) -> Tensor:
    """Stand for R -> P: zeros but on the first rank."""
    return _fake(x).clone()


def first_gradient(x: Tensor, *, axis: str) -> Tensor:
    """Stand for R -> R: makes a whole gradient a part of a sum, where other consumers give parts."""
    return _fake(x).view_as(x)


def _fake(x: Tensor) -> Tensor:
    if not isinstance(x, FakeTensor) and not x.is_meta:
        raise InternalError("a bridge was run that is not bound to a process group")
    return x


# ----------------------------------------------------------------------------------------------------------
# Bridges bound to process groups: what a rank runs.


class _BridgeFunction(torch.autograd.Function):
    """A bridge: ``there`` forward and ``back`` for the gradient; None is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: TensorFunction | None, back: TensorFunction | None) -> Tensor:
        ctx.back = back
        return x.view_as(x) if there is None else there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        if ctx.back is None:
            return gradient, None, None
        return ctx.back(gradient.to_dense() if gradient.is_sparse else gradient), None, None


def _ways(bridge: fx.Node, axis: Axis) -> Any:
    """Return (there, back) of a bridge on ``axis``. Sums are made in its input, or gradient, if nobody else reads that."""
    target: Any = bridge.target
    source, *args = bridge.args
    reuse = isinstance(source, fx.Node) and source.target in PRODUCTS and len(source.users) == 1
    reuse_gradient = bool(bridge.users) and all(multiplies(user, bridge) for user in bridge.users)
    partial = bridge.kwargs.get("partial", False)
    total, total_gradient = given(axis.sum, reuse=reuse), given(axis.sum, reuse=reuse_gradient)
    match target.__name__, *args:
        case ("all_reduce",):
            return total, axis.sum if partial else None
        case ("sum_gradient",):
            return None, total_gradient
        case "split", dim:
            return given(axis.part, dim=dim), given(axis.gather, dim=dim)
        case "all_gather", dim:
            return given(axis.gather, dim=dim), given(axis.sum_part if partial else axis.part, dim=dim)
        case "reduce_scatter", dim:
            return given(axis.sum_part, dim=dim), given(axis.gather, dim=dim)
        case "all_to_all", cut, join:
            return given(axis.exchange, cut=cut, join=join), given(axis.exchange, cut=join, join=cut)
        case ("keep_first",):
            return axis.first, None
        case ("first_gradient",):
            return None, axis.first
    raise InternalError(f"no such bridge: {target.__name__}{tuple(args)}")


BRIDGES: frozenset[Callable[..., Tensor]] = frozenset(
    {
        all_reduce,
        sum_gradient,
        split,
        all_gather,
        reduce_scatter,
        all_to_all,
        keep_first,
        first_gradient,
    }
)


def is_bridge(node: fx.Node) -> bool:
    """Tell whether ``node`` is a bridge."""
    return node.op == "call_function" and node.target in BRIDGES


def bridge_function(node: fx.Node, axis: Axis) -> Callable[..., Tensor]:
    """Return the function that runs in place of a bridge; it takes the node's own arguments."""
    target: Any = node.target
    there, back = _ways(node, axis)

    def run(x: Tensor, *_: Any, **__: Any) -> Tensor:
        result: Tensor = _BridgeFunction.apply(x, there, back)  # type: ignore[no-untyped-call]
        return result

    run.__name__ = run.__qualname__ = target.__name__
    return run


def bind(
    module: fx.GraphModule, axes: Mapping[str, Axis], *, fused: bool = False, regions: RecomputedBlocks = ()
) -> fx.GraphModule:
    """Return a copy of ``module`` whose bridges and local ops run on ``axes``. Nodes keep their names.

    ``fused``: sums in backward travel while linear layers compute (``runtime.ops.fused_linear``), parameters are gathered,
    and their gradients summed, while other ops compute (``runtime.ops.gather_ahead``).
    ``regions``: nodes that backward computes again, by block.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, val_map={}))
    if fused:
        summing = [node for node in graph.nodes if is_bridge(node) and sums_gradient(node)]
        fuse(graph, {node: _with_linears(node, axes[node.kwargs["axis"]]) for node in summing}, regions)
        gathers = [node for node in graph.nodes if is_bridge(node) and node.target is all_gather]
        start_ahead(graph, gather_steps(gathers, regions), given(_step_ways, axes))
    for node in graph.nodes:
        if is_bridge(node):
            node.target = bridge_function(node, axes[node.kwargs["axis"]])
        elif node.target is run_local:
            node.target = with_axes(axes)
    return fx.GraphModule(module, graph)


def sums_gradient(bridge: fx.Node) -> bool:
    """Tell whether backward sums and nothing is summed forward."""
    return bridge.target is sum_gradient or (
        bridge.target is all_gather and bool(bridge.kwargs.get("partial"))
    )


def _with_linears(bridge: fx.Node, axis: Axis) -> Callable[..., Any]:
    """Make one function of ``bridge``, one of ``sums_gradient``, and the linear layers behind it."""
    if bridge.target is sum_gradient:
        return linears_behind("sum_gradient", None, given(axis.start_sum, reuse=True))
    dim: Any = bridge.args[1]
    return linears_behind("all_gather", given(axis.gather, dim=dim), given(axis.start_sum_of_parts, dim=dim))


def _step_ways(axes: Mapping[str, Axis], gathers: Sequence[fx.Node]) -> StepWays:
    """Make what starts ``gathers``, and their ways back: those along one axis at once."""
    dims: list[Any] = [gather.args[1] for gather in gathers]
    names = [str(gather.kwargs["axis"]) for gather in gathers]
    partial = [bool(gather.kwargs.get("partial")) for gather in gathers]

    def along(numbers: Iterable[int]) -> Iterator[tuple[Axis, list[int]]]:
        own = list(numbers)
        for name in dict.fromkeys(names[n] for n in own):
            yield axes[name], [n for n in own if names[n] == name]

    def start_gathers(parts: Sequence[Tensor]) -> list[WaitForGather]:
        found: dict[int, WaitForGather] = {}
        for axis, own in along(range(len(parts))):
            found |= zip(own, axis.start_wholes([parts[n] for n in own], [dims[n] for n in own]), strict=True)
        return [found[n] for n in range(len(parts))]

    def start_sums(gradients: Mapping[int, Tensor]) -> dict[int, WaitForGather]:
        found: dict[int, WaitForGather] = {}
        for axis, own in along(n for n in sorted(gradients) if partial[n]):
            sums = axis.start_sums_of_parts([gradients[n] for n in own], [dims[n] for n in own])
            found |= zip(own, sums, strict=True)
        for axis, own in along(n for n in sorted(gradients) if not partial[n]):
            found |= {n: given(axis.part, gradients[n], dims[n]) for n in own}
        return found

    return StepWays(start_gathers, start_sums)


def axes_of(graph: fx.Graph) -> tuple[str, ...]:
    """Return the names of the axes, and of several taken together, that the graph's bridges and local ops run along."""
    names: dict[str, None] = {}
    for node in graph.nodes:
        if is_bridge(node):
            names[node.kwargs["axis"]] = None
        elif node.target is run_local:
            names.update(dict.fromkeys(node.args[2].values()))
    return tuple(names)
