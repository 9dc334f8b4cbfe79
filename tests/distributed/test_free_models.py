"""Free placements of real models by hand, planned and verified as anybody would, on four processes in float64.

Beside the numbers: what the placement is for. Only edges that cross carry traffic, an LSTM runs as a wavefront, branches
run side by side, unlike devices end together.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.plan_tasks import plan_task
from cost_models.cluster import ClusterSpec
from examples.alexnet import two_towers
from examples.locally_connected import LAYERS, locally_connected
from examples.lstm_seq2seq import lstm_seq2seq
from examples.mlp import mlp
from examples.moe import moe
from partitioner import Plan, partition
from partitioner.models.as_graph import as_graph
from partitioner.models.workload import Workload
from partitioner.record.rebuild import plan_code
from partitioner.verify.copies import workload_copy
from passes.copies.float64 import float64_by_default
from passes.graph.graph import OpGraph
from runtime.program.program import Forward
from runtime.ranks.launch import WorkerPool
from tests.distributed.free_tasks import count_sent


def machine(*speeds: float) -> ClusterSpec:
    """CPUs of so many MFLOP/s that even tiny models are worth dividing; messages are as good as free."""
    devices = [
        {
            "name": f"n{rank}",
            "count": 1,
            "device": {
                "kind": "cpu",
                "memory": "1GiB",
                "memory_bandwidth": 1e9 * speed,
                "flops": {"float64": 1e6 * speed},
            },
            "links": {"default": {"bandwidth": "10GB/s", "latency": 0.0}},
        }
        for rank, speed in enumerate(speeds)
    ]
    return ClusterSpec.from_dict({"nodes": devices, "network": {"bandwidth": "10GB/s", "latency": 0.0}})


def traced(workload: Workload) -> tuple[Workload, OpGraph]:
    """In float64 already, so that bytes are counted as they are sent."""
    double = workload_copy(workload, double=True)
    with float64_by_default():
        return double, as_graph(double)


def planned(
    graph: OpGraph,
    cluster: ClusterSpec,
    pins: Mapping[str, int],
    splits: Mapping[str, tuple[int, ...]] | None = None,
    **options: Any,
) -> Plan:
    """With ops as they are, but for ``splits``."""
    if splits is None:  # the first linear layer in one block: nothing is split then, by itself neither
        linear = graph.nodes["linear"]
        splits = {linear.name: (int(linear.meta["val"].shape[-1]),)}
    return partition(graph, cluster, strategy="free", pins=pins, splits=splits, **options)


def devices_of(plan: Plan) -> dict[str, int]:
    return {op: stage.devices[0] for stage in plan.stages for op in stage.ops}


CHANNELS, SIZE, WINDOW, BATCH, BYTES = 2, 26, 3, 4, 8


def test_only_edges_that_cross_between_stripes_carry_traffic(pool: WorkerPool) -> None:
    """Five locally connected layers, their columns in stripes on four machines: neighbours send each other the halo.

    Two stripes meet at column p of a layer's outputs and at column q of the next layer's. Left of that, windows read
    up to column q + WINDOW - 1, right of it from column q on: q + WINDOW - 1 - p columns are sent to the left and p - q to
    the right, their gradients the other way. In all that is WINDOW - 1 columns each way.
    """
    net, graph = traced(locally_connected(CHANNELS, SIZE, WINDOW, classes=3, batch=BATCH))
    pins = {f"*_[br]{rank}*": rank for rank in range(4)}  # blocks of ops, and what they read around their own
    above = dict.fromkeys(("*_whole", "flatten", "classify", "cross_entropy_loss"), 0)
    plan = planned(
        graph,
        machine(1, 1, 1, 1),
        pins | above,
        splits={"einsum": (6, 6, 6, 6)},
        batch_size=BATCH,
        microbatches=2,
        time_limit_seconds=2.0,  # pins leave little to search
    )
    report = plan.verify(net, pool=pool, graph=graph)
    report.raise_if_different()
    sent: dict[tuple[int, int], float] = {}
    for part in pool.run(count_sent, plan_task(plan, net, graph), world_size=4, timeout_seconds=60.0):
        sent |= part
    sides = [SIZE - (layer + 1) * (WINDOW - 1) for layer in range(LAYERS)]
    halo = sum((WINDOW - 1) * side for side in sides[:-1]) * CHANNELS * BATCH * BYTES
    expected = {(a, b): halo for a in range(4) for b in range(4) if abs(a - b) == 1}
    stripes = _widths(plan, graph)
    for rank in (1, 2, 3):  # the last layer's outputs go to the classifier on rank 0, their gradients back
        outputs = stripes[rank] * sides[-1] * CHANNELS * BATCH * BYTES
        for pair in ((rank, 0), (0, rank)):
            expected[pair] = expected.get(pair, 0) + outputs
    assert sent == expected
    assert plan.tied == (), "and nothing is summed over machines"
    assert plan.simulate().pair_bytes == pytest.approx(expected, rel=1e-12)


def _widths(plan: Plan, graph: OpGraph) -> list[int]:
    """Columns of the last layer's stripes: its weight's parts."""
    parts = plan_code(plan, graph).graph.parts.values()
    blocks = [part.block for part in parts if part.whole == f"layers.{LAYERS - 1}.weight"]
    return [block.shape[1] for block in sorted(blocks, key=lambda block: block.offsets)]


def test_an_lstm_with_a_layer_per_device_is_a_wavefront(pool: WorkerPool) -> None:
    """What a device receives and sends decides its segments: one per time step, and step t of a layer runs beside step
    t + 1 of the layer below."""
    layers, steps = 3, 3
    net, graph = traced(lstm_seq2seq(24, 8, layers, source_steps=steps, target_steps=steps, batch=2))
    pins = {f"{side}.cells.{layer}": layer for side in ("encoder", "decoder") for layer in range(layers)}
    pins |= {"source_embedding": 0, "target_embedding": 0, "project": 3, "cross_entropy_loss": 3}
    plan = planned(graph, machine(1, 1, 1, 1), pins, batch_size=2, microbatches=1)
    plan.verify(net, pool=pool, graph=graph).raise_if_different()
    runs = _forwards(plan)
    cells = [
        [runs[op.name] for op in graph.ops if op.meta["module_path"].endswith(f"cells.{layer}.of_input")]
        for layer in range(layers)
    ]
    assert [len(set(spans)) for spans in cells] == [2 * steps] * layers, "a segment per step"
    for below, here in pairwise(cells):
        for step in range(2 * steps - 1):
            (begin, end), (begin_below, end_below) = here[step], below[step + 1]
            assert max(begin, begin_below) < min(end, end_below), f"step {step} beside the next one below"


def _forwards(plan: Plan) -> dict[str, tuple[float, float]]:
    """Op -> (start, end) of its segment's forward of the first micro-batch, in simulated seconds."""
    return {
        op: (span.start_seconds, span.end_seconds)
        for spans in plan.simulate().timeline
        for span in spans
        if isinstance(span.instruction, Forward) and span.instruction.microbatch == 0
        for op in plan.stages[span.instruction.segment].ops
    }


