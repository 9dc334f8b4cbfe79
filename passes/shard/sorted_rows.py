"""Rows that are sorted by something of their samples and put back: no sample sees another's.

    order  = argsort(expert)                     Order
    rows   = x[order // choices]                 Ordered: a token's row for each expert that it chose
    ends   = histc(expert[order]).cumsum(0)      Counts: where each expert's rows end
    rows   = grouped_mm(rows, weights, ends)     Ordered: every row times its own expert's matrix
    result = rows[argsort(order)]                Samples again

Sorted rows go through what treats every row alike, and through sums over all of them. Whatever else reads the order,
such as the first rows of an expert (a capacity) or a row's place, depends on all samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from passes.graph.nodes import argument, op_name, symbolic, tensors_of
from passes.shard.sample_states import Counts, Inverse, Ordered, Same, Samples, SortOrder, State

_CASTS = frozenset({"to", "_to_copy", "type_as", "clone", "contiguous", "detach", "alias"})
_BLANK = frozenset({"empty_like", "zeros_like", "ones_like", "full_like"})
_SHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten"})
_WIDENED = _CASTS | _SHAPES | {"unsqueeze", "expand", "expand_as"}
_GROUPED = frozenset({"_grouped_mm", "grouped_mm_fallback"})
"""Products of runs of rows with a matrix each: (rows, matrices, ends). The second is transformers', for the CPU."""


def is_sorted(states: Sequence[State]) -> bool:
    """Tell whether an op reads something that was sorted."""
    return any(isinstance(state, Ordered | SortOrder | Inverse) for state in states)


def sorted_by(node: fx.Node, given: Sequence[fx.Node], states: Sequence[State]) -> tuple[State, ...] | None:
    """Return the states of what a sort of one number per row gives; None for any other op."""
    name = op_name(node)
    if name not in ("sort", "argsort") or states[0] != Samples(0) or given[0].meta["val"].dim() != 1:
        return None
    key = _origin(given[0])
    order = SortOrder(node.name, key)
    return (order,) if name == "argsort" else (Ordered(node.name, key, keys=True), order)


def through_order(
    node: fx.Node, given: Sequence[fx.Node], states: Sequence[State]
) -> tuple[State, ...] | None:
    """Return the states of an op's results that reads an order, or rows by an order that it gives or undoes, or counts.

    None for any other op, and where samples are coupled.
    """
    name, first = op_name(node).rstrip("_"), states[0]
    if isinstance(first, SortOrder):
        return _of_order(node, name, given, first)
    if name in ("index", "_unsafe_index", "gather", "index_select"):
        return _taken(node, given, states)
    if name == "index_put":
        inverse = len(states) == 3 and isinstance(states[1], SortOrder) and states[2] == Same(counts=True)
        whole = inverse and isinstance(first, Same) and not argument(node, "accumulate")
        return (Inverse(states[1].by),) if whole and _rows(given[0]) == _rows(given[1]) else None  # type: ignore[union-attr]
    if name in ("index_add", "scatter_add"):
        return _put_back(node, given, states)
    if isinstance(first, Ordered) and name in _CASTS:
        return (first,)
    if name in _GROUPED and isinstance(first, Ordered) and isinstance(states[1], Same):
        ends = states[2]
        own = isinstance(ends, Counts) and ends.ends and ends.key == first.key
        return (Ordered(first.by, first.key),) if own else None
    return None


def counted_rows(node: fx.Node, given: Sequence[fx.Node], states: Sequence[State]) -> Counts | None:
    """Return the state of numbers of rows by key, and of what is made of them; None for any other op."""
    name, first = op_name(node), states[0]
    if isinstance(first, Counts):
        if name in _CASTS:
            return first
        return Counts(first.key, ends=True) if name == "cumsum" and not first.ends else None
    if name not in ("histc", "bincount") or len(states) > 1:
        return None
    if name == "histc" and argument(node, "min", 0) == argument(node, "max", 0):
        return None  # bins between the least and the largest of all samples
    if isinstance(first, Ordered):
        return Counts(first.key) if first.keys else None
    return Counts(_origin(given[0])) if isinstance(first, Samples) else None


def _of_order(
    node: fx.Node, name: str, given: Sequence[fx.Node], order: SortOrder
) -> tuple[State, ...] | None:
    """Numbers of rows: sorted, they are the inverse; divided by the rows of a token, the token's."""
    if name in _BLANK:
        return (Same(),)
    if name == "argsort" and order.rows == 1:
        return (Inverse(order.by),)
    if name in ("floor_divide", "div") and len(given) == 1 and order.rows == 1:
        rows = node.args[1]
        whole = name == "floor_divide" or argument(node, "rounding_mode") is not None
        return (SortOrder(order.by, order.key, rows),) if isinstance(rows, int) and whole else None
    if name in _WIDENED and _rows(given[0]) == symbolic(tensors_of(node)[0].shape[0]):
        return (order,)
    return None


def _taken(node: fx.Node, given: Sequence[fx.Node], states: Sequence[State]) -> tuple[State, ...] | None:
    """Rows by their numbers: of samples in order, of ordered ones put back."""
    by_row = len(states) == 2 and (
        int(argument(node, "dim", 0)) == 0 if op_name(node) in ("gather", "index_select") else _leads(node)
    )
    if not by_row:
        return None
    rows, number = states
    if rows == Samples(0) and isinstance(number, SortOrder):
        return (Ordered(number.by, number.key),) if _rows(given[0]) * number.rows == _rows(given[1]) else None
    if isinstance(rows, Ordered) and isinstance(number, Inverse) and rows.by == number.by:
        return (Samples(0),)
    return None


def _put_back(node: fx.Node, given: Sequence[fx.Node], states: Sequence[State]) -> tuple[State, ...] | None:
    """Rows added to those of their own numbers."""
    if len(states) != 3 or int(argument(node, "dim", 0)) != 0:
        return None
    held, number, rows = states
    own = isinstance(number, SortOrder) and isinstance(rows, Ordered) and number.by == rows.by
    fits = own and isinstance(number, SortOrder) and _rows(given[0]) * number.rows == _rows(given[1])
    return (Samples(0),) if fits and (isinstance(held, Same) or held == Samples(0)) else None


def _leads(node: fx.Node) -> bool:
    """Tell whether one index of the first dimension is all that is indexed."""
    indices = node.args[1]
    return isinstance(indices, list | tuple) and len(indices) == 1


def _rows(node: fx.Node) -> Any:
    """Return the size of the first dimension, which may be an expression."""
    return symbolic(node.meta["val"].shape[0])


def _origin(node: fx.Node) -> str:
    """Name the value that a node holds in another type or shape."""
    while op_name(node) in _CASTS | _SHAPES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.name
