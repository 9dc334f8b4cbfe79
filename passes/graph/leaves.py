"""Leaves of the batch: their bytes in a step, and which ops need them where they run.

Every device whose ops read a leaf holds it, or its part of it, for all micro-batches of a step from the start: the executor
puts it there before the first forward.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from passes.graph.graph import OpGraph, tensor_specs
from passes.graph.signatures import concrete
from passes.graph.state import needed_inputs, readers


def needed_leaves(graph: OpGraph, recomputed: Collection[str]) -> dict[str, set[str]]:
    """Name the leaves that each op reads, itself or through ops that are ``recomputed`` for it."""
    return needed_inputs(graph, recomputed, ("batch",))


def leaf_readers(graph: OpGraph, index: Mapping[str, int]) -> dict[str, set[int]]:
    """Number the placed ops that need each leaf, by ``index``; all other ops are recomputed."""
    return readers(graph, index, ("batch",))


def leaf_bytes(graph: OpGraph, samples: int) -> dict[str, int]:
    """Count the bytes of each leaf of a batch of ``samples``; other dynamic sizes are those of the example batch."""
    symbols = {**graph.example_sizes, graph.batch.batch_symbol: samples}
    found = {}
    for given in graph.inputs:
        specs = tensor_specs(graph.nodes[given.node])
        if given.kind == "batch" and specs:
            elements = math.prod(concrete(size, symbols) for size in specs[0].shape)
            found[given.name] = elements * specs[0].dtype.itemsize
    return found
