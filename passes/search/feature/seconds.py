"""Seconds of ops on local shapes.

An op of W operations and Q bytes, on a rank that has the share w of the work and, of each tensor, a share:

    operations   w·W           w = 1 / (product of the axes on which any of its tensors is split)
    bytes        q·Q           q = Σ local bytes of its tensors / Σ their bytes; lookups read of a table what they return,
                               and their backward touches all of the local table
    sums         p·S           S of Q add gradients of parameters to those of earlier micro-batches;
                               p = Σ local bytes of these parameters / Σ their bytes: splitting samples does not split them
    launches     as many

W, Q and S are those of the samples that a rank has, where samples are split: so ranks that split nothing else take as long
as one rank with their samples alone.

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

Collectives inside ops are those of local functions (``passes.shard.rules.traffic``): a vocabulary-sharded cross-entropy
all-reduces a few numbers per sample, a batch norm over split samples gathers its statistics. The axes of one role are
joined: their ranks make one group, whose links are those of the joined axes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import sympy
import torch
from numpy.typing import NDArray
from torch import fx

from cost_models.arrays import FloatArray, IntArray
from cost_models.cluster import ClusterSpec
from cost_models.compute import ComputeDevice, IndexArray, PhaseSeconds
from cost_models.layout import Mesh, Placement, Replicate, Shard
from passes.costs.costs import GraphCosts
from passes.costs.seconds import OpRates, OpTable
from passes.graph.graph import OpGraph, tensor_specs
from passes.search.feature.setting import joined_links
from passes.shard.rules.traffic import LocalCollective, local_collectives
from passes.shard.words import Choice, Need, operands
from runtime.ops.bags import EMBEDDING_BAG
from runtime.ops.flex import ATTENTION
from runtime.segment.code import Dim, TensorSpec

aten = torch.ops.aten
LOOKUPS = frozenset(
    {
        aten.embedding.default,
        EMBEDDING_BAG,
        aten.index.Tensor,
        aten.gather.default,
        aten.index_select.default,
    }
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
    """Shares of the traffic of a rank's part of the samples."""
    parts: IntArray
    """The parts that samples are split in."""
    forwards: int = 1
    """The times that they run forward: 2 where backward computes them again."""


def local_seconds(
    costs: GraphCosts, rows: Sequence[LocalRows], samples: int, devices: Sequence[ComputeDevice]
) -> FloatArray:
    """Seconds of all rows, one after the other, each op on the slowest of ``devices``."""
    forwards = np.repeat([float(row.forwards) for row in rows], [len(row.ops) for row in rows])
    slowest = np.zeros(len(forwards))
    for chosen, local, rates in _local(costs, rows, samples):
        for device in devices:
            forward, *backward = (_seconds(phase, device) for phase in rates.phases(local, device))
            total = forwards[chosen] * forward + sum(backward)
            slowest[chosen] = np.maximum(slowest[chosen], total)
    return slowest


def local_weight_seconds(
    costs: GraphCosts, rows: Sequence[LocalRows], samples: int, devices: Sequence[ComputeDevice]
) -> FloatArray:
    """Seconds in which gradients of parameters are made, of all rows, each op on the slowest of ``devices``; without adding
    them to those of earlier micro-batches."""
    without_sums = [
        row._replace(traffic=row.traffic._replace(sum_bytes=np.ones(len(row.ops)))) for row in rows
    ]
    slowest = np.zeros(sum(len(row.ops) for row in rows))
    # all of the sums, which the rates then leave out
    for chosen, local, rates in _local(costs, without_sums, samples):
        for device in devices:
            seconds = _seconds(rates.weight_gradient_seconds(local, device), device)
            slowest[chosen] = np.maximum(slowest[chosen], seconds)
    return slowest


