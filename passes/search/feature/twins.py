"""Twins: ops outside the blocks that compute the same and are read in equal places are one decision.

Position tables of a transformer are reshaped anew in every layer, from one table and outside the layers' blocks: 80 layers
make 160 such ops. Two ops of classes of their own are twins if they call the same function on equal values, or on values of
twins, and ops of the same classes, or twins, read what they make at the same places.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TypeAlias

from torch import fx

from passes.graph.graph import OpGraph, once_per_graph
from passes.graph.signatures import OpClasses, group_by_signature
from passes.shard.words import operands

Groups: TypeAlias = list[int]
"""Per op, the first op of its group."""


@once_per_graph
def with_twins(graph: OpGraph, classes: OpClasses) -> tuple[tuple[int, ...], ...]:
    """The classes' members, twins put together; in the order of first members."""
    ops = graph.ops
    index = {node.name: i for i, node in enumerate(ops)}
    alone = [i for i in range(len(ops)) if len(classes.members[classes.of[i]]) == 1]
    group = _same_values(ops, group_by_signature(graph).of, alone, classes, index)
    kept = {output.node for output in graph.outputs}
    kept |= {
        str(source) for node in ops if node.target is operator.getitem for source in node.all_input_nodes
    }
    finer = group
    while True:
        finer = _same_readers(ops, alone, group, index, kept)
        if finer == group:
            break
        group = finer
    found: dict[int, list[int]] = {}
    for i, first in enumerate(group):
        found.setdefault(first, []).append(i)
    return tuple(tuple(members) for members in found.values())


def _same_values(
    ops: Sequence[fx.Node],
    signature: Sequence[int],
    alone: Sequence[int],
    classes: OpClasses,
    index: dict[str, int],
) -> Groups:
    """Ops of a class, and ops of no class that compute the same value."""
    group = [classes.members[number][0] for number in classes.of]
    single = set(alone)
    known: dict[object, int] = {}
    for i in alone:
        sources = tuple(
            group[index[source.name]] if index.get(source.name) in single else source.name
            for source in ops[i].all_input_nodes
        )
        group[i] = known.setdefault((signature[i], sources), i)
    return group


def _same_readers(
    ops: Sequence[fx.Node], alone: Sequence[int], group: Groups, index: dict[str, int], kept: set[str]
) -> Groups:
    """Split groups whose members are read in unlike places; ``kept``: ops that stay by themselves."""
    finer = list(group)
    known: dict[object, int] = {}
    for i in alone:
        places = frozenset(
            (group[index[user.name]], position)
            for user in ops[i].users
            if user.name in index
            for position, source in enumerate(operands(user))
            if source is ops[i]
        )
        finer[i] = known.setdefault((group[i], places, ops[i].name if ops[i].name in kept else ""), i)
    return finer
