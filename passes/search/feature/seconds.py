"""Seconds of ops on local shapes.

An op of W operations and Q bytes, on a rank that has the share w of the work and, of each tensor, a share:

    operations   w·W           w = 1 / (product of the axes on which any of its tensors is split)
    bytes        q·Q           q = Σ local bytes of its tensors / Σ their bytes; lookups read of a table what they return,
                               and their backward touches all of the local table
    sums         p·S           S of Q add gradients of parameters to those of earlier micro-batches;
                               p = Σ local bytes of these parameters / Σ their bytes: splitting samples does not split them
    launches     as many

Seconds of an op are forward, input half and weight half together: on a GPU the longer of launching and running each, on a
CPU their sum (``cost_models.compute``). What runs replicated costs in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import fx

from cost_models.arrays import FloatArray
from cost_models.compute import ComputeDevice, IndexArray
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.shard.words import operands

aten = torch.ops.aten
LOOKUPS = frozenset(
    {aten.embedding.default, aten.index.Tensor, aten.gather.default, aten.index_select.default}
)


class ByteShares(NamedTuple):
    """The shares of an op's memory traffic that a rank has. Shapes [rows]."""

    bytes: FloatArray
    """Forward and input half."""
    weight_bytes: FloatArray
    """Weight half, without sums."""
    sum_bytes: FloatArray
    """Sums of parameters' gradients."""


class LocalRows(NamedTuple):
    """Ops, by their index, with the shares of their work and of their traffic that a rank has. Shapes [rows]."""

    ops: IndexArray
    work: FloatArray
    traffic: ByteShares
    forwards: int = 1
    """The times that they run forward: 2 where backward computes them again."""


def local_seconds(
    costs: GraphCosts, rows: Sequence[LocalRows], samples: int, devices: Sequence[ComputeDevice]
) -> FloatArray:
    """Seconds of all rows, one after the other, each op on the slowest of ``devices``."""
    ops, work_share = (np.concatenate([row[i] for row in rows]) for i in range(2))
    traffic = ByteShares(*map(np.concatenate, zip(*(row.traffic for row in rows), strict=True)))
    exact = costs.exact(samples)
    work, rates = exact.at(samples).rows(ops), exact.rates.rows(ops)
    sums = rates.extra.accumulated_bytes
    local = replace(
        work,
        forward_flops=work.forward_flops * work_share,
        backward_input_flops=work.backward_input_flops * work_share,
        backward_weight_flops=work.backward_weight_flops * work_share,
        forward_bytes=work.forward_bytes * traffic.bytes,
        backward_input_bytes=work.backward_input_bytes * traffic.bytes,
        backward_weight_bytes=(work.backward_weight_bytes - sums) * traffic.weight_bytes
        + sums * traffic.sum_bytes,
        output_bytes=work.output_bytes * traffic.bytes,
    )
    once = np.ones(len(ops))
    forwards = np.repeat([float(row.forwards) for row in rows], [len(row.ops) for row in rows])
    slowest = np.zeros(len(ops))
    for device in devices:
        total = np.zeros(len(ops))
        for phase, times in zip(rates.phases(local, device), (forwards, once, once), strict=True):
            on_gpu = device.kind == "cuda"
            each = np.maximum(phase.kernel, phase.launch) if on_gpu else phase.kernel + phase.launch
            total += times * each
        slowest = np.maximum(slowest, total)
    return slowest


def byte_shares(
    target: object,
    operand_bytes: Sequence[float],
    output_bytes: Sequence[float],
    operand_share: FloatArray,
    output_share: FloatArray,
    trained: Sequence[bool],
) -> ByteShares:
    """Compute the shares of an op's memory traffic. Shares: [options, tensors]. ``trained``: operands that are trained."""
    read, made = np.array(operand_bytes, dtype=float), np.array(output_bytes, dtype=float)
    summed = read * np.array(trained, dtype=float)
    of_sums = operand_share @ summed / max(float(summed.sum()), 1.0)
    if target is aten.scaled_dot_product_attention.default and len(read) > 3:
        read[3] = 0.0  # a mask is little beside the scores, which are split as queries, keys and values are
    whole = max(float(read.sum() + made.sum()), 1.0)
    everything = (operand_share @ read + output_share @ made) / whole
    if target not in LOOKUPS:
        return ByteShares(everything, everything, of_sums)
    read[0] = 0.0
    whole = max(float(read.sum() + made.sum()), 1.0)
    return ByteShares((operand_share @ read + output_share @ made) / whole, everything, of_sums)


def trained_operands(graph: OpGraph, node: fx.Node) -> list[bool]:
    """Tell of each tensor that ``node`` reads whether it is a parameter that is trained."""
    found = []
    for source in operands(node):
        given = graph.input_of.get(source.name)
        found.append(given is not None and given.kind == "parameter" and source.name in graph.needs_grad)
    return found
