"""Sums, means, extremes, softmax, sorting along a dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from passes.graph.nodes import argument, tensors_of
from passes.shard.rules.notation import Rule, Term, from_terms
from passes.shard.rules.shapes import operands_shapes
from passes.shard.words import Choice

aten = torch.ops.aten

MEAN = "mean:terms"
"""Each rank's mean over its part, divided by the number of ranks: a part of the mean."""


def _dims(node: fx.Node, rank: int) -> tuple[int, ...]:
    """Return the dimensions worked on: all if the op names none."""
    dim = argument(node, "dim")
    given: Sequence[int] = [dim] if isinstance(dim, int) else dim or range(rank)
    return tuple(d % rank for d in given) if rank else ()


def _letters(rank: int) -> tuple[str, ...]:
    return tuple(f"d{d}" for d in range(rank))


def reduce(
    node: fx.Node, *, summed: bool = False, linear: bool = False, local: str = ""
) -> tuple[Choice, ...]:
    """Shard ops whose dimensions vanish (or become 1); ``summed``: they may be sharded, the result is a part of the sum."""
    rank = len(operands_shapes(node)[0])
    gone = _dims(node, rank)
    letters = [None if d in gone and not summed else letter for d, letter in enumerate(_letters(rank))]
    keep = bool(argument(node, "keepdim", False))
    kept = [None if d in gone else x for d, x in enumerate(letters) if keep or d not in gone]
    ways = {f"d{d}": local for d in gone}
    made = [Term(tuple(kept))] * len(tensors_of(node))
    return from_terms(node, [Term(tuple(letters), linear=linear)], made, local=ways)


def _sum(node: fx.Node) -> tuple[Choice, ...]:
    return reduce(node, summed=True, linear=_linear_in(node))


def _linear_in(node: fx.Node) -> bool:
    """Tell whether partial sums may come in: not where booleans are counted or whole numbers summed."""
    return bool(
        tensors_of(node)[0].is_floating_point() and node.all_input_nodes[0].meta["val"].is_floating_point()
    )


def _mean(node: fx.Node) -> tuple[Choice, ...]:
    return reduce(node, summed=True, linear=_linear_in(node), local=MEAN)


def along(node: fx.Node, *, linear: bool = False) -> tuple[Choice, ...]:
    """Shard all dimensions but those worked on, which stay: softmax, cumsum, sort, topk."""
    rank = len(operands_shapes(node)[0])
    dim = argument(node, "dim", -1)
    gone = {d % rank for d in ([dim] if isinstance(dim, int) else dim)} if rank and dim is not None else set()
    letters = tuple(None if d in gone else letter for d, letter in enumerate(_letters(rank)))
    count = len(operands_shapes(node))
    return from_terms(node, [Term(letters, linear=linear)] * count, [Term(letters)] * len(tensors_of(node)))


def _linear_along(node: fx.Node) -> tuple[Choice, ...]:
    return along(node, linear=_linear_in(node))


def _diff(node: fx.Node) -> tuple[Choice, ...]:
    """Shard differences. Values put before and after are differenced with the rest: all are partial sums together."""
    rank = len(operands_shapes(node)[0])
    dim = argument(node, "dim", -1) % rank
    letters = tuple(None if d == dim else letter for d, letter in enumerate(_letters(rank)))
    added = _linear_in(node)
    return from_terms(node, [Term(letters, added=added)] * len(operands_shapes(node)), [Term(letters)])


RULES: Mapping[object, Rule] = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.dim_IntList), _sum),
    aten.count_nonzero.default: _sum,
    **dict.fromkeys((aten.mean.default, aten.mean.dim), _mean),
    **dict.fromkeys(
        (
            aten.amax.default,
            aten.amin.default,
            aten.max.default,
            aten.min.default,
            aten.max.dim,
            aten.min.dim,
            aten.argmax.default,
            aten.argmin.default,
            aten.prod.default,
            aten.prod.dim_int,
            aten.any.default,
            aten.any.dim,
            aten.any.dims,
            aten.all.default,
            aten.all.dim,
            aten.var.default,
            aten.var.dim,
            aten.var.correction,
            aten.var_mean.correction,
            aten.var_mean.dim,
            aten.std.default,
            aten.std.dim,
            aten.std.correction,
            aten.logsumexp.default,
            aten.norm.ScalarOpt_dim,
            aten.norm.Scalar,
            aten.linalg_vector_norm.default,
            aten.median.dim,
            aten.kthvalue.default,
        ),
        reduce,
    ),
    **dict.fromkeys(
        (
            aten.softmax.int,
            aten._softmax.default,
            aten.log_softmax.int,
            aten._log_softmax.default,
            aten.cumprod.default,
            aten.cummax.default,
            aten.logcumsumexp.default,
            aten.topk.default,
            aten.sort.default,
            aten.sort.stable,
            aten.argsort.default,
            aten.argsort.stable,
            aten.glu.default,
        ),
        along,
    ),
    aten.cumsum.default: _linear_along,
    aten.diff.default: _diff,
}
