"""Equal blocks: ops at equal positions of equal blocks are one class, decided once for all of them.

    layers.0: norm q k v attention … │ layers.1: norm q k v attention … │ …     ─►   one class per position, n members

Two blocks (``passes.graph.blocks``) are equal if their ops have the same signatures (``passes.graph.signatures``) in the
same order. Every other op is a class of its own. Classes restrict a search to equal decisions for equal blocks; they say
nothing about edges, which are those of the whole graph (``passes.search.feature.graph``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.graph.blocks import block_of
from passes.graph.graph import OpGraph
from passes.graph.signatures import group_by_signature


@dataclass(frozen=True)
class OpClasses:
    """``of[i]``: the class of op i; ``members[c]``: the indices of class c's ops, in the model's order."""

    of: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]


def op_classes(graph: OpGraph) -> OpClasses:
    """The classes of ``graph.ops``; computed once per graph."""
    if "op_classes" not in graph.memo:
        signatures = group_by_signature(graph).of
        graph.memo["op_classes"] = group_blocks(
            [node.name for node in graph.ops], signatures, block_of(graph)
        )
    found = graph.memo["op_classes"]
    assert isinstance(found, OpClasses)
    return found


def group_blocks(names: Sequence[str], signatures: Sequence[int], blocks: Mapping[str, str]) -> OpClasses:
    """Classes of ops by their block's run of signatures and their position in it; O(ops)."""
    inside: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        if name in blocks:
            inside.setdefault(blocks[name], []).append(index)
    kind_of = {block: tuple(signatures[i] for i in members) for block, members in inside.items()}
    class_of: dict[object, int] = {}
    of = [-1] * len(names)
    position = {i: place for members in inside.values() for place, i in enumerate(members)}
    for index, name in enumerate(names):
        key: object = index
        if name in blocks:
            key = (kind_of[blocks[name]], position[index])
        of[index] = class_of.setdefault(key, len(class_of))
    members_of: list[list[int]] = [[] for _ in class_of]
    for index, number in enumerate(of):
        members_of[number].append(index)
    return OpClasses(tuple(of), tuple(map(tuple, members_of)))
