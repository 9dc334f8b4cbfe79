"""Elementwise ops, casts, copies, dropout: every dimension may be sharded, operands broadcast.

Which of them let partial sums through is in two tables: linear in an operand (', mul), adding operands (+, add).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import fx

from passes.graph.nodes import argument, tensors_of
from passes.graph.recomputed import draws_random_numbers
from passes.shard.rules.notation import Rule, Term, from_terms, from_text, notation
from passes.shard.rules.shapes import operand, operand_names, operands_shapes
from passes.shard.words import Choice

aten = torch.ops.aten

RANDOM = "random:shards"
"""Ranks that hold different elements draw different numbers: see ``runtime.ops.local``."""

Marks = Mapping[str, str]


def elementwise(
    node: fx.Node, marks: Marks, local: str = "", whole: tuple[int, ...] = ()
) -> tuple[Choice, ...]:
    """List choices along dimensions counted from the right, as broadcasting does; ``whole`` ones of the result stay so."""
    (result,) = tensors_of(node)
    letters = [None if d in whole else f"d{d}" for d in range(result.dim())]
    inputs = [
        Term(tuple(letters[len(letters) - len(shape) :]), marks.get(name) == "'", marks.get(name) == "+")
        for name, shape in zip(operand_names(node), operands_shapes(node), strict=True)
    ]
    ways = dict.fromkeys((letter for letter in letters if letter), local)
    return from_terms(node, inputs, [Term(tuple(letters))], local=ways)


def pointwise(node: fx.Node) -> tuple[Choice, ...]:
    """Shard any op that torch tags as pointwise."""
    marks = _MARKS.get(node.target, {})
    return elementwise(node, marks(node) if callable(marks) else marks)


def _sum_of_tensors(node: fx.Node) -> Marks:
    """Mark two tensors as one sum; a number would be added once per rank."""
    return {"self": "+", "other": "+"} if operand(node, "other") is not None else {}


def _cast(node: fx.Node) -> Marks:
    """Mark casts between floating-point types as linear; rounding to integers is not."""
    (result,) = tensors_of(node)
    return {"self": "'"} if result.is_floating_point() and _is_float(node) else {}


def _is_float(node: fx.Node) -> bool:
    return bool(node.all_input_nodes[0].meta["val"].is_floating_point())


def _fill(node: fx.Node) -> Marks:
    """Mark filling with zeros as linear: every rank alike adds them."""
    return {"self": "'"} if argument(node, "value") == 0 else {}


def _divided(node: fx.Node) -> Marks:
    return {"self": "'"} if argument(node, "rounding_mode") is None else {}


_LINEAR: Marks = {"self": "'"}
_PRODUCT: Marks = {"self": "'", "other": "'"}

_MARKS: Mapping[object, Marks | Callable[[fx.Node], Marks]] = {
    **dict.fromkeys((aten.neg.default, aten.clone.default, aten.deg2rad.default), _LINEAR),
    aten.mul.Tensor: _PRODUCT,
    aten.mul.Scalar: _LINEAR,
    aten.div.Tensor: _LINEAR,
    aten.div.Scalar: _LINEAR,
    aten.div.Tensor_mode: _divided,
    aten.add.Tensor: _sum_of_tensors,
    aten.sub.Tensor: _sum_of_tensors,
    aten.rsub.Tensor: _sum_of_tensors,
    aten.where.self: {"self": "+", "other": "+"},
    aten.masked_fill.Scalar: _fill,
    aten.lerp.Scalar: {"self": "+", "end": "+"},
    aten.addcmul.default: {"self": "+", "tensor1": "'", "tensor2": "'"},
    aten.addcdiv.default: {"self": "+", "tensor1": "'"},
}


def _plain(node: fx.Node) -> tuple[Choice, ...]:
    return elementwise(node, {})


def _copy(node: fx.Node) -> tuple[Choice, ...]:
    return elementwise(node, _LINEAR)


def _to(node: fx.Node) -> tuple[Choice, ...]:
    return elementwise(node, _cast(node))


def _where_scalar(node: fx.Node) -> tuple[Choice, ...]:
    name, other = ("self", "other") if node.target is aten.where.ScalarOther else ("other", "self")
    return elementwise(node, {name: "'"} if argument(node, other) == 0 else {})


def _dropout(node: fx.Node) -> tuple[Choice, ...]:
    """Shard dropout: the mask is the same where the tensor is, so all ranks drop replicated and partial sums alike."""
    return elementwise(node, {"input": "'", "self": "'"}, RANDOM if draws_random_numbers(node) else "")


def _feature_dropout(node: fx.Node) -> tuple[Choice, ...]:
    """Shard samples and channels only: each has one draw."""
    whole = tuple(range(2, len(operands_shapes(node)[0])))
    return elementwise(node, {"input": "'"}, RANDOM if draws_random_numbers(node) else "", whole)


def _random_like(node: fx.Node) -> tuple[Choice, ...]:
    return elementwise(node, {}, RANDOM)


def _prelu(node: fx.Node) -> tuple[Choice, ...]:
    """Shard prelu: one slope per channel, the second dimension."""
    return from_text(
        node,
        "self[b c s*] weight[c] -> [b c s*]"
        if len(operands_shapes(node)[0]) > 1
        else "self[.*] weight[.] -> [.*]",
    )


RULES: Mapping[object, Rule] = {
    **dict.fromkeys(_MARKS, pointwise),  # torch does not tag all of them
    **dict.fromkeys(
        (aten.detach.default, aten.alias.default, aten.contiguous.default, aten.lift_fresh_copy.default),
        _copy,
    ),
    **dict.fromkeys(
        (
            aten.to.dtype,
            aten.to.dtype_layout,
            aten.to.device,
            aten._to_copy.default,
        ),
        _to,
    ),
    **dict.fromkeys(
        (
            aten.__and__.Tensor,
            aten.__or__.Tensor,
            aten.__xor__.Tensor,
            aten.__and__.Scalar,
            aten.__or__.Scalar,
            aten.fill.Scalar,
            aten.fill.Tensor,
            aten.selu.default,
            aten.hardswish.default,
            aten.log_sigmoid.default,
            aten.floor_divide.default,
            aten.polar.default,
        ),
        _plain,
    ),
    aten.prelu.default: _prelu,
    aten.view_as_complex.default: notation("self'[b* .] -> [b*]"),
    aten.view_as_real.default: notation("self'[b*] -> [b* .]"),
    aten.where.ScalarOther: _where_scalar,
    aten.where.ScalarSelf: _where_scalar,
    aten.dropout.default: _dropout,
    aten.feature_dropout.default: _feature_dropout,
    **dict.fromkeys((aten.bernoulli.default, aten.bernoulli.p, aten.rand_like.default), _random_like),
    aten.randn_like.default: _random_like,
}
