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

Sums of input gradients beside weight gradients: the executor computes the weight gradients of all layers that read one
bridge while its sum is under way (``passes.shard.beside``): W seconds beside s, of which ``hidden_seconds(s, W)`` count
nothing. Layer r, with n[r] of the layers' n outputs, is given that part of the sum:

    hidden[r] = hidden_seconds(s · n[r] / n, W[r])      Σ hidden[r] = hidden_seconds(s, Σ W) where all need x alike, for
                                                        W[r] goes by n[r]; never more: a sum of minima is below

So a reader's share depends on how the value is made and on the reader's own need of it: a pairwise cost. How a layer's work
is shared follows from its need of x [b* i]:

    R~    by columns, n     S(i)    by rows, i     S(b)    by samples     R, P    all of it on each rank
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import sympy
import torch
from torch import fx

from cost_models.arrays import FloatArray
from cost_models.compute import ComputeDevice, IndexArray, PhaseSeconds
from cost_models.layout import Replicate, Shard
from passes.costs.costs import GraphCosts
from passes.costs.seconds import OpRates, OpTable
from passes.graph.graph import OpGraph, tensor_specs
from passes.shard.words import Need, operands

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
    local, rates = _local(costs, rows, samples)
    once = np.ones(len(local.output_bytes))
    forwards = np.repeat([float(row.forwards) for row in rows], [len(row.ops) for row in rows])
    slowest = np.zeros(len(once))
    for device in devices:
        total = np.zeros(len(once))
        for phase, times in zip(rates.phases(local, device), (forwards, once, once), strict=True):
            total += times * _seconds(phase, device)
        slowest = np.maximum(slowest, total)
    return slowest


def local_weight_seconds(
    costs: GraphCosts, rows: Sequence[LocalRows], samples: int, devices: Sequence[ComputeDevice]
) -> FloatArray:
    """Seconds in which gradients of parameters are made, of all rows, each op on the slowest of ``devices``; without adding
    them to those of earlier micro-batches."""
    without_sums = [
        row._replace(traffic=row.traffic._replace(sum_bytes=np.ones(len(row.ops)))) for row in rows
    ]
    local, rates = _local(costs, without_sums, samples)  # all of the sums, which the rates then leave out
    slowest = np.zeros(len(local.output_bytes))
    for device in devices:
        slowest = np.maximum(slowest, _seconds(rates.weight_gradient_seconds(local, device), device))
    return slowest


def _seconds(phase: PhaseSeconds, device: ComputeDevice) -> FloatArray:
    """Seconds of each row by itself."""
    on_gpu = device.kind == "cuda"
    return np.maximum(phase.kernel, phase.launch) if on_gpu else phase.kernel + phase.launch


def _local(costs: GraphCosts, rows: Sequence[LocalRows], samples: int) -> tuple[OpTable, OpRates]:
    """Return a rank's work in each row, and the rates at which it is done."""
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
    return local, rates


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


def layers_of(
    graph: OpGraph, maker: str, readers: Collection[tuple[str, int]], region_of: Mapping[str, int]
) -> tuple[str, ...]:
    """Name the linear layers that read a value, if no others do and they can run together: else none.

    ``readers``: (op, operand); ``region_of``: the block of each op that backward computes again.
    """
    for name, operand in readers:
        node = graph.nodes.get(name)
        if node is None or operand or node.target is not aten.linear.default or node.kwargs:
            return ()
        if region_of.get(name) != region_of.get(maker) or name not in graph.needs_grad:
            return ()
        if not all(_is_of_state(graph, source) for source in operands(node)[1:]):
            return ()
    return tuple(dict.fromkeys(name for name, _ in readers))


def _is_of_state(graph: OpGraph, node: fx.Node) -> bool:
    """Tell whether a tensor is made of parameters and buffers alone."""
    given = graph.input_of.get(node.name)
    if given is not None:
        return given.kind not in ("batch", "value")
    return all(_is_of_state(graph, source) for source in node.all_input_nodes)


def outputs_of(layer: fx.Node) -> int:
    """Count a linear layer's outputs."""
    return int(tensor_specs(operands(layer)[1])[0].shape[0])


def weight_rows(
    graph: OpGraph,
    layer: fx.Node,
    index: int,
    needs: Sequence[tuple[Need, ...]],
    shape: Sequence[int],
    symbols: Mapping[sympy.Symbol, int],
) -> LocalRows:
    """Return the shares of a layer's work on a mesh of ``shape``, one row for each way to need its input. ``index``: among
    the graph's ops."""
    specs = [tensor_specs(source)[0] for source in operands(layer)]
    last = len(specs[0].shape) - 1
    columns, rows, samples = (np.ones(len(needs)) for _ in range(3))
    for k, need in enumerate(needs):
        for own, size in zip(need, shape, strict=True):
            if isinstance(own.placement, Shard):
                (rows if own.placement.dim == last else samples)[k] /= size
            elif isinstance(own.placement, Replicate) and own.partial_gradient:
                columns[k] /= size
    shares = (samples * rows, columns * rows, columns)[: len(specs)]
    traffic = byte_shares(
        layer.target,
        [spec.size_bytes(symbols) for spec in specs],
        [spec.size_bytes(symbols) for spec in tensor_specs(layer)],
        np.stack(shares, axis=1),
        (samples * columns)[:, None],
        trained_operands(graph, layer),
    )
    return LocalRows(np.full(len(needs), index), columns * rows * samples, traffic)


def parts_of_sum(layers: Sequence[fx.Node], times: Sequence[int]) -> FloatArray:
    """Return the part of a bridge's sum that is given to each of ``layers``; each stands for so many (``times``)."""
    outputs = np.array([outputs_of(layer) for layer in layers], dtype=float)
    parts: FloatArray = outputs / float(outputs @ np.array(times))
    return parts
