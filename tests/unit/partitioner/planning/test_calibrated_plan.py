"""A plan made with a calibration predicts with it, and simulates to the same step wherever it is loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cost_models.cluster import ClusterSpec
from cost_models.measure.cases import worker_cases
from cost_models.op_profile import CostCurve, CostLine, OpTimes
from cost_models.spec.rates import MeasuredRates
from cost_models.spec.sections import HostSpec
from partitioner.api import partition
from partitioner.models.as_graph import as_graph
from partitioner.plan import Plan
from passes.costs.cases import count_case
from passes.costs.costs import cost_graph
from passes.graph.graph import OpGraph


def calibrated(linear_seconds: float = 1e-3, contention: float = 1.5) -> ClusterSpec:
    """Every linear takes ``linear_seconds`` per phase, every other op nearly nothing."""
    nothing = CostCurve(((1.0, 1e-9),))
    line = CostLine(linear_seconds, 0.0, 0.0)
    phases = ("forward", "backward_input", "backward_weight")
    times = OpTimes(
        (
            (("elementwise", "forward"), nothing),
            *((("linear", phase), line) for phase in sorted(phases)),
            (("optimizer adamw", "forward"), CostLine(1e-3, 0.0, 0.0)),
        )
    )
    rates = MeasuredRates(
        op_times=times, host_costs=HostSpec(contention=contention, compute_overhead=1e-4, send_overhead=1e-5)
    )
    return ClusterSpec.local(2).with_device_rates(rates, "calibration of a test")


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    return as_graph(
        model, example_inputs=(torch.randn(4, 16),), loss_fn=lambda output, batch: output.square().mean()
    )


def test_a_saved_plan_simulates_as_it_was_predicted(graph: OpGraph) -> None:
    plan = partition(graph, calibrated(), batch_size=8, microbatches=4, schedule="1f1b", strategy="layer")
    assert plan.prediction.confidence == "calibration of a test"
    again = Plan.from_json(plan.model_dump_json())
    assert again.cluster == plan.cluster
    assert again.simulate().step_seconds == plan.prediction.step_seconds


def test_contention_and_overheads_reach_the_prediction(graph: OpGraph) -> None:
    def seconds(cluster: ClusterSpec) -> float:
        return partition(
            graph, cluster, batch_size=8, microbatches=4, schedule="gpipe", pins={"0": 0, "3": 1}
        ).prediction.step_seconds

    without = calibrated().model_copy(update={"host_costs": HostSpec()})
    assert seconds(calibrated()) > seconds(without) + 2 * 4 * 1e-4


def test_measured_kinds_replace_the_roofline(graph: OpGraph) -> None:
    costs = cost_graph(graph)
    found = costs.seconds(2, calibrated().devices[0])
    linear = [i for i, name in enumerate(costs.ops) if name.startswith("linear")]
    assert len(linear) == 4
    assert found.forward[linear] == pytest.approx([1e-3] * 4)
    assert found.backward_weight[linear] == pytest.approx([1e-3] * 4)
    assert found.backward_input[linear[0]] == 0.0  # the batch needs no gradient
    assert found.backward_input[linear[1:]] == pytest.approx([1e-3] * 3)


def test_cases_are_counted_as_models_are() -> None:
    case = next(c for c in worker_cases() if c.kind == "linear" and tuple(c.inputs()[0].shape) == (64, 128))
    model = nn.Sequential(nn.Linear(8, 128), nn.Linear(128, 512))
    traced = as_graph(
        model, example_inputs=(torch.randn(2, 8),), loss_fn=lambda output, batch: output.square().mean()
    )
    costs = cost_graph(traced)
    table, op = costs.at(64), costs.ops.index("linear_1")
    work = count_case(case)
    assert work.forward == (table.forward_flops[op], table.forward_bytes[op])
    assert work.backward_input == (table.backward_input_flops[op], table.backward_input_bytes[op])
    assert work.backward_weight == (table.backward_weight_flops[op], table.backward_weight_bytes[op])
