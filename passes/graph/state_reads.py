"""Which parameters and buffers an op needs where it runs: what it reads, and what ops that are recomputed for it read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from passes.graph.graph import OpGraph


def state_reads(graph: OpGraph, recomputed: Collection[str]) -> dict[str, set[str]]:
    """Names of parameters and buffers, by the name of each op that is not ``recomputed`` where it is needed."""
    through: dict[str, set[str]] = {}
    reads: dict[str, set[str]] = {}
    for node in graph.ops:
        own: set[str] = set()
        for source in node.all_input_nodes:
            placeholder = graph.input_of.get(source.name)
            if placeholder is not None and placeholder.kind in ("parameter", "buffer"):
                own.add(placeholder.name)
            own |= through.get(source.name, set())
        (through if node.name in recomputed else reads)[node.name] = own
    return reads


def state_readers(graph: OpGraph, index: Mapping[str, int]) -> dict[str, set[int]]:
    """The placed ops, by their numbers in ``index``, that need each parameter and buffer; all others are recomputed."""
    readers: dict[str, set[int]] = defaultdict(set)
    recomputed = {node.name for node in graph.ops}.difference(index)
    for op, names in state_reads(graph, recomputed).items():
        for name in names:
            readers[name].add(index[op])
    return readers
