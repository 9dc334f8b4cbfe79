"""Which tensors are new and nobody else's, so that a sum over ranks may be made in them.

product = linear(x, w)       its result, and the gradients of x and w, are computed into memory of their own
total = add(a, b)            the gradients of a and b are the one of total: one tensor for all
"""

from __future__ import annotations

import torch
from torch import fx

from runtime.segment.code import SegmentCode

aten = torch.ops.aten

PRODUCTS = frozenset(
    {
        aten.linear.default,
        aten.mm.default,
        aten.matmul.default,
        aten.bmm.default,
        aten.addmm.default,
    }
)
"""Ops that keep no reference to their result, and whose factors' gradients are new tensors."""

_WEIGHTED = PRODUCTS | {
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.embedding.default,
}
"""Ops whose weight's gradient is a new tensor; some keep more than that."""


def multiplies(op: fx.Node, operand: fx.Node) -> bool:
    """Whether ``operand`` is a factor in ``op``; what is added gets the output's own gradient, which others may read."""
    return op.target in PRODUCTS and _is_factor(op, operand)


def fresh_gradients(code: SegmentCode) -> frozenset[str]:
    """Parameters of ``code`` whose gradients' memory is theirs alone."""
    found: dict[str, bool] = {}
    placeholders = code.module.graph.find_nodes(op="placeholder")
    for node, given in zip(placeholders, code.inputs, strict=True):
        if given.kind == "parameter":
            alone = all(user.target in _WEIGHTED and _is_factor(user, node) for user in node.users)
            found[given.name] = found.get(given.name, True) and alone
    return frozenset(name for name, alone in found.items() if alone)


def _is_factor(op: fx.Node, operand: fx.Node) -> bool:
    if op.target is aten.addmm.default:
        return operand is not op.args[0]
    return operand not in op.args[2:]
