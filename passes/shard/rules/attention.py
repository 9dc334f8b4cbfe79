"""Attention and recurrent networks: by sample and by head; a recurrence mixes its hidden units at every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from passes.graph.nodes import argument, tensors_of
from passes.graph.recomputed import draws_random_numbers
from passes.shard.rules.notation import Rule, Term, from_terms, from_text
from passes.shard.rules.pointwise import RANDOM
from passes.shard.rules.shapes import operands_shapes
from passes.shard.words import QUERIES, TOKENS_OF_KEYS, Choice, operands
from runtime.ops.attention import HEADS, TOKENS
from runtime.ops.flex import FLEX_ATTENTION, FLEX_BLOCKS

aten = torch.ops.aten

COLUMNS = "attention:columns"


def _attention(node: fx.Node) -> tuple[Choice, ...]:
    """Shard query (…, l, e), key (…, s, e), value (…, s, v), mask broadcastable to (…, l, s).

    With ``enable_gqa`` key and value have fewer heads: a rank's share of theirs belongs to its share of the queries'. Where
    they do not divide, and for columns of values, ranks copy what they need (``runtime.ops.attention``).
    A causal mask counts queries from 0, so their sequence stays whole then; keys' always does.
    """
    row = "." if argument(node, "is_causal") else "l"
    text = f"query[b* {row} .] key[b* . .] value'[b* . v] attn_mask[b* {row} .] -> [b* {row} v]"
    letters = [f"b{d}" for d in range(tensors_of(node)[0].dim() - 2)] + ["l", "v"]
    if draws_random_numbers(node):
        # Ranks with other columns of the values must drop the same weights: that would need the same draws on all.
        return from_text(node, text, local={x: RANDOM for x in letters if x != "v"})
    of_query, of_key, *_ = operands_shapes(node)
    if len(of_query) < 3 or not 0 < of_key[HEADS] < of_query[HEADS]:
        return from_text(node, text)
    return (*from_text(node, text, local={"v": COLUMNS}), *_by_queries(node))


def _by_queries(node: fx.Node) -> Iterator[Choice]:
    """Yield choices that split the heads of queries alone, where they share several of keys."""
    of_query, of_key, _, *of_mask = operands_shapes(node)
    if of_key[HEADS] == 1:
        return
    mask = ".* h . ." if of_mask and len(of_mask[0]) > 2 else ". ."
    split = {QUERIES: ".* . . ."}
    if argument(node, "is_causal") and of_query[TOKENS] == of_key[TOKENS]:
        split[TOKENS_OF_KEYS] = ".* . h ."
    for local, keys in split.items():
        text = f"query[.* h . .] key[{keys}] value[{keys}] attn_mask[{mask}] -> [.* h . .]"
        yield from from_text(node, text, local={"h": local})[1:]


_BY_HEADS = ("b", "h", None, None)


def _flex(node: fx.Node) -> tuple[Choice, ...]:
    """Shard samples and heads of flex_attention: lists of blocks count rows and columns from 0, so these stay whole."""
    read = [tensor.meta["val"].dim() for tensor in operands(node)]
    terms = [Term(_BY_HEADS, linear=place == 2) for place in range(3)]
    if argument(node, "blocks") is not None:
        terms.append(Term(("b", "h", None)))
    terms += [Term(_BY_HEADS[4 - rank :]) for rank in read[len(terms) :]]
    return from_terms(node, terms, [Term(_BY_HEADS)])


def _flex_blocks(node: fx.Node) -> tuple[Choice, ...]:
    terms = [Term(_BY_HEADS[4 - tensor.meta["val"].dim() :]) for tensor in operands(node)]
    return from_terms(node, terms, [Term(("b", "h", None))])


def _recurrent(node: fx.Node) -> tuple[Choice, ...]:
    """Shard samples: they have the same weights. Dropout between layers is drawn per sample."""
    batched = "b ." if argument(node, "batch_first") else ". b"
    unbatched = tensors_of(node)[0].dim() == 2
    rows, state = (". ", ". .") if unbatched else (batched, ". b .")
    made = f"[{rows} .]" + f" [{state}]" * (len(tensors_of(node)) - 1)
    text = f"input[{rows} .] hx[{state}] params[.*] -> {made}"
    return from_text(node, text, local={"b": RANDOM} if draws_random_numbers(node) else {})


RULES: Mapping[object, Rule] = {
    aten.scaled_dot_product_attention.default: _attention,
    FLEX_ATTENTION: _flex,
    FLEX_BLOCKS: _flex_blocks,
    **dict.fromkeys((aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input), _recurrent),
}
