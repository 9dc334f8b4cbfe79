"""Ops that are recomputed wherever they are needed instead of being sent or placed.

Masks, rotary tables, positions, sizes: everything that depends on batch inputs, constants and never-written buffers
only, draws no random numbers, and costs little. Placing them once would tie stages together by messages that cost more
than the op; so a segment that needs one runs its own copy. They have no layout.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from passes.graph.graph import OpGraph
from passes.graph.nodes import argument
from passes.graph.state import mutable_buffers
from runtime.ops.local import run_local
from runtime.ops.opaque import Opaque

MAX_FLOPS_PER_ELEMENT = 512
"""The most terms per output element of a contraction that still counts as cheap.

Empirical: the rotary tables' outer product has 2, a vocabulary projection has thousands.
"""

_CONTRACTIONS = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "einsum")
_HEAVY = ("conv", "attention", "lstm", "gru", "rnn", "fft", "linalg")


def recomputed_ops(graph: OpGraph) -> frozenset[str]:
    """Name the ops that every segment recomputes for itself when it needs them."""
    mutable = mutable_buffers(graph)
    roots = {
        i.node
        for i in graph.inputs
        if i.kind in ("batch", "constant") or (i.kind == "buffer" and i.name not in mutable)
    }
    owned = {output.node for output in graph.outputs}
    cheap: set[str] = set()
    for node in graph.ops:
        if node.name in owned or draws_random_numbers(node) or not _is_light(node):
            continue
        if all(source.name in roots or source.name in cheap for source in node.all_input_nodes):
            cheap.add(node.name)
    return frozenset(cheap)


def draws_random_numbers(node: fx.Node) -> bool:
    """Tell whether running the op twice may give two results (dropout in training, rand, bernoulli)."""
    if node.target is run_local:  # (function, op, roles, the op's own arguments …)
        return node.args[0] in ("random", "replayed")
    if isinstance(node.target, Opaque):
        return node.target.random
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    train = argument(node, "train")
    never = any(argument(node, name) == 0.0 for name in ("dropout_p", "dropout", "p"))
    return train is not False and not never


def _is_light(node: fx.Node) -> bool:
    if isinstance(node.target, Opaque):
        return False
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else str(node.target)
    name = name.split("::")[-1]
    if any(heavy in name for heavy in _HEAVY):
        return False
    if name not in _CONTRACTIONS:
        return True
    left = next((source.meta.get("val") for source in node.all_input_nodes), None)
    return isinstance(left, torch.Tensor) and _terms(left) <= MAX_FLOPS_PER_ELEMENT


def _terms(left: torch.Tensor) -> float:
    size = left.shape[-1] if left.dim() else 1
    return size if isinstance(size, int) else math.inf
