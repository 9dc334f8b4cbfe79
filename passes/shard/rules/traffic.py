"""Messages of local functions to each other: the collectives inside an op, for costs and byte counts.

    cross_entropy:classes   forward    all-reduce (samples), all-reduce (2 or 3, samples)
    cross_entropy:samples   forward    all-reduce (1), for means
    batch_norm:samples      forward    all-gather (2, channels); backward all-reduce (2, channels)
    attention:tokens        both       all-to-all of keys, all-to-all of values: to each rank the heads that it reads

Samples and channels are those of one rank. The other functions of ``runtime.ops.local`` say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import sympy
import torch
from torch import fx

from cost_models.layout import Shard
from passes.graph.graph import tensor_specs
from passes.graph.nodes import argument
from passes.shard.words import TOKENS_OF_KEYS, Choice, operands
from runtime.ops.attention import HEADS, heads_sent
from runtime.ops.cross_entropy import MEAN


@dataclass(frozen=True)
class LocalCollective:
    """One collective of a local function over the mesh axes ``axes`` taken together.

    ``size_bytes``: bytes that one rank brings.
    """

    kind: Literal["all_reduce", "all_gather", "all_to_all"]
    axes: tuple[int, ...]
    size_bytes: int
    phase: Literal["forward", "backward"]


def local_collectives(
    node: fx.Node, choices: Sequence[Choice], mesh_shape: Sequence[int], symbols: Mapping[sympy.Symbol, int]
) -> tuple[LocalCollective, ...]:
    """List the collectives of one op under one choice per mesh axis; ``symbols``: sizes of a whole micro-batch."""
    roles = dict.fromkeys(choice.local for choice in choices if choice.local)
    found: list[LocalCollective] = []
    for local in roles:
        axes = tuple(d for d, choice in enumerate(choices) if choice.local == local)
        first = tensor_specs(operands(node)[0])[0].dtype
        exact_bytes = torch.promote_types(first, torch.float32).itemsize
        if local == "cross_entropy:classes":
            samples = math.prod(local_shape(node, 1, choices, mesh_shape, symbols))
            parts = 3 if argument(node, "label_smoothing") else 2
            found.append(LocalCollective("all_reduce", axes, samples * exact_bytes, "forward"))
            found.append(LocalCollective("all_reduce", axes, parts * samples * exact_bytes, "forward"))
        elif local in ("cross_entropy:samples", "nll_loss:samples"):
            if argument(node, "reduction", MEAN) == MEAN:
                found.append(LocalCollective("all_reduce", axes, first.itemsize, "forward"))
        elif local == "batch_norm:samples":
            channels = local_shape(node, 0, choices, mesh_shape, symbols)[1]
            found.append(LocalCollective("all_gather", axes, 2 * channels * exact_bytes, "forward"))
            found.append(LocalCollective("all_reduce", axes, 2 * channels * exact_bytes, "backward"))
        elif local == TOKENS_OF_KEYS:
            count = local_shape(node, 0, choices, mesh_shape, symbols)[HEADS]
            ranks = math.prod(mesh_shape[axis] for axis in axes)
            for operand in (1, 2):
                sizes = list(local_shape(node, operand, choices, mesh_shape, symbols))
                sizes[HEADS] = ranks * heads_sent(count, ranks, sizes[HEADS])[1]
                size_bytes = math.prod(sizes) * first.itemsize
                found += [LocalCollective("all_to_all", axes, size_bytes, p) for p in ("forward", "backward")]
    return tuple(found)


def local_shape(
    node: fx.Node,
    operand: int,
    choices: Sequence[Choice],
    mesh_shape: Sequence[int],
    symbols: Mapping[sympy.Symbol, int],
) -> tuple[int, ...]:
    """Return the shape of one rank's part of an operand."""
    (spec,) = tensor_specs(operands(node)[operand])
    sizes = list(spec.concrete(symbols))
    for choice, ranks in zip(choices, mesh_shape, strict=True):
        placement = choice.inputs[operand].placement
        if isinstance(placement, Shard):
            sizes[placement.dim] //= ranks
    return tuple(sizes)