def test_two_towers_on_two_devices_meet_where_they_were_made_to(pool: WorkerPool) -> None:
    """Convolution 3 reads both towers: one value each way. The dense layers, on two further devices, read both."""
    net, graph = traced(two_towers(classes=5, width=0.04, size=63, dropout=0.0))
    pins = {f"{half}.{tower}": tower for half in ("lower", "upper") for tower in range(2)}
    pins |= {"cat_2": 2, "flatten": 2, "classifier.[0-2]": 2, "classifier.[3-6]": 3, "cross_entropy_loss": 3}
    plan = planned(graph, machine(1, 1, 1, 1), pins, batch_size=4, microbatches=2)
    plan.verify(net, pool=pool, graph=graph).raise_if_different()
    between = [(t.source, t.target) for t in plan.transfers if {t.source, t.target} == {0, 1}]
    assert sorted(between) == [(0, 1), (1, 0)]
    spans = _forwards(plan)
    convolutions = [n.name for n in graph.ops if n.meta["module_path"] in ("lower.0.0", "lower.1.0")]
    (begin, end), (begin_other, end_other) = (spans[name] for name in convolutions)
    assert max(begin, begin_other) < min(end, end_other), "side by side"


def test_experts_on_devices_of_their_own(pool: WorkerPool) -> None:
    """Every expert gets the norm's output and its column of the gate, and gives one output back."""
    experts = 4
    net, graph = traced(moe(16, width=8, heads=2, hidden=24, blocks=2, experts=experts, seq=4))
    pins = {f"blocks.*.mixture.experts.{expert}": expert for expert in range(experts)}
    parts = ("attention_norm", "query", "key", "value", "out", "mixture_norm", "mixture.gate")
    rest = ["embedding", "norm", "project", *(f"blocks.*.{part}" for part in parts)]
    plan = planned(graph, machine(1, 1, 1, 1), pins | dict.fromkeys(rest, 0), batch_size=4, microbatches=2)
    plan.verify(net, pool=pool, graph=graph).raise_if_different()
    at = devices_of(plan)
    ups = [n.name for n in graph.ops if n.meta["module_path"].endswith(".up")]
    assert [at[name] for name in ups] == [0, 1, 2, 3] * 2
    spans = _forwards(plan)
    first = [spans[name] for name in ups[:experts]]
    assert max(begin for begin, _ in first) < min(end for _, end in first), "all at the same time"


@pytest.mark.matrix
def test_neurons_split_sixty_to_forty_for_unlike_devices(pool: WorkerPool) -> None:
    """A device that is 1.5 times as fast has 60 of 100 neurons of each pair: both work for as long. Found as well."""
    net, graph = traced(mlp(inputs=32, hidden=100, pairs=2, classes=4, batch=8))
    pins = {"*_b0": 0, "*_b1": 1, "*_sum": 0, "add*": 0, "classify": 0, "cross_entropy_loss": 0}
    plan = planned(
        graph,
        machine(1.5, 1.0),
        pins,
        splits={"linear": (60, 40), "linear_2": (60, 40)},
        batch_size=8,
        microbatches=2,
    )
    plan.verify(net, pool=pool, graph=graph).raise_if_different()
    shapes = {name: part.block.shape for name, part in plan_code(plan, graph).graph.parts.items()}
    assert shapes["pairs.0.up.weight#0"] == (60, 32)
    assert shapes["pairs.0.up.weight#1"] == (40, 32)
    assert shapes["pairs.1.down.weight#0"] == (32, 60)
    seconds = {stage.devices[0]: 0.0 for stage in plan.stages}
    for stage in plan.stages:
        seconds[stage.devices[0]] += stage.forward_seconds
    assert seconds[0] == pytest.approx(seconds[1], rel=0.06)  # rank 0 has the small classifier besides
    found = partition(graph, machine(1.5, 1.0), strategy="free", batch_size=8, microbatches=2)
    assert {(split.op, split.sizes) for split in found.splits} >= {
        ("linear", (60, 40)),
        ("linear_2", (60, 40)),
    }
    layers = partition(graph, machine(1.5, 1.0), batch_size=8, microbatches=2, strategy="layer")
    assert found.prediction.step_seconds < 0.9 * layers.prediction.step_seconds
    found.verify(net, pool=pool, graph=graph).raise_if_different()
