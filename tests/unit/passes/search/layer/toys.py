"""A small hand-made graph, costs and cluster for the layer-wise search, and a judge that simulates them plainly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import sympy
import torch
from torch import fx

from cost_models.compute import OpSeconds
from cost_models.devices import EFFICIENCY_NAMES, Device, Rates
from cost_models.links import Path
from passes.graph.graph import GraphInput, GraphOutput, OpGraph, StateSpec
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.search.infeasible import overflow_bytes
from passes.search.judge import Judge, Simulated
from runtime.program.program import (
    Backward,
    BackwardInput,
    Forward,
    Segment,
    SegmentCost,
    SegmentGraph,
    Value,
)
from runtime.schedules import SCHEDULES
from runtime.segment.code import BatchSpec

aten = torch.ops.aten


def toy_graph(blocks: int, width: int = 8, towers: int = 1, tied: bool = False) -> OpGraph:
    """``towers`` chains of ``blocks`` (linear, relu) pairs over one input, added up into a loss."""
    graph = fx.Graph()
    inputs, parameters = [], {}
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, width)
    inputs.append(GraphInput("x", "batch", "x"))
    ends = []
    weights: list[tuple[str, fx.Node]] = []
    for tower in range(towers):
        for block in range(blocks):
            shared = tied and block == blocks - 1
            name = f"towers.{tower}.layers.{0 if shared else block}.weight"
            if not shared:
                node = graph.placeholder(name.replace(".", "_"))
                node.meta["val"] = torch.empty(width, width, requires_grad=True)
                inputs.append(GraphInput(node.name, "parameter", name))
                parameters[name] = StateSpec(name, (width, width), torch.float32, True)
                weights.append((name, node))
    by_name = dict(weights)
    for tower in range(towers):
        value = x
        for block in range(blocks):
            path = f"towers.{tower}.layers.{block}"
            weight = by_name.get(f"{path}.weight", by_name[f"towers.{tower}.layers.0.weight"])
            value = _op(graph, aten.linear.default, (value, weight), path, width)
            value = _op(graph, aten.relu.default, (value,), path, width)
        ends.append(value)
    total = ends[0]
    for end in ends[1:]:
        total = _op(graph, aten.add.Tensor, (total, end), "", width)
    loss = _op(graph, aten.sum.default, (total,), "", 0)
    graph.output((loss,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    return OpGraph(
        module=module,
        inputs=tuple(inputs),
        outputs=(GraphOutput(loss.name, "loss", "loss"),),
        parameters=parameters,
        buffers={},
        aliases={},
        constants={},
        batch=BatchSpec({"x": 0}, sympy.Symbol("s"), {sympy.Symbol("s"): ("x", 0)}),
        example_batch_size=2,
        example_shapes={"x": (2, width)},
        training=True,
        model_name="toy",
        fingerprint="toy",
    )


def _op(graph: fx.Graph, target: object, args: tuple[fx.Node, ...], path: str, width: int) -> fx.Node:
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta["val"] = torch.empty((2, width) if width else (), requires_grad=True)
    node.meta["module_path"] = path
    return node


@dataclass(frozen=True, eq=False)
class ToyTable:
    output_bytes: np.ndarray
    backward_peak_bytes: np.ndarray


@dataclass(frozen=True, eq=False)
class ToyCosts:
    """Linear ops take a second per sample at 1 FLOP/s, others a hundredth; backward twice the forward.

    Every op saves its result: ``value_bytes`` per sample. A backward writes its operand's gradient over its result's.
    """

    graph: OpGraph
    value_bytes: int = 100
    seconds_of: Mapping[str, float] | None = None

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.graph.ops)

    @property
    def saved(self) -> tuple[tuple[str, ...], ...]:
        return tuple((name,) for name in self.ops)

    @property
    def output_storages(self) -> tuple[tuple[str | None, ...], ...]:
        return tuple((name,) for name in self.ops)

    @property
    def multiplies(self) -> tuple[bool, ...]:
        return (False,) * len(self.ops)

    @property
    def weight_half(self) -> tuple[bool, ...]:
        return tuple(node.target is aten.linear.default for node in self.graph.ops)

    @property
    def reads(self) -> tuple[tuple[tuple[int, str | None], ...], ...]:
        index = {name: i for i, name in enumerate(self.ops)}
        return tuple(
            tuple((index[s.name], s.name) for s in node.all_input_nodes if s.name in index)
            for node in self.graph.ops
        )

    @property
    def maker(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.ops)}

    def at(self, batch_size: int) -> ToyTable:
        ops = len(self.ops)
        return ToyTable(np.full(ops, float(batch_size * self.value_bytes)), np.zeros(ops))

    def exact(self, batch_size: int) -> ToyCosts:
        return self

    def storage_bytes(self, batch_size: int) -> dict[str, int]:
        return dict.fromkeys(self.ops, batch_size * self.value_bytes)

    def seconds(self, batch_size: int, device: Device) -> OpSeconds:
        each = np.array(
            [
                (self.seconds_of or {}).get(node.name, 1.0 if node.target is aten.linear.default else 0.01)
                for node in self.graph.ops
            ]
        )
        forward = each * batch_size / device.flops_per_second["float32"]
        return OpSeconds(forward, forward.copy(), forward.copy())


@dataclass(frozen=True, eq=False)
class ToyCluster:
    """Devices of given speeds and memories, one kind of link."""

    devices: tuple[Device, ...]
    bandwidth: float = 1e6
    latency: float = 1e-3

    @property
    def ranks_per_node(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(len(self.devices))),)

    def path(self, a: int, b: int) -> Path:
        return Path((), self.bandwidth, self.latency) if a != b else Path((), float("inf"), 0.0)


def toy_cluster(speeds: Sequence[float], memory_bytes: Sequence[int], bandwidth: float = 1e6) -> ToyCluster:
    """A cluster of CPU devices; ``speeds`` in FLOP/s."""
    ones = Rates(dict.fromkeys(EFFICIENCY_NAMES, 1.0))
    devices = tuple(
        Device(
            r, 0, "node", None, f"toy{speed:g}", "cpu", memory, 1e9, Rates({"float32": speed}), 0.0, 0.0, ones
        )
        for r, (speed, memory) in enumerate(zip(speeds, memory_bytes, strict=True))
    )
    return ToyCluster(devices, bandwidth)


class ToyJudge(Judge):
    """Runs a schedule's instruction lists on a clock: each waits for its rank and for the stages it depends on.

    Its own quick bound rules nothing out.
    """

    costs: ToyCosts  # type: ignore[assignment]
    cluster: ToyCluster  # type: ignore[assignment]

    def __init__(
        self,
        graph: OpGraph,
        costs: ToyCosts,
        cluster: ToyCluster,
        batch_size: int,
        memory_factor: float = 1.0,
    ) -> None:
        super().__init__(graph, costs, cluster, Job(batch_size))  # type: ignore[arg-type]
        self.memory_factor = memory_factor

    def lower_bound_seconds(self, candidate: Candidate) -> float:
        return 0.0

    def measure(self, candidate: Candidate) -> Simulated:
        size = -(-self.job.batch_size // candidate.microbatches)
        p = len(candidate.ranks)
        segments = []
        state = [0.0] * len(self.cluster.devices)
        gradient = [0.0] * len(self.cluster.devices)
        for stage, rank in enumerate(candidate.ranks):
            s = self.costs.seconds(size, self.cluster.devices[rank])
            mine = [i for i, name in enumerate(self.costs.ops) if candidate.stage_of.get(name) == stage]
            state[rank] += self._held(candidate, stage) * size * self.costs.value_bytes
            gradient[rank] = size * self.costs.value_bytes
            segments.append(
                Segment(
                    stage,
                    (rank,),
                    SegmentCost(
                        *(float(x[mine].sum()) for x in (s.forward, s.backward_input, s.backward_weight))
                    ),
                )
            )
        values = tuple(Value(f"v{s}", s, (s + 1,), 1, True) for s in range(p - 1))
        plan = SegmentGraph(tuple(segments), values, len(self.cluster.devices))
        orders = SCHEDULES[candidate.schedule].order(plan, candidate.microbatches)
        held = map(sum, zip(state, gradient, strict=True))
        peak = [int(self.memory_factor * (x + self._state(candidate, r))) for r, x in enumerate(held)]
        over = overflow_bytes(peak, self.cluster.devices)
        return Simulated(candidate, _clock(plan, orders), peak, over)

    def _held(self, candidate: Candidate, stage: int) -> int:
        """Results held at once by the stage: ops times micro-batches in flight."""
        schedule, p = SCHEDULES[candidate.schedule], len(candidate.ranks)
        devices = len(set(candidate.ranks))
        chunks = p // devices
        place = schedule.positions(p, devices)[stage]
        chunk = schedule.stages_at(place, p, devices).index(stage)
        in_flight = schedule.in_flight(place, devices, chunks, candidate.microbatches)[chunk]
        return sum(s == stage for s in candidate.stage_of.values()) * in_flight

    def _state(self, candidate: Candidate, rank: int) -> float:
        stages = {s for s, r in enumerate(candidate.ranks) if r == rank}
        users = [
            node
            for node in self.graph.ops
            if candidate.stage_of[node.name] in stages and node.target is aten.linear.default
        ]
        return 16.0 * 64 * len({str(node.args[1]) for node in users})


def _clock(plan: SegmentGraph, orders: Sequence[Sequence[object]]) -> float:
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * len(orders)
    todo = [list(order) for order in orders]
    last = len(plan.segments) - 1
    while any(todo):
        moved = False
        for rank, queue in enumerate(todo):
            while queue:
                i = queue[0]
                s, m = i.segment, i.microbatch  # type: ignore[attr-defined]
                cost = plan.segments[s].cost
                if isinstance(i, Forward):
                    needs, key, seconds = ([("F", s - 1, m)] if s else []), "F", cost.forward_seconds
                elif isinstance(i, Backward):
                    needs, key, seconds = [("F", s, m)], "B", cost.backward_seconds
                    needs += [("B", s + 1, m)] if s < last else []
                elif isinstance(i, BackwardInput):
                    needs, key, seconds = [("F", s, m)], "B", cost.backward_input_seconds
                    needs += [("B", s + 1, m)] if s < last else []
                else:
                    needs, key, seconds = [("B", s, m)], "W", cost.backward_weight_seconds
                if any(need not in done for need in needs):
                    break
                free[rank] = max([free[rank], *(done[need] for need in needs)]) + seconds
                done[key, s, m] = free[rank]
                queue.pop(0)
                moved = True
        assert moved, "the schedule deadlocks"
    return max(free)
