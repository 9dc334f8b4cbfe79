"""Ops that make tensors from sizes: constants may be sharded, counting and drawing from one source may not.

Whoever needs a part of an ``arange`` takes a slice of it: no bytes move.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from cost_models.layout import Shard
from passes.graph.nodes import tensors_of
from passes.shard.rules.notation import Rule, Term, from_terms
from passes.shard.rules.shapes import operands_shapes
from passes.shard.words import Choice, Need, all_replicated, operands

aten = torch.ops.aten


def _constant(node: fx.Node) -> tuple[Choice, ...]:
    """Shard constants, the same everywhere; ``self`` gives the type only, so that any part of it will do."""
    letters = tuple(f"d{d}" for d in range(tensors_of(node)[0].dim()))
    found = from_terms(node, [Term((None,) * len(s)) for s in operands_shapes(node)], [Term(letters)])
    parts = [Need(Shard(d)) for s in operands_shapes(node) for d, size in enumerate(s) if size != 1]
    return (*found, *(Choice((part,), choice.outputs) for choice in found for part in parts))


def _like(node: fx.Node) -> tuple[Choice, ...]:
    letters = tuple(f"d{d}" for d in range(tensors_of(node)[0].dim()))
    return from_terms(node, [Term(letters)], [Term(letters)])


def replicated(node: fx.Node) -> tuple[Choice, ...]:
    """Keep an op whole on every rank, on purpose."""
    return (all_replicated(len(operands(node)), len(tensors_of(node))),)


RULES: Mapping[object, Rule] = {
    **dict.fromkeys(
        (
            aten.zeros.default,
            aten.ones.default,
            aten.full.default,
            aten.empty.memory_format,
            aten.new_zeros.default,
            aten.new_ones.default,
            aten.new_full.default,
            aten.new_empty.default,
        ),
        _constant,
    ),
    **dict.fromkeys(
        (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default),
        _like,
    ),
    **dict.fromkeys(
        (
            aten.arange.default,
            aten.arange.start,
            aten.arange.start_step,
            aten.linspace.default,
            aten.eye.default,
            aten.eye.m,
            aten.scalar_tensor.default,
            aten.rand.default,
            aten.randn.default,
            aten.randint.default,
            aten.randint.low,
            aten.randperm.default,
            aten.tril_indices.default,
            aten.triu_indices.default,
            aten.hann_window.default,
        ),
        replicated,
    ),
}
