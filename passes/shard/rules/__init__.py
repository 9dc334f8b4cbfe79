"""Rules of sharding: ``choices(node)`` says how an op may run on one axis of a mesh, from tables in index notation.

choices(linear)     R R R -> R                 every rank computes everything
                    S0 R~ R~ -> S0             by sample
                    R~ S0 S0 -> S1             by output neuron
                    S1 S1 P -> P               by input neuron
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from passes.graph.nodes import tensors_of
from passes.shard.rules import (
    attention,
    contractions,
    indexing,
    losses,
    normalize,
    pointwise,
    producers,
    reductions,
    views,
)
from passes.shard.rules.notation import Rule
from passes.shard.rules.producers import replicated
from passes.shard.words import Choice
from runtime.ops.opaque import Opaque

__all__ = ["RULES", "choices", "has_rule", "makes_tensors"]

RULES: Mapping[object, Rule] = {
    op: rule
    for family in (
        contractions,
        views,
        pointwise,
        reductions,
        indexing,
        normalize,
        attention,
        losses,
        producers,
    )
    for op, rule in family.RULES.items()
}


def choices(node: fx.Node) -> tuple[Choice, ...]:
    """List every choice that a rule gives for an op on one axis, all replicated first; that one alone without a rule.

    None for what produces no tensors (sizes) and for projections (``getitem``): what they have, their source has.
    """
    if not makes_tensors(node):
        return ()
    rule = _rule(node)
    return replicated(node) if rule is None else rule(node)


def has_rule(node: fx.Node) -> bool:
    """Tell whether the table speaks about an op (if only to say that it stays whole)."""
    return not makes_tensors(node) or _rule(node) is not None


def makes_tensors(node: fx.Node) -> bool:
    """Tell whether an op has choices at all: it makes tensors and is no projection of another's."""
    return isinstance(node.target, torch._ops.OpOverload | Opaque) and bool(tensors_of(node))


def _rule(node: fx.Node) -> Rule | None:
    found = RULES.get(node.target)
    if found is not None:
        return found
    if isinstance(node.target, Opaque):
        return None
    assert isinstance(node.target, torch._ops.OpOverload)
    tagged = torch.Tag.pointwise in node.target.tags and len(tensors_of(node)) == 1
    random = torch.Tag.nondeterministic_seeded in node.target.tags
    return pointwise.pointwise if tagged and not random and not node.target._schema.is_mutable else None
