from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from cost_models.cluster import ClusterSpec
from cost_models.units import format_bytes
from passes.costs.costs import GraphCosts, cost_graph
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.search.baselines import data_parallel, one_device
from passes.trace.trace import trace


@pytest.fixture(scope="module")
def traced() -> tuple[OpGraph, GraphCosts]:
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    graph = trace(model, (torch.randn(4, 256),), loss_fn=lambda output, _: output.sum())
    return graph, cost_graph(graph, device_kind="cuda")


def cluster(*devices: dict[str, object]) -> ClusterSpec:
    nodes = [
        {"name": f"n{index}", "count": 1, "device": device, "links": {"default": "PCIe4"}}
        for index, device in enumerate(devices)
    ]
    network = {"bandwidth": "100Gb/s", "latency": "5us"}
    return ClusterSpec.from_dict({"version": 1, "nodes": nodes, "network": network})


def test_one_device_is_the_fastest_that_fits(traced: tuple[OpGraph, GraphCosts]) -> None:
    graph, costs = traced
    job = Job(8)
    fast = one_device(graph, costs, cluster({"preset": "H100-80GB"}), job)
    slow = one_device(graph, costs, cluster({"preset": "GTX580-3GB"}), job)
    both = one_device(graph, costs, cluster({"preset": "GTX580-3GB"}, {"preset": "H100-80GB"}), job)
    assert fast.step_seconds < slow.step_seconds
    assert both == fast


def test_the_slowest_device_paces_data_parallelism(traced: tuple[OpGraph, GraphCosts]) -> None:
    graph, costs = traced
    job = Job(64)
    equal = data_parallel(graph, costs, cluster({"preset": "H100-80GB"}, {"preset": "H100-80GB"}), job)
    unlike = data_parallel(graph, costs, cluster({"preset": "H100-80GB"}, {"preset": "GTX580-3GB"}), job)
    assert equal.step_seconds < unlike.step_seconds
    assert equal.feasible
    assert unlike.feasible


def test_more_micro_batches_where_memory_is_tight(traced: tuple[OpGraph, GraphCosts]) -> None:
    graph, costs = traced
    job = Job(4096)
    roomy = one_device(graph, costs, cluster({"preset": "H100-80GB"}), job)
    tight = one_device(
        graph, costs, cluster({"preset": "H100-80GB", "memory": "7MiB", "memory_process": 0}), job
    )
    none = one_device(
        graph, costs, cluster({"preset": "H100-80GB", "memory": "1MiB", "memory_process": 0}), job
    )
    assert roomy.reason == "fits in 1 micro-batch"
    assert tight.feasible
    assert re.fullmatch(r"fits in \d+ micro-batches", tight.reason)
    assert not none.feasible
    assert none.peak_memory_bytes is not None
    assert none.reason == f"does not fit: {format_bytes(none.peak_memory_bytes - 2**20)} short"


def test_what_does_not_fit_is_held_against_the_device_it_was_tried_on(
    traced: tuple[OpGraph, GraphCosts],
) -> None:
    slow = {"preset": "GTX580-3GB", "memory": "2MiB", "memory_process": 0}
    fast = {"preset": "H100-80GB", "memory": "1MiB", "memory_process": 0}
    found = one_device(*traced, cluster(slow, fast), Job(8))
    assert not found.feasible
    assert found.peak_memory_bytes is not None
    assert found.reason == f"does not fit: {format_bytes(found.peak_memory_bytes - 2**20)} short"
