"""The smallest micro-batch that the model accepts.

A batch normalization in training refuses a single value per channel (its variance is 0, its running variance 0/0), so
one over ``(samples, channels)`` alone needs two samples. The check is Python code that an exported graph has lost: run
on one sample, the graph would put nan into the running statistics.
"""

from __future__ import annotations

import math

import torch

from passes.graph import OpGraph, tensor_specs
from passes.node_tools import argument

aten = torch.ops.aten


def least_samples(graph: OpGraph) -> tuple[int, str]:
    """Samples per micro-batch, and which op needs as many ("" where one will do)."""
    sizes = {
        symbol: graph.example_shapes[leaf][dim]
        for symbol, (leaf, dim) in graph.batch.symbols.items()
        if leaf in graph.example_shapes
    }
    sizes[graph.batch.batch_symbol] = 1
    for node in graph.ops:
        if node.target is aten.batch_norm.default and argument(node, "training"):
            (spec,) = tensor_specs(node.all_input_nodes[0])
            shape = spec.concrete(sizes)
            if math.prod(shape[:1] + shape[2:]) == 1:
                return 2, f"{node.name} in module {node.meta.get('module_path') or '(root)'}"
    return 1, ""
