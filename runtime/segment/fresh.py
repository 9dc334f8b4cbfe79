"""The parameters whose gradients are new tensors that nobody else reads, so that a sum over ranks may be made in them."""

from __future__ import annotations

import torch

from runtime.ops.products import PRODUCTS, is_factor
from runtime.segment.code import SegmentCode

aten = torch.ops.aten

_WEIGHTED = PRODUCTS | {
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.embedding.default,
}
"""Ops whose weight's gradient is a new tensor; some keep more than that."""


def fresh_gradients(code: SegmentCode) -> frozenset[str]:
    """Return the parameters of ``code`` whose gradients' memory is theirs alone."""
    found: dict[str, bool] = {}
    placeholders = code.module.graph.find_nodes(op="placeholder")
    for node, given in zip(placeholders, code.inputs, strict=True):
        if given.kind == "parameter":
            alone = all(user.target in _WEIGHTED and is_factor(user, node) for user in node.users)
            found[given.name] = found.get(given.name, True) and alone
    return frozenset(name for name, alone in found.items() if alone)
