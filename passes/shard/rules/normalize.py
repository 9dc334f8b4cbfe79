"""Normalizations and pooling: what statistics are taken over stays whole, but for synchronized batch norms."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from passes.graph.nodes import argument, tensors_of
from passes.shard.rules.notation import Rule, from_text
from passes.shard.rules.shapes import operands_shapes, plain
from passes.shard.words import Choice

aten = torch.ops.aten

SAMPLES = "batch_norm:samples"
"""Statistics over the samples of all ranks: see ``runtime.ops.local``."""


def _layer_norm(node: fx.Node) -> tuple[Choice, ...]:
    whole = " ".join("." * len(argument(node, "normalized_shape")))
    return from_text(node, f"input[b* {whole}] weight[{whole}] bias[{whole}] -> [b* {whole}]")


def _group_norm(node: fx.Node) -> tuple[Choice, ...]:
    """Shard channels by whole groups."""
    text = "input[b c .*] weight[c] bias[c] -> [b c .*]"
    return from_text(node, text, divides={"c": int(plain(argument(node, "num_groups")))})


def _batch_norm(node: fx.Node) -> tuple[Choice, ...]:
    """Shard a batch norm: in training the statistics are those of a micro-batch over all ranks, as without sharding."""
    training = bool(argument(node, "training")) or argument(node, "running_mean") is None
    pixels = "." if training else "s"
    vectors = " ".join(f"{name}[c]" for name in ("weight", "bias", "running_mean", "running_var"))
    text = f"input[b c {pixels}*] {vectors} -> [b c {pixels}*]"
    return from_text(node, text, local={"b": SAMPLES} if training else {})


def _instance_norm(node: fx.Node) -> tuple[Choice, ...]:
    """Shard an instance norm; running statistics are means over samples: these stay whole if there are any."""
    batch = "." if argument(node, "running_mean") is not None else "b"
    vectors = " ".join(f"{name}[c]" for name in ("weight", "bias", "running_mean", "running_var"))
    return from_text(node, f"input[{batch} c .*] {vectors} -> [{batch} c .*]")


def _pool(dims: int, linear: str = "") -> Rule:
    """Make a rule that keeps pixels whole."""
    pixels = " ".join("." * dims)

    def rule(node: fx.Node) -> tuple[Choice, ...]:
        return from_text(node, f"self{linear}[b* {pixels}] input{linear}[b* {pixels}] -> [b* {pixels}]")

    return rule


def _resize(node: fx.Node) -> tuple[Choice, ...]:
    """Shard (samples, channels, pixels…): upsampling and grids of pixels."""
    rank = len(operands_shapes(node)[0])
    pixels = " ".join("." * (rank - 2))
    return from_text(
        node,
        f"input'[b c {pixels}] self'[b c {pixels}] -> [b c {' '.join('.' * (tensors_of(node)[0].dim() - 2))}]",
    )


RULES: Mapping[object, Rule] = {
    aten.layer_norm.default: _layer_norm,
    aten.rms_norm.default: _layer_norm,
    aten.group_norm.default: _group_norm,
    aten.batch_norm.default: _batch_norm,
    aten.instance_norm.default: _instance_norm,
    **{
        op: _pool(dims, linear)
        for linear, dims, op in (
            ("", 1, aten.max_pool1d.default),
            ("", 2, aten.max_pool2d.default),
            ("", 3, aten.max_pool3d.default),
            ("", 1, aten.max_pool1d_with_indices.default),
            ("", 2, aten.max_pool2d_with_indices.default),
            ("'", 1, aten.avg_pool1d.default),
            ("'", 2, aten.avg_pool2d.default),
            ("'", 3, aten.avg_pool3d.default),
            ("'", 1, aten.adaptive_avg_pool1d.default),
            ("'", 2, aten.adaptive_avg_pool2d.default),
            ("'", 3, aten.adaptive_avg_pool3d.default),
            ("", 1, aten.adaptive_max_pool1d.default),
            ("", 2, aten.adaptive_max_pool2d.default),
        )
    },
    **dict.fromkeys(
        (
            aten.upsample_nearest1d.vec,
            aten.upsample_nearest2d.vec,
            aten.upsample_bilinear2d.vec,
            aten.upsample_bicubic2d.vec,
            aten.upsample_linear1d.vec,
            aten.upsample_nearest2d.default,
            aten.upsample_bilinear2d.default,
        ),
        _resize,
    ),
}
