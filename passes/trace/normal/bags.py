"""Embedding bags as one op (``runtime.ops.bags``), with indices as the model has them where they are rows of equal size.

Before                                               After
    flat = reshape(ids (b, 5), [-1])                     y = embedding_bag(weight, ids)
    starts = arange(0, 5·b, 5)
    y, _, _, _ = embedding_bag(weight, flat, starts)
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from passes.graph.nodes import argument, drop_dead_code, symbolic
from runtime.ops.bags import EMBEDDING_BAG

aten = torch.ops.aten

_FLAT = frozenset({aten.reshape.default, aten.view.default, aten.flatten.using_ints})


def simplify_bags(graph: fx.Graph) -> None:
    """Replace ATen's bags, in place."""
    changed = False
    for target in (aten.embedding_bag.padding_idx, aten.embedding_bag.default):
        for node in graph.find_nodes(op="call_function", target=target):
            if all(user.target is operator.getitem and user.args[1] == 0 for user in node.users):
                _replace(graph, node)
                changed = True
    if changed:
        drop_dead_code(graph)


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    names = ("weight", "indices", "offsets", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights")
    given = {name: argument(node, name) for name in (*names, "include_last_offset", "padding_idx")}
    rows = _rows(given["indices"])
    weights = given["per_sample_weights"]
    if rows is not None and not given["include_last_offset"] and _begins_rows(given["offsets"], rows):
        shares = None if weights is None else _rows(weights)
        if weights is None or (shares is not None and _shape(shares) == _shape(rows)):
            given |= {"indices": rows, "offsets": None, "per_sample_weights": shares}
    node.target, node.args, node.kwargs = EMBEDDING_BAG, tuple(given.values()), {}
    node.meta["val"] = node.meta["val"][0]
    for result in list(node.users):
        result.replace_all_uses_with(node)
        graph.erase_node(result)


def _rows(flat: fx.Node) -> fx.Node | None:
    """Return the matrix whose rows, one after the other, are ``flat``."""
    source = flat.args[0] if flat.target in _FLAT else None
    fits = isinstance(source, fx.Node) and source.meta["val"].dim() == 2 and flat.meta["val"].dim() == 1
    return source if fits else None  # type: ignore[return-value]


def _begins_rows(offsets: fx.Node, rows: fx.Node) -> bool:
    """Tell whether the offsets are where the rows begin."""
    count, size = _shape(rows)
    return _step(offsets) == size and _shape(offsets) == (count,)


def _step(numbers: fx.Node) -> object:
    """Return the step of numbers that count from zero: arange(0, 15, 5), arange(3) * 5."""
    match numbers.target, numbers.args:
        case aten.arange.default, _:
            return 1
        case aten.arange.start_step, (0, _, step):
            return step
        case aten.mul.Tensor, (fx.Node(target=aten.arange.default), factor):
            return factor
    return None


def _shape(node: fx.Node) -> tuple[object, ...]:
    return tuple(map(symbolic, node.meta["val"].shape))