def shared_seconds(
    costs: GraphCosts, samples: int, devices: Sequence[ComputeDevice], ranks: int
) -> tuple[FloatArray, FloatArray]:
    """[ops] seconds forward and backward on each of so many ranks that share the work; launches are not shared."""
    exact = costs.exact(samples)
    whole, sums = exact.at(samples), exact.rates.extra.accumulated_bytes
    share = np.full(len(sums), 1.0 / ranks)
    local = _shared(whole, sums, share, ByteShares(share, share, share))
    each = [[_seconds(phase, device) for phase in exact.rates.phases(local, device)] for device in devices]
    forward, *backward = (np.maximum.reduce(phase) for phase in zip(*each, strict=True))
    return forward, np.sum(backward, axis=0)


def _seconds(phase: PhaseSeconds, device: ComputeDevice) -> FloatArray:
    """Seconds of each row by itself."""
    on_gpu = device.counted_as == "cuda"
    return np.maximum(phase.kernel, phase.launch) if on_gpu else phase.kernel + phase.launch


def _local(
    costs: GraphCosts, rows: Sequence[LocalRows], samples: int
) -> Iterator[tuple[NDArray[np.bool_], OpTable, OpRates]]:
    """Yield the rows whose ranks have as many samples each, a rank's work in each, and the rates at which it is done."""
    ops, work, parts = (
        np.concatenate([getattr(row, name) for row in rows]) for name in ("ops", "work", "parts")
    )
    traffic = ByteShares(*map(np.concatenate, zip(*(row.traffic for row in rows), strict=True)))
    for count in np.unique(parts).tolist():
        chosen = parts == count
        exact, of = costs.exact(samples // count), ops[chosen]
        yield (
            chosen,
            _shared(
                exact.at(samples // count).rows(of),
                exact.rates.rows(of).extra.accumulated_bytes,
                work[chosen] * count,
                ByteShares(*(each[chosen] for each in traffic)),
            ),
            exact.rates.rows(of),
        )


def _shared(whole: OpTable, sums: FloatArray, work: FloatArray, traffic: ByteShares) -> OpTable:
    """Return a rank's share of ``whole``; ``sums``: bytes of its weight half that add gradients."""
    return replace(
        whole,
        forward_flops=whole.forward_flops * work,
        backward_input_flops=whole.backward_input_flops * work,
        backward_weight_flops=whole.backward_weight_flops * work,
        forward_bytes=whole.forward_bytes * traffic.bytes,
        backward_input_bytes=whole.backward_input_bytes * traffic.bytes,
        backward_weight_bytes=(whole.backward_weight_bytes - sums) * traffic.weight_bytes
        + sums * traffic.sum_bytes,
        output_bytes=whole.output_bytes * traffic.bytes,
    )


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
    if target in ATTENTION:
        read[3:] = 0.0  # a mask is little beside the scores, which are split as queries, keys and values are
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


def splits_samples(
    specs: Sequence[TensorSpec], placements: Sequence[Placement], batch_symbol: sympy.Symbol
) -> bool:
    """Tell whether a dimension that samples are counted in is split. ``specs``: of what an op reads and makes."""
    return any(
        isinstance(placement, Shard) and _is_counted(spec.shape[placement.dim], batch_symbol)
        for spec, placement in zip(specs, placements, strict=True)
    )


def counts_samples(spec: TensorSpec, batch_symbol: sympy.Symbol) -> bool:
    """Tell whether samples are counted in a dimension of a tensor."""
    return any(_is_counted(dim, batch_symbol) for dim in spec.shape)


def _is_counted(dim: Dim, batch_symbol: sympy.Symbol) -> bool:
    return not isinstance(dim, int) and batch_symbol in dim.free_symbols


def traffic_of_parts(
    graph: OpGraph,
    node: fx.Node,
    specs: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
    symbols: Mapping[sympy.Symbol, int],
    shares: tuple[FloatArray, FloatArray],
    parts: IntArray,
) -> ByteShares:
    """Compute ``byte_shares`` of a rank's part of the samples. ``specs``, ``shares``: of tensors read, and of those made;
    ``parts``: [options] that samples are split in."""
    trained, samples = trained_operands(graph, node), symbols[graph.batch.batch_symbol]
    found = ByteShares(*(np.zeros(len(parts)) for _ in ByteShares._fields))
    whole = [[spec.size_bytes(symbols) for spec in side] for side in specs]
    for count in set(parts.tolist()):
        chosen = parts == count
        local, of_local = whole, [share[chosen] for share in shares]
        if count > 1:
            own = {**symbols, graph.batch.batch_symbol: samples // count}
            local = [[spec.size_bytes(own) for spec in side] for side in specs]
            for share, sizes, own_sizes in zip(of_local, whole, local, strict=True):
                share *= [size / max(part, 1) for size, part in zip(sizes, own_sizes, strict=True)]
        read, made = local
        part = byte_shares(node.target, read, made, of_local[0], of_local[1], trained)
        for into, each in zip(found, part, strict=True):
            into[chosen] = each
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
    last, batch = len(specs[0].shape) - 1, graph.batch.batch_symbol
    columns, rows, samples = (np.ones(len(needs)) for _ in range(3))
    parts = np.ones(len(needs), dtype=np.int64)
    for k, need in enumerate(needs):
        for own, size in zip(need, shape, strict=True):
            if isinstance(own.placement, Shard):
                (rows if own.placement.dim == last else samples)[k] /= size
                parts[k] *= size if _is_counted(specs[0].shape[own.placement.dim], batch) else 1
            elif isinstance(own.placement, Replicate) and own.partial_gradient:
                columns[k] /= size
    shares = (samples * rows, columns * rows, columns)[: len(specs)]
    parts = np.gcd(parts, symbols[batch])
    both = np.stack(shares, axis=1), (samples * columns)[:, None]
    traffic = traffic_of_parts(graph, layer, (specs, tensor_specs(layer)), symbols, both, parts)
    return LocalRows(np.full(len(needs), index), columns * rows * samples, traffic, parts)


def parts_of_sum(layers: Sequence[fx.Node], times: Sequence[int]) -> FloatArray:
    """Return the part of a bridge's sum that is given to each of ``layers``; each stands for so many (``times``)."""
    outputs = np.array([outputs_of(layer) for layer in layers], dtype=float)
    parts: FloatArray = outputs / float(outputs @ np.array(times))
    return parts


def local_cost(
    node: fx.Node,
    choices: Sequence[Choice],
    mesh: Mesh,
    symbols: Mapping[sympy.Symbol, int],
    cluster: ClusterSpec,
    *,
    differentiable: bool,
) -> tuple[float, float]:
    """(seconds, bytes that each rank sends) per micro-batch of one op's own collectives."""
    seconds = sent = 0.0
    for found in local_collectives(node, choices, mesh.shape, symbols):
        if found.phase == "backward" and not differentiable:
            continue
        seconds += joined_links(mesh, found.axes, cluster).seconds(found.kind, _whole_bytes(found, mesh))
        sent += _sent_bytes(found, mesh)
    return seconds, sent


def _ranks(found: LocalCollective, mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in found.axes)


def _whole_bytes(found: LocalCollective, mesh: Mesh) -> float:
    """The n of the formulas in ``cost_models.communication``."""
    return found.size_bytes * (1 if found.kind == "all_reduce" else _ranks(found, mesh))


def _sent_bytes(found: LocalCollective, mesh: Mesh) -> float:
    """Bytes that a rank sends of n bytes whole, by the volume of the bandwidth-optimal algorithm: (p−1)/p·n, twice for an
    all-reduce, a pth for an all-to-all."""
    ranks = _ranks(found, mesh)
    factor = {"all_reduce": 2.0, "all_gather": 1.0, "all_to_all": 1.0 / ranks}[found.kind]
    return factor * (ranks - 1) / ranks * _whole_bytes(found, mesh)
