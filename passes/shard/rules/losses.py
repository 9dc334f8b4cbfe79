"""Losses: over samples a sum is a part of the sum; means and classes need what all ranks know (``runtime.ops.local``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from cost_models.layout import Shard
from passes.graph.nodes import argument
from passes.shard.rules.notation import R, Rule, Term, from_terms, from_text
from passes.shard.rules.pointwise import elementwise
from passes.shard.rules.producers import replicated
from passes.shard.rules.reductions import MEAN
from passes.shard.rules.shapes import operand, operand_names, operands_shapes
from passes.shard.words import Choice, Need, operands

aten = torch.ops.aten

NONE, AVERAGE, SUM = 0, 1, 2
"""``reduction`` as ATen counts it."""

SAMPLES = "cross_entropy:samples"
CLASSES = "cross_entropy:classes"


def _cross_entropy(node: fx.Node) -> tuple[Choice, ...]:
    """Shard self (b, c, d…) or (c); target (b, d…) of classes, or of probabilities like ``self``; weight (c)."""
    logits, _ = operands_shapes(node)[:2]
    reduction = argument(node, "reduction", AVERAGE)
    by_class = not operand(node, "target").meta["val"].is_floating_point()  # type: ignore[union-attr]
    batch = "b" if len(logits) > 1 else ""
    target = f"{batch} s*" if by_class else f"{batch} . s*"
    made = f"{batch} s*" if reduction == NONE else ""
    text = f"self[{batch} . s*] target[{target}] weight[.] -> [{made}]"
    means = SAMPLES if by_class else MEAN
    letters = ("b", *(f"s{d}" for d in range(len(logits))))
    local = dict.fromkeys(letters, means) if reduction == AVERAGE else {}
    return (*from_text(node, text, local=local), *(_by_class(node, len(logits)) if by_class else ()))


def _by_class(node: fx.Node, rank: int) -> tuple[Choice, ...]:
    """Shard classes: each rank has some classes' logits; the ranks together find the denominators: the result is whole."""
    dim = 1 if rank > 1 else 0
    if operands_shapes(node)[0][dim] <= 1:
        return ()
    needs = [Need(Shard(dim))] + [Need(R)] * (len(operands(node)) - 1)
    return (Choice(tuple(needs), (R,), CLASSES),)


def _nll(node: fx.Node) -> tuple[Choice, ...]:
    """Shard self (b, c, d…) of log-probabilities; otherwise as cross entropy. Linear in them."""
    rank = len(operands_shapes(node)[0])
    reduction = argument(node, "reduction", AVERAGE)
    batch = "b" if rank > 1 else ""
    made = f"{batch} s*" if reduction == NONE else ""
    letters = ("b", *(f"s{d}" for d in range(rank)))
    local = dict.fromkeys(letters, "nll_loss:samples") if reduction == AVERAGE else {}
    return from_text(node, f"self'[{batch} . s*] target[{batch} s*] weight[.] -> [{made}]", local=local)


def _elementwise_loss(node: fx.Node) -> tuple[Choice, ...]:
    """Shard mse_loss and the like: a number per element, then perhaps their sum or mean.

    Whole where shapes of input and target differ: torch's own gradients of such means count the wrong elements.
    """
    shapes = operands_shapes(node)
    reduction = argument(node, "reduction", AVERAGE)
    if reduction == NONE:
        return elementwise(node, {})
    if shapes[0] != shapes[1]:
        return replicated(node)
    letters = tuple(f"d{d}" for d in range(len(shapes[0])))
    terms = [Term(letters[len(letters) - len(s) :]) for s in shapes]
    local = dict.fromkeys(letters, MEAN) if reduction == AVERAGE else {}
    return from_terms(node, terms, [Term(())], local=local)


def _by_rows(operands_text: str) -> Rule:
    """Shard losses of rows b*, whose last dimension is inside: a number per row, then perhaps their sum or mean."""

    def rule(node: fx.Node) -> tuple[Choice, ...]:
        shapes = dict(zip(operand_names(node), operands_shapes(node), strict=True))
        whole = [name for name in shapes if f"{name}[b* .]" in operands_text]
        rows = {s[:-1] if name in whole else s for name, s in shapes.items() if name != "weight"}
        if len(rows) > 1:
            return replicated(node)  # they broadcast
        reduction = argument(node, "reduction", AVERAGE)
        local = {f"b{d}": MEAN for d in range(len(rows.pop()))} if reduction == AVERAGE else {}
        return from_text(node, f"{operands_text} -> [{'b*' if reduction == NONE else ''}]", local=local)

    return rule


def _elementwise_of_equals(node: fx.Node) -> tuple[Choice, ...]:
    """Shard the same of three operands, if none broadcasts."""
    return _elementwise_loss(node) if len(set(operands_shapes(node))) == 1 else replicated(node)


RULES: Mapping[object, Rule] = {
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss.default: _nll,
    aten.nll_loss_nd.default: _nll,
    aten.nll_loss2d.default: _nll,
    **dict.fromkeys(
        (
            aten.mse_loss.default,
            aten.l1_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
            aten.binary_cross_entropy.default,
            aten.binary_cross_entropy_with_logits.default,
            aten.kl_div.default,
            aten.soft_margin_loss.default,
            aten.hinge_embedding_loss.default,
        ),
        _elementwise_loss,
    ),
    **dict.fromkeys(
        (aten.margin_ranking_loss.default, aten.poisson_nll_loss.default), _elementwise_of_equals
    ),
    aten.triplet_margin_loss.default: _by_rows("anchor[b* .] positive[b* .] negative[b* .]"),
    aten.cosine_embedding_loss.default: _by_rows("input1[b* .] input2[b* .] target[b*]"),
    aten.multi_margin_loss.default: _by_rows("self[b* .] target[b*] weight[.]"),
    aten.multilabel_margin_loss.default: _by_rows("self[b* .] target[b* .]"),
}
