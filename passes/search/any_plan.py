"""Lower bound on the step of any plan, whatever the strategy: the one that every certificate carries.

A plan may run an op whole, on shards of a mesh, in blocks of neurons, again in backward, in any number of micro-batches,
and beside any bridges. What all of them share, and the proof:

    parts     Whatever the plan, every multiplication of an op is done by some rank, and what a memory-bound op reads and
              writes is read and written by some rank: the parts' FLOPs W_r and bytes Q_r add up to the op's, or to more.
              (``OpWork`` of parts that rules allow is tested against the whole op's in ``benchmarks.bound_check``.)
    kernels   A part takes max(W_r / R, Q_r / B) at least: rates R and B are the device's fastest for the op's data type.
              Of a measured cost, which need not be proportional, the least seconds per FLOP and per byte of any size count.
              Both are proportional, so that the sum over parts is at least what the sums of W_r and of Q_r take.
    launches  Some rank launches the op, once per micro-batch, forward and backward.
    busy      A rank is busy for Σ over segments of max(Σ kernels, Σ launches) on a GPU, Σ (kernels + launches) on a CPU,
              and then steps its part of the optimizer; the sums over segments are at least max(Σ kernels, Σ launches) and
              Σ kernels + Σ launches. The step is at least any weighted mean of the ranks' busy times, Σ λ_d = 1:

                  step ≥ Σ_u max(W_u · min_d λ_d / R_d(u), Q_u · min_d λ_d / B_d) + optimizer          (kernels)
                  step ≥ Σ_u min_d λ_d · launch_d                                                      (launches)

              forward and backward each by the larger of the two.
    chain     One micro-batch runs the longest path of ops into the loss and a longest path of gradients back. Parts of one
              op run at the same time, the ops of a path do not: step ≥ launches along the path.

Micro-batches of ⌈B/m⌉ samples, the last ones shorter in proportion, come to B/⌈B/m⌉ full ones, whatever m is: as the
simulator charges them (``simulate_step``). Work that grows faster than the samples takes less in a shorter micro-batch than
that; this is a bound on simulated steps. It is the least over all m. Links, memory, the order of work, what is computed
twice: nothing of it is counted, all of it adds.

Not counted, because a part may do without it: views and what may become one on a part (``reshape`` of one sample), traffic
of products (their operands may be copied first, or not), sums of gradients (readers of one bridge share theirs), ops that
every segment computes again, ops of unknown cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cost_models.arrays import FloatArray
from cost_models.cluster import ClusterSpec
from cost_models.compute import class_peak_flops
from cost_models.devices import Device
from cost_models.memory import OPTIMIZERS, state_bytes
from cost_models.op_profile import ARITHMETIC, VIEW, CostCurve, CostLine, OpTimes
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.lower.job import Job
from passes.search.bound import longest_into

_MAY_BE_VIEWS = frozenset(
    {
        "reshape", "contiguous", "flatten", "clone", "expand", "expand_as", "to", "_to_copy", "view_as",
        "repeat", "tile", "repeat_interleave", "cat", "stack", "split", "chunk", "index", "slice", "select", "pad",
        "constant_pad_nd", "roll", "einsum", "broadcast_to", "movedim", "unflatten", "detach", "lift_fresh_copy",
    }
)  # fmt: skip
"""Ops whose part may be a view where the whole is a copy, or reads less than its share of the whole's operands."""

OPTIMIZER = "optimizer "
"""Prefix of the kinds of measured optimizer steps."""

_BACKWARD_OF_ATTENTION = 0.8
"""Share of a fused attention's backward that the plain one does: four products instead of five."""


@dataclass(frozen=True, eq=False)
class _FastestRates:
    """The fastest that one device does anything, in seconds; 0 where nothing is known."""

    per_flop: FloatArray
    """[ops]"""
    per_byte: float
    launch: float
    adds: bool
    """True if launching and running do not overlap."""
    optimizer: float
    """Seconds to step all parameters."""


