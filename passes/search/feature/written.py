"""Buffers that several ops write: all of them take them whole, else what one wrote would be lost to the next.

A batch norm that a model calls twice is two ops on the same running statistics. Each could take these as it likes (by
channels, or whole where samples are split), but they are stored in one way only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import fx

from cost_models.layout import Replicate
from passes.graph.graph import OpGraph
from passes.shard.words import Choice, operands
from runtime.segment.recompute import writes_statistics


def taking_shared_buffers_whole(
    graph: OpGraph, choices: Callable[[fx.Node], tuple[Choice, ...]]
) -> Callable[[fx.Node], tuple[Choice, ...]]:
    """``choices``, of ops that write what others write too only those that take it whole."""
    writers = Counter(source.name for node in graph.ops for source in _written(node))
    shared = {name for name, count in writers.items() if count > 1}
    if not shared:
        return choices

    def fewer(node: fx.Node) -> tuple[Choice, ...]:
        whole = [
            i for i, source in enumerate(operands(node)) if source in _written(node) and source.name in shared
        ]
        return tuple(
            choice
            for choice in choices(node)
            if all(isinstance(choice.inputs[i].placement, Replicate) for i in whole)
        )

    return fewer


def _written(node: fx.Node) -> tuple[fx.Node, ...]:
    if not writes_statistics(node):
        return ()
    return tuple(source for source in node.args[3:5] if isinstance(source, fx.Node))
