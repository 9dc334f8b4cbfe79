"""Seconds of ops on local shapes.

An op of W operations and Q bytes, on a rank that has the share w of the work and, of each tensor, a share:

    operations   w·W           w = 1 / (product of the axes on which any of its tensors is split)
    bytes        q·Q           q = Σ local bytes of its tensors / Σ their bytes; lookups read of a table what they return,
                               and their backward touches all of the local table
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

from cost_models.arrays import FloatArray
from cost_models.compute import ComputeDevice, IndexArray
from passes.costs.costs import GraphCosts

aten = torch.ops.aten
LOOKUPS = frozenset(
    {aten.embedding.default, aten.index.Tensor, aten.gather.default, aten.index_select.default}
)


class LocalRows(NamedTuple):
    """Ops, by their index, with the shares of their work and of their traffic that a rank has. Shapes [rows]."""

    ops: IndexArray
    work: FloatArray
    bytes: FloatArray
    """Forward and input half."""
    weight_bytes: FloatArray
    """Weight half."""


def local_seconds(
    costs: GraphCosts, rows: Sequence[LocalRows], samples: int, devices: Sequence[ComputeDevice]
) -> FloatArray:
    """Seconds of all rows, one after the other, each op on the slowest of ``devices``."""
    ops, work_share, byte_share, weight_byte_share = map(np.concatenate, zip(*rows, strict=True))
    exact = costs.exact(samples)
    work = exact.at(samples).rows(ops)
    local = replace(
        work,
        forward_flops=work.forward_flops * work_share,
        backward_input_flops=work.backward_input_flops * work_share,
        backward_weight_flops=work.backward_weight_flops * work_share,
        forward_bytes=work.forward_bytes * byte_share,
        backward_input_bytes=work.backward_input_bytes * byte_share,
        backward_weight_bytes=work.backward_weight_bytes * weight_byte_share,
        output_bytes=work.output_bytes * byte_share,
    )
    rates = exact.rates.rows(ops)
    slowest = np.zeros(len(ops))
    for device in devices:
        total = np.zeros(len(ops))
        for seconds in rates.phases(local, device):
            on_gpu = device.kind == "cuda"
            total += np.maximum(seconds.kernel, seconds.launch) if on_gpu else seconds.kernel + seconds.launch
        slowest = np.maximum(slowest, total)
    return slowest


def byte_shares(
    target: object,
    operand_bytes: Sequence[float],
    output_bytes: Sequence[float],
    operand_share: FloatArray,
    output_share: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """(forward and input half, weight half) shares of an op's memory traffic. Shares: [options, tensors]."""
    read, made = np.array(operand_bytes, dtype=float), np.array(output_bytes, dtype=float)
    if target is aten.scaled_dot_product_attention.default and len(read) > 3:
        read[3] = 0.0  # a mask is little beside the scores, which are split as queries, keys and values are
    whole = max(float(read.sum() + made.sum()), 1.0)
    everything = (operand_share @ read + output_share @ made) / whole
    if target not in LOOKUPS:
        return everything, everything
    read[0] = 0.0
    whole = max(float(read.sum() + made.sum()), 1.0)
    return (operand_share @ read + output_share @ made) / whole, everything