def any_plan_bound(graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, job: Job) -> float:
    """Lower bound on the simulated step of any plan of it on this cluster; the proof is the module's."""
    ops = _Ops.of(graph, costs)
    kinds: dict[Device, int] = {}
    for device in cluster.devices:
        like = device.speed_alone
        kinds[like] = kinds.get(like, 0) + 1
    rates = [_rates(graph, costs, job, device) for device in kinds]
    counts = np.array(list(kinds.values()), dtype=np.float64)
    chain = (ops.forward_path + ops.backward_path) * min(r.launch for r in rates)
    batch = job.batch_size
    sizes = {-(-batch // m) for m in range(1, batch + 1)}
    return float(min(max(chain, ops.shared(size, batch / size, rates, counts)) for size in sizes)) * (
        1 - 1e-9
    )


def counted_work(graph: OpGraph, costs: GraphCosts, size: int) -> dict[str, tuple[float, float]]:
    """Op -> the (FLOPs, bytes) that the bound counts for ``size`` samples, forward and backward."""
    ops = _Ops.of(graph, costs, size)
    (forward, backward), (read, gradient) = ops.work(size)
    flops, moved = (forward + backward).tolist(), (read + gradient).tolist()
    return dict(zip(costs.ops, zip(flops, moved, strict=True), strict=True))


@dataclass(frozen=True, eq=False)
class _Ops:
    """Work that is counted of each op. Arrays of shape [ops]."""

    costs: GraphCosts
    products: FloatArray
    """1 for ops whose FLOPs are counted: products and attention."""
    attention: FloatArray
    moving: FloatArray
    """1 for ops whose bytes are counted."""
    forward_path: int
    """Ops on the longest path to the loss, of those that are launched."""
    backward_path: int

    @staticmethod
    def of(graph: OpGraph, costs: GraphCosts, size: int = 1) -> _Ops:
        """Choose what is counted. ``size``: a micro-batch that the costs know."""
        table = costs.at(size)
        skipped = recomputed_ops(graph) | set(costs.estimated)
        classes = [costs.op_class(index) for index in range(len(costs.ops))]
        views = [
            any(storage is None for storage in outputs) or shared
            for outputs, shared in zip(costs.output_storages, _shared_storages(costs), strict=True)
        ]
        counted = np.array(
            [
                node.name not in skipped and not view and _name(node.target) not in _MAY_BE_VIEWS
                for node, view in zip(graph.ops, views, strict=True)
            ],
            dtype=np.float64,
        )
        arithmetic = np.array([op_class != "memory" for op_class in classes])
        launched = counted * (table.forward_launches > 0)
        index = {node.name: i for i, node in enumerate(graph.ops)}
        readers = tuple(tuple(index[u.name] for u in node.users if u.name in index) for node in graph.ops)
        passes = [node.name in graph.needs_grad for node in graph.ops]
        back = tuple(tuple(v for v in own if passes[v]) if passes[u] else () for u, own in enumerate(readers))
        returns = counted * passes * (table.backward_input_launches > 0)
        forward_path = backward_path = 0.0
        if graph.loss in index:
            loss = index[graph.loss]
            forward_path = longest_into(readers, launched)[loss] + launched[loss]
            backward_path = float((_longest_back(back, returns)).max(initial=0.0))
        return _Ops(
            costs,
            counted * arithmetic,
            np.array([op_class == "attention" for op_class in classes], dtype=np.float64),
            counted * ~arithmetic,
            int(forward_path),
            int(backward_path),
        )

    def work(self, size: int) -> tuple[tuple[FloatArray, FloatArray], tuple[FloatArray, FloatArray]]:
        """(forward, backward) FLOPs and (forward, backward) bytes of a micro-batch of ``size`` samples."""
        table = self.costs.at(size)
        spared = 1.0 - self.attention * (1.0 - _BACKWARD_OF_ATTENTION)
        backward = table.backward_input_flops + table.backward_weight_flops
        flops = (table.forward_flops * self.products, backward * self.products * spared)
        extra = self.costs.exact(size).rates.extra
        summed = 3 * extra.fan_out * table.output_bytes + extra.accumulated_bytes
        moved = (
            table.forward_bytes * self.moving,
            (table.backward_input_bytes + table.backward_weight_bytes - summed) * self.moving,
        )
        return flops, moved

    def shared(self, size: int, times: float, rates: Sequence[_FastestRates], counts: FloatArray) -> float:
        """Seconds of ``times`` micro-batches of ``size`` samples and the optimizer, shared without loss by all devices."""
        table = self.costs.at(size)
        flops, moved = self.work(size)
        counted = np.maximum(self.moving, self.products)
        launched = (
            counted * (table.forward_launches > 0),
            counted * (table.backward_input_launches + table.backward_weight_launches > 0),
        )
        alone = np.array(
            [
                sum(float(np.maximum(w * r.per_flop, q * r.per_byte).sum()) for w, q in zip(flops, moved, strict=True))
                + sum(float(n.sum()) * r.launch for n in launched)
                for r in rates
            ]
        )  # fmt: skip
        best = 0.0
        for weights in (np.ones(len(rates)), 1.0 / np.maximum(alone, alone.max(initial=0.0) * 1e-6 + 1e-30)):
            weights = weights / (weights * counts).sum()
            per_flop = np.min([w * r.per_flop for w, r in zip(weights, rates, strict=True)], axis=0)
            per_byte = min(w * r.per_byte for w, r in zip(weights, rates, strict=True))
            launch = min(w * r.launch for w, r in zip(weights, rates, strict=True))
            step = min(w * r.optimizer for w, r in zip(weights, rates, strict=True))
            total = 0.0
            for w, q, n in zip(flops, moved, launched, strict=True):
                kernels = float(np.maximum(w * per_flop, q * per_byte).sum())
                launches = float(n.sum()) * launch
                adds = all(r.adds for r in rates)
                total += kernels + launches if adds else max(kernels, launches)
            best = max(best, times * total + step)
        return best


def _shared_storages(costs: GraphCosts) -> list[bool]:
    """Per op: whether any of its outputs is a storage that another op makes."""
    return [
        any(costs.maker.get(storage, index) != index for storage in outputs if storage is not None)
        for index, outputs in enumerate(costs.output_storages)
    ]


def _longest_back(back: tuple[tuple[int, ...], ...], launched: FloatArray) -> FloatArray:
    """[ops] the most launches on a way of gradients from the loss back to each op, its own included."""
    longest = np.zeros(len(back))
    for u in range(len(back) - 1, -1, -1):
        longest[u] = launched[u] + max((longest[v] for v in back[u]), default=0.0)
    return longest


def _name(target: object) -> str:
    """The op's name without its overload: "add" for ``aten.add.Tensor``."""
    return target._schema.name.rpartition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""


def _rates(graph: OpGraph, costs: GraphCosts, job: Job, device: Device) -> _FastestRates:
    """Find the fastest rates of a device."""
    signatures = costs.rates.signature_of
    times = device.op_times
    total = state_bytes(
        [
            (spec.elements, graph.types_of(name, job.precision), True)
            for name, spec in graph.parameters.items()
            if name in graph.trained
        ],
        job.optimizer,
    )
    state = total.optimizer_state - OPTIMIZERS[job.optimizer].step_bytes * len(graph.trained)
    bandwidth = device.memory_bandwidth_bytes_per_second * device.efficiency["memory"]
    optimizer = (3 * total.trained + 2 * state) / bandwidth
    if times is not None and isinstance(known := times.get(OPTIMIZER + job.optimizer, "forward"), CostLine):
        optimizer = total.trained * known.seconds_per_byte
    bounds = costs.rates.bounds
    arithmetic = max(
        device.efficiency[name] for name in ("matmul", "attention", "attention_backward", "conv", "vector")
    )
    per_flop = np.zeros(len(bounds))
    least = None if times is None or not times.covers_ops else _least(times)
    for number, (dtype, op_class) in enumerate(bounds):
        if op_class == "memory":
            continue
        if least is None:
            peak = class_peak_flops(device, dtype, op_class)
            per_flop[number] = costs.rates.shares[number] / (peak * arithmetic)
        else:
            per_flop[number] = least.per_flop * device.peak_flops(torch.float32) / device.peak_flops(dtype)
    if least is None:
        adds = device.counted_as != "cuda"
        return _FastestRates(
            per_flop[signatures], 1.0 / bandwidth, device.launch_overhead_seconds, adds, optimizer
        )
    return _FastestRates(per_flop[signatures], least.per_byte, least.overhead, False, optimizer)


@dataclass(frozen=True)
class _LeastCosts:
    """The least that any measured kind of op costs."""

    per_flop: float
    per_byte: float
    overhead: float


def _least(times: OpTimes) -> _LeastCosts:
    """The least seconds per FLOP and byte of any size and kind, and the least seconds of anything.

    A curve is a power of the bytes between two points, so seconds per byte are least at a point; so are seconds.
    """
    kinds = {kind for (kind, _), _ in times.costs}
    lines = [cost for (kind, _), cost in times.costs if kind in ARITHMETIC and isinstance(cost, CostLine)]
    points = [
        point
        for (kind, _), cost in times.costs
        if kind != VIEW and isinstance(cost, CostCurve)
        for point in cost.points
    ]
    overheads = [
        cost.overhead_seconds if isinstance(cost, CostLine) else min(seconds for _, seconds in cost.points)
        for (kind, _), cost in times.costs
        if not kind.startswith(OPTIMIZER)
    ]
    # A part may be a kind that was not measured, of which FLOPs are not charged.
    per_flop = min(cost.seconds_per_flop for cost in lines) if kinds >= ARITHMETIC else 0.0
    per_byte = min((seconds / moved for moved, seconds in points), default=0.0)
    return _LeastCosts(per_flop, per_byte, min(overheads, default=0.0))
