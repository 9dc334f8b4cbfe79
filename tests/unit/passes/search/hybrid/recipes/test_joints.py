"""Where a pipeline of sharded stages may be cut."""

from __future__ import annotations

import pytest

from passes.graph.recomputed import recomputed_ops
from passes.graph.state import colocated
from passes.search.hybrid.recipes.joints import pieces_of
from tests.support.matrix import thinned
from tests.support.traced_models import loaded

MODELS = ["gpt2", "t5", "unet", "mixtral", "resnet50", "lstm_seq2seq"]


@pytest.mark.parametrize("model", thinned(MODELS, ["t5", "unet", "lstm_seq2seq"]))
def test_every_op_is_in_one_piece_in_the_programs_order(model: str) -> None:
    graph = loaded(model)[1]
    found = pieces_of(graph)
    copied = recomputed_ops(graph)
    assert [op for ops in found.ops for op in ops] == [n.name for n in graph.ops if n.name not in copied]
    for together in colocated(graph):
        assert len({found.piece_of[op] for op in together if op in found.piece_of}) <= 1
    assert found.streams[0] is None
    for joint, stream in enumerate(found.streams):
        if stream is not None:
            assert (found.piece_of[stream], found.last_reader[stream]) == (joint - 1, joint)


def test_equal_blocks_are_one_class() -> None:
    found = pieces_of(loaded("gpt2")[1])
    blocks = [kind for kind, name in zip(found.kind, found.blocks, strict=True) if name]
    others = {kind for kind, name in zip(found.kind, found.blocks, strict=True) if not name}
    assert len(blocks) > 1
    assert len(set(blocks)) == 1
    assert not others & set(blocks)
    assert all(stream is not None for stream in found.streams[1:-1])


def test_what_is_outside_of_blocks_is_parted_where_one_value_crosses() -> None:
    """The end of a loss is a piece of its own; blocks stay whole."""
    graph = loaded("gpt2")[1]
    whole, parted = pieces_of(graph), pieces_of(graph, fewest=2)
    assert [ops for ops, name in zip(parted.ops, parted.blocks, strict=True) if name] == [
        ops for ops, name in zip(whole.ops, whole.blocks, strict=True) if name
    ]
    assert len(parted.ops[-1]) < len(whole.ops[-1])
    assert sum(parted.ops, ()) == sum(whole.ops, ())
