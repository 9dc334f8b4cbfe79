"""The search for one number of micro-batches on traced graphs, against every placement of their units."""

from __future__ import annotations

import random
import time
from itertools import product

import numpy as np
import pytest

from cost_models.cluster import ClusterSpec
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.lower.job import Job
from passes.search.anywhere.problem import evaluate
from passes.search.free.model import FreeModel, read_free_model
from passes.search.free.search import CountSearch
from tests.support.random_graphs import random_model
from tests.unit.passes.search.layer.toys import toy_graph


def unlike(devices: int, fast: float) -> ClusterSpec:
    """The first device ``fast`` times as fast as the others; no time to launch, slow links."""
    link = {"bandwidth": "10MB/s", "latency": "100ns", "duplex": "full"}
    nodes = [
        {
            "name": f"n{i}",
            "host": f"10.0.0.{i + 1}",
            "count": 1,
            "device": {
                "name": f"d{i}",
                "kind": "cpu",
                "memory": "1GiB",
                "memory_bandwidth": f"{0.1 * (fast if i == 0 else 1)}GB/s",
                "flops": {"float64": "100M", "float32": "100M"},
                "launch_overhead": "0us",
            },
            "links": {"default": link},
        }
        for i in range(devices)
    ]
    return ClusterSpec.from_dict(
        {"version": 1, "name": "unlike", "nodes": nodes, "network": {**link, "per": "device"}}
    )


def model_of(graph: OpGraph, cluster: ClusterSpec) -> FreeModel:
    costs = costs_of(graph, cluster)
    return read_free_model(graph, costs, cluster, recomputed_ops(graph), Job(2), {}, 2)


@pytest.mark.parametrize("seed", range(4))
def test_small_graphs_are_placed_at_best_and_never_bounded_above_it(seed: int) -> None:
    devices = 2 + seed % 2
    search = CountSearch(model_of(random_model(seed, ops=3).graph, unlike(devices, 3.0)), 8, 2)
    search.start()
    search.run(time.perf_counter() + 3.0)
    exact = search.exact
    best = min(
        evaluate(exact, home).objective_seconds for home in product(range(devices), repeat=exact.units)
    )
    assert search.bound.seconds <= best * (1 + 1e-9)
    assert search.best()[0].loads.objective_seconds == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_a_placement_of_search_units_costs_the_same_by_ops(seed: int) -> None:
    """States, optimizer steps, nets and memory add up alike whatever the units."""
    model = model_of(random_model(seed, ops=14).graph, unlike(3, 2.0))
    draw = random.Random(seed)
    units = model.problem(model.unit_of, 8, 2)
    home = [draw.randrange(3) for _ in range(units.units)]
    ops = model.problem(np.arange(len(model.layers.names)), 8, 2)
    above, below = evaluate(units, home), evaluate(ops, np.array(home)[model.unit_of].tolist())
    assert np.allclose(above.seconds, below.seconds, rtol=1e-12)
    assert np.allclose(above.memory_bytes, below.memory_bytes)
    assert above.overflow_bytes == 0
    assert model.ranks(home) == dict(
        zip(model.layers.names, np.array(home)[model.unit_of].tolist(), strict=True)
    )


def test_repeated_calls_of_a_module_lie_together_and_ties_across_modules_need_not() -> None:
    tied = toy_graph(3, tied=True)
    model = model_of(tied, unlike(2, 1.0))
    linear = [i for i, name in enumerate(model.layers.names) if name.startswith("linear")]
    assert len({int(model.exact_unit_of[i]) for i in linear}) == 3, "the tie is between two modules"
    for node in tied.graph.nodes:
        if node.op == "call_function":
            node.meta["module_path"] = "cell"
    again = model_of(tied, unlike(2, 1.0))
    assert again.exact_unit_of[linear[0]] == again.exact_unit_of[linear[2]], "one weight, one module"
    assert again.exact_unit_of[linear[0]] != again.exact_unit_of[linear[1]]
