"""The attention that an op of a graph computes, in numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from cost_models.attention import AttentionCall
from passes.graph.signatures import Signature, called, concrete
from runtime.ops.attention import TOKENS
from runtime.ops.flex import FLEX_ATTENTION
from runtime.ops.local import OF_SHAPE, run_local

aten = torch.ops.aten
_FLEX = ("query", "key", "value", "blocks", "operands", "mask", "score")


def attention_call(signature: Signature, symbols: Mapping[sympy.Symbol, int]) -> AttentionCall | None:
    """Return the attention that the op computes, or None if it is another op."""
    target, given = called(signature.exemplar)
    if target is FLEX_ATTENTION:
        return _flex(signature, given, symbols)
    if target is not aten.scaled_dot_product_attention.default:
        return None
    arguments = dict(
        zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), given, strict=False)
    )
    arguments.update(signature.exemplar.kwargs)
    shapes = [tuple(concrete(size, symbols) for size in o.spec.shape) for o in signature.operands]
    node: Any = signature.exemplar
    copied = node.target is run_local and node.args[0] in OF_SHAPE
    if copied:
        of_query, *others = shapes[:3]
        tokens = [of_query[TOKENS] if "tokens" in node.args[2] else s[TOKENS] for s in others]
        shapes[1:3] = [(*of_query[:TOKENS], t, s[-1]) for t, s in zip(tokens, others, strict=True)]
    mask = signature.operands[3] if len(signature.operands) > 3 else None
    dropout = arguments.get("dropout_p", 0.0)
    return AttentionCall(
        query=shapes[0],
        key=shapes[1],
        value=shapes[2],
        dtype=signature.operands[0].spec.dtype,
        mask=shapes[3] if mask is not None else None,
        mask_dtype=mask.spec.dtype if mask is not None else None,
        mask_requires_grad=mask is not None and mask.role != "none",
        dropout=float(dropout) if isinstance(dropout, int | float) else 0.0,
        causal=bool(arguments.get("is_causal", False)),
        copies_heads=copied,
    )


def _flex(signature: Signature, given: Sequence[Any], symbols: Mapping[sympy.Symbol, int]) -> AttentionCall:
    """Return the attention of flex_attention, with the mask that its dense form has."""
    arguments = dict(zip(_FLEX, given, strict=False))
    shapes = [tuple(concrete(size, symbols) for size in o.spec.shape) for o in signature.operands]
    query, key = shapes[:2]
    masked = arguments["blocks"] is not None
    visible: Any = signature.exemplar.kwargs.get("visible", 1.0)
    return AttentionCall(
        query=query,
        key=key,
        value=shapes[2],
        dtype=signature.operands[0].spec.dtype,
        mask=(*query[:-1], key[-2]) if masked else None,
        mask_dtype=torch.bool if masked else None,
        visible=float(visible),
        changes_scores=bool(arguments["score"]),
        listed_bytes=4 * math.prod(shapes[3]) if masked else 0,
    )
