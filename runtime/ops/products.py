"""Ops that multiply tensors: their results, and the gradients of their factors, are new tensors that nobody else reads.

    product = linear(x, w)       the result, and the gradients of x and w, are computed into memory of their own
    total = add(a, b)            the gradients of a and b are the one of total: one tensor for all

So a sum over ranks may be made in them.
"""

from __future__ import annotations

import torch
from torch import fx

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
CONVOLUTIONS = frozenset({aten.conv1d.default, aten.conv2d.default, aten.conv3d.default})


def multiplies(op: fx.Node, operand: fx.Node) -> bool:
    """Tell whether ``operand`` is a factor in ``op``; a summand gets the output's own gradient, which others may read."""
    return op.target in PRODUCTS and is_factor(op, operand)


def is_factor(op: fx.Node, operand: fx.Node) -> bool:
    """Tell whether ``operand`` is multiplied by ``op``, of ``PRODUCTS`` or another op with a weight, not added."""
    if op.target is aten.addmm.default:
        return operand is not op.args[0]
    return operand not in op.args[2:]
