"""Linear layers behind a bridge whose backward sums: the sum travels while the layers' own gradients are computed.

    before   y = linear(sum_gradient(x), w, b)         backward   dx ─► dw, db ─► sum of dx
    after    y = linears_behind_sum_gradient(x, w, b)  backward   dx ─┬───── sum of dx ─────┬►
                                                                     └─ dw ── db ──────────┘

Megatron-LM's "asynchronous tensor-parallel all-reduce", for any number of layers that read the same bridge (q, k and v),
and for ``all_gather`` with its reduce-scatter. In PyTorch's own backward a layer's three gradients come out of one node.

Shapes: x [..., in], w [out, in], b [out], y [..., out].
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.nn import functional as F

Start: TypeAlias = Callable[[Tensor], Callable[[], Tensor]]
"""A function that starts a sum over ranks and returns another that waits for it. May write into its argument."""

RecomputedBlocks: TypeAlias = Sequence[Sequence[str]]
"""Names of the nodes of each block that backward computes again."""

LINEARS_BEHIND = "linears_behind_"
"""Begins the name of a function that runs layers and the bridge before them."""

aten = torch.ops.aten


class _Linears(torch.autograd.Function):
    """Linear layers on one input. ``parameters``: weight and bias (or None) of each layer in turn."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        there: Callable[[Tensor], Tensor] | None,
        start: Start,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.start = start
        whole = x if there is None else there(x)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(whole, *parameters[::2])
        return tuple(F.linear(whole, w, b) for w, b in _pairs(parameters))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs = ctx.needs_input_grad
        rows = [None if g is None else g.reshape(-1, g.shape[-1]) for g in gradients]
        wait = ctx.start(_input_gradient(x, rows, weights)) if needs[0] else None
        flat = x.reshape(-1, x.shape[-1]).conj()
        own: list[Tensor | None] = []
        for g, (w_needs, b_needs) in zip(rows, _pairs(needs[3:]), strict=True):
            own.append(g.t().mm(flat) if w_needs and g is not None else None)
            own.append(g.sum(0) if b_needs and g is not None else None)
        return (None if wait is None else wait(), None, None, *own)


def _pairs(items: Any) -> Any:
    return zip(items[::2], items[1::2], strict=True)


def _input_gradient(x: Tensor, rows: list[Tensor | None], weights: list[Tensor]) -> Tensor:
    """Sum the layers' gradients of their common input, in memory of its own."""
    total: Tensor | None = None
    for g, w in zip(rows, weights, strict=True):
        if g is not None:
            total = g.mm(w.conj()) if total is None else total.addmm_(g, w.conj())
    return torch.zeros_like(x) if total is None else total.view(x.shape)


def linears_behind(bridge: str, there: Callable[[Tensor], Tensor] | None, start: Start) -> Callable[..., Any]:
    """Return the function that runs in place of a bridge and the layers behind it.

    It takes x, then weight and bias of each layer.
    """

    def run(x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = _Linears.apply(x, there, start, *parameters)  # type: ignore[no-untyped-call]
        return result

    run.__name__ = run.__qualname__ = f"{LINEARS_BEHIND}{bridge}"
    return run


def is_linears(node: fx.Node) -> bool:
    """Tell whether the node calls what ``linears_behind`` made."""
    return getattr(node.target, "__name__", "").startswith(LINEARS_BEHIND)


def fuse(graph: fx.Graph, runs: Mapping[fx.Node, Callable[..., Any]], regions: RecomputedBlocks = ()) -> None:
    """Put bridges and the layers behind them into one call each, where ``layers_run_with`` finds some. In place.

    What other layers' parameters are made by (ZeRO-3 gathers them) comes before the first layer then. Calls and their
    results have the names of what they replace.
    """
    block_of = blocks_by_name(regions)
    for bridge, run in runs.items():
        layers = layers_run_with(bridge, block_of)
        if not layers:
            continue
        for node in _late_sources(layers, block_of) or ():
            layers[0].prepend(node)
        parameters = [
            p for layer in layers for p in (layer.args[1], layer.args[2] if len(layer.args) > 2 else None)
        ]
        with graph.inserting_before(layers[0]):
            call = graph.call_function(run, (bridge.args[0], *parameters))
            results = [graph.call_function(operator.getitem, (call, i)) for i in range(len(layers))]
        for layer, result in zip(layers, results, strict=True):
            layer.replace_all_uses_with(result)
        for old, new in zip((*layers, bridge), (*results, call), strict=True):
            graph.erase_node(old)
            new.name = old.name


def layers_run_with(bridge: fx.Node, block_of: Mapping[str, int]) -> list[fx.Node]:
    """Return the linear layers that run in one call with ``bridge``, in order; none if it runs by itself.

    They do where nothing else reads it, and no layer is needed to make another's parameters. ``block_of``: the block of
    each node that backward computes again; all of a call must be in one of them, or none.
    """
    users = list(bridge.users)
    plain = all(
        user.target is aten.linear.default and not user.kwargs and bridge not in user.args[1:]
        for user in users
    )
    layers = sorted(users) if plain else []
    if not layers or len({block_of.get(node.name) for node in (bridge, *layers)}) > 1:
        return []
    return [] if _late_sources(layers, block_of) is None else layers


def blocks_by_name(regions: RecomputedBlocks) -> dict[str, int]:
    """Return the number of the block of each node in one."""
    return {name: number for number, names in enumerate(regions) for name in names}


def _late_sources(layers: list[fx.Node], block_of: Mapping[str, int]) -> list[fx.Node] | None:
    """List what layers read that comes after the first of them, in order; None if it cannot come before."""
    first, found, todo = layers[0], set[fx.Node](), [s for layer in layers for s in layer.all_input_nodes]
    while todo:
        node = todo.pop()
        if node < first or node in found:
            continue
        if node in layers or block_of.get(node.name) != block_of.get(first.name):
            return None
        found.add(node)
        todo += node.all_input_nodes
    return sorted(found)
