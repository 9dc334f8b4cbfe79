"""What the search charges for an op is what the graph that ranks run says of it; the same of a step, and of memory."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from cost_models.cluster import ClusterSpec
from cost_models.op_profile import PHASES, Cost, CostCurve, CostLine, OpTimes, Phase
from cost_models.spec.rates import MeasuredRates
from cost_models.spec.sections import HostSpec
from partitioner.models.as_graph import as_graph
from partitioner.models.bundled import bundled
from passes.costs.costs import cost_graph, costs_of
from passes.graph.blocks import block_of, regions_of
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.lower.realize import realize
from passes.search.feature.evaluate import WholeGraph
from passes.search.feature.place import FeatureRequest, FeatureResult, place_features
from passes.search.feature.provider import sharded_candidate
from passes.search.feature.setting import Setting
from passes.shard.shard import shard_graph
from passes.trace.trace import trace
from tests.distributed.sharded_models import Conv, conv_batch
from tests.support.matrix import thinned

JOB = Job(64)


@cache
def graph_of(name: str) -> OpGraph:
    if name == "conv":
        return trace(Conv().double(), conv_batch(4), loss_reduction="mean")
    workload = bundled(name, size="tiny", seq=0 if name == "vit" else 32)
    return as_graph(workload)


def roofline() -> ClusterSpec:
    device = {
        "kind": "cpu",
        "memory": "8GiB",
        "memory_bandwidth": 1e10,
        "flops": {"float32": 5e10, "float64": 5e10},
    }
    links = {"default": {"bandwidth": "20GB/s", "latency": "1us"}}
    return ClusterSpec.from_dict({"nodes": [{"name": "n", "count": 4, "device": device, "links": links}]})


def calibrated() -> ClusterSpec:
    """Overheads, curves and lines as a calibration finds them. Nothing is hidden: the search takes what computes least."""
    curve = CostCurve(((1e3, 4e-6), (1e6, 1e-4), (1e8, 2e-2)))
    kinds = ("linear", "matmul", "conv2d", "scaled_dot_product_attention")
    lines: dict[tuple[str, Phase], Cost] = {
        (kind, phase): CostLine(1e-5, 2e-11, 1e-10 * (1 + number))
        for number, kind in enumerate(kinds)
        for phase in PHASES
    }
    curves: dict[tuple[str, Phase], Cost] = {
        ("elementwise", "forward"): curve,
        ("view", "forward"): CostCurve(((1.0, 1e-6),)),
    }
    times = OpTimes(tuple(sorted({**lines, **curves}.items(), key=lambda item: item[0])))
    rates = MeasuredRates(op_times=times, host_costs=HostSpec(contention=100.0))
    return roofline().with_device_rates(rates, "calibration of a test")


def planned(
    graph: OpGraph,
    machine: ClusterSpec,
    pins: dict[str, str],
    mesh: tuple[int, ...],
    blocks: tuple[str, ...] = (),
) -> FeatureResult:
    request = FeatureRequest(JOB, microbatches=1, pins=pins, mesh=mesh)
    return place_features(graph, costs_of(graph, machine), machine, request, again=regions_of(graph, blocks))


MACHINES = {"roofline": roofline, "calibrated": calibrated}
PLACED = {
    "data": ((4,), "data"),
    "data and column row": ((2, 2), "data column_row"),
    "searched": ((2, 2), ""),
}


@pytest.mark.parametrize(
    ("name", "how", "machine"),
    thinned(
        itertools.product(["gpt2", "bert", "vit", "conv"], PLACED, MACHINES),
        [
            ("gpt2", "data and column row", "calibrated"),
            ("bert", "data", "roofline"),
            ("conv", "data", "roofline"),
            ("conv", "searched", "calibrated"),
        ],
    ),
)
def test_ops_cost_what_the_local_graph_says(name: str, how: str, machine: str) -> None:
    mesh, pins = PLACED[how]
    if name == "conv" and "column_row" in pins:
        pins = ""  # what it groups does not divide
    graph, devices = graph_of(name), MACHINES[machine]()
    found = planned(graph, devices, {"*": pins} if pins else {}, mesh)
    placement = found.placement
    sharded = shard_graph(graph, placement)
    setting = Setting(devices, JOB)
    whole = costs_of(graph, devices)
    searched = WholeGraph(graph, whole, placement, setting).ops()[0]
    units = JOB.batch_size // sharded.graph.batch.multiple
    costs = cost_graph(sharded.graph, only_size=units)
    phases = costs.phases(units, devices.devices[0])
    local: dict[str, float] = defaultdict(float)
    for op, seconds in zip(costs.ops, np.sum([p.kernel + p.launch for p in phases], axis=0), strict=True):
        local[op.partition("__")[0]] += seconds  # gradients that meet at a bridge are summed there
    total = sum(searched.values())
    # Shards of queries, keys and values may lie in one piece where the whole ones are copied, 2% of this GPT-2's time.
    assert sum(local.values()) == pytest.approx(total, rel=0.025)
    assert sum(abs(local[op] - searched[op]) for op in searched) <= 0.03 * total

    realized = realize(graph, whole, devices, JOB, sharded_candidate(graph, placement))
    assert realized.simulation.step_seconds == pytest.approx(found.cost.seconds, rel=0.03)
    peak = max(realized.simulation.peak_bytes)
    assert 0.98 * peak <= found.cost.memory_bytes <= 1.5 * peak


@pytest.mark.parametrize("contention", [1.0, 2.0])
@pytest.mark.parametrize("name", thinned(["gpt2", "bert", "llama-8b"], ["llama-8b"]))
def test_search_and_step_hide_the_same_sums(name: str, contention: float) -> None:
    """Of input gradients, beside weight gradients: the search's part and the step's, with and without."""
    graph = graph_of(name)
    rates = MeasuredRates(op_times=None, host_costs=HostSpec(contention=contention))
    devices = roofline().with_device_rates(rates, "made up")
    placement = planned(graph, devices, {"*": "column_row"}, (4,)).placement
    whole = WholeGraph(graph, costs_of(graph, devices), placement, Setting(devices, JOB))
    together, apart = (
        realize(graph, costs_of(graph, devices), devices, JOB, replace(candidate, schedule=schedule))
        .meshes[0]
        .segment.cost
        for candidate in [sharded_candidate(graph, placement)]
        for schedule in ("1f1b", "zb-h1")
    )
    hidden = whole.hidden_seconds()
    # Schedules that split backward make gradients of norms' weights with those of inputs.
    backward = [own.backward_input_seconds + own.backward_weight_seconds for own in (together, apart)]
    of_step = backward[1] - backward[0]
    if name == "bert":  # what its layers read is added to what they make: a reader that needs it otherwise
        assert 0 < hidden < of_step
    else:
        assert hidden == pytest.approx(of_step, rel=0.02)
        assert hidden > 0


AGAIN = {**PLACED, "zero 3": ((4,), "zero3"), "sequence": ((4,), "sequence")}


@pytest.mark.parametrize(
    ("name", "how"),
    thinned(
        [
            pair
            for pair in itertools.product(["gpt2", "bert", "vit"], AGAIN)
            if pair != ("vit", "sequence")  # its 197 positions are not divided
        ],
        [
            ("gpt2", "zero 3"),
            ("gpt2", "sequence"),
            ("gpt2", "searched"),
            ("bert", "data"),
            ("vit", "searched"),
        ],
    ),
)
def test_blocks_computed_again_cost_what_the_local_graph_says(name: str, how: str) -> None:
    """The objective is added up by the search itself (``check_agreement``); here against the step's simulation."""
    mesh, pins = AGAIN[how]
    graph, devices = graph_of(name), roofline()
    blocks = tuple(dict.fromkeys(block_of(graph).values()))
    kept = planned(graph, devices, {"*": pins} if pins else {}, mesh)
    found = planned(graph, devices, {"*": pins} if pins else {}, mesh, blocks)
    assert found.cost.seconds > 1.1 * kept.cost.seconds
    assert found.cost.memory_bytes < kept.cost.memory_bytes
    assert "computed again" in found.proof.space
    step, peak = [], []
    for placement, own in ((kept.placement, ()), (found.placement, blocks)):
        candidate = sharded_candidate(graph, placement, own)
        simulation = realize(graph, costs_of(graph, devices), devices, JOB, candidate).simulation
        step.append(simulation.step_seconds)
        peak.append(max(simulation.peak_bytes))
    if how == "zero 3":  # the first gathers of each kind count as beside nothing: half of those of two blocks
        assert step[1] <= found.cost.seconds * 1.001
        assert found.cost.seconds <= 1.15 * step[1]
    else:
        assert found.cost.seconds == pytest.approx(step[1], rel=0.03)
    assert peak[1] < peak[0]
    # The simulation takes an exchange's buffer to be as large as what all ranks have of it together.
    assert 0.94 * peak[1] <= found.cost.memory_bytes <= 1.6 * peak[1]
