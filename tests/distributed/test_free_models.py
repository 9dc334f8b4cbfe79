"""Free placements of real models by hand, planned and verified as anybody would, on four processes in float64.

Beside the numbers: what the placement is for. Only edges that cross carry traffic, an LSTM runs as a wavefront, branches
run side by side, unlike devices end together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cost_models.cluster import ClusterSpec
from examples.locally_connected import LAYERS, locally_connected
from partitioner import Plan, partition
from partitioner.api import as_graph
from partitioner.verify import double_copy
from partitioner.workloads import Workload
from passes.double import float64_by_default
from passes.graph import OpGraph
from runtime.launch import WorkerPool
from tests.distributed.free_tasks import count_sent, plan_task


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
    double = double_copy(workload)
    with float64_by_default():
        return double, as_graph(double)


def planned(graph: OpGraph, cluster: ClusterSpec, pins: Mapping[str, int], **options: Any) -> Plan:
    return partition(graph, cluster, strategy="free", pins=pins, time_limit_seconds=5.0, **options)


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
    assert plan.simulate().pair_bytes == pytest.approx(expected, rel=1e-12)


def _widths(plan: Plan, graph: OpGraph) -> list[int]:
    """Columns of the last layer's stripes: its weight's parts."""
    from partitioner.rebuild import plan_code

    parts = plan_code(plan, graph).graph.parts.values()
    blocks = [part.block for part in parts if part.whole == f"layers.{LAYERS - 1}.weight"]
    return [block.shape[1] for block in sorted(blocks, key=lambda block: block.offsets)]
