"""A few random partitions on every run of the tests; ``make fuzz`` makes 10,000 of them."""

from __future__ import annotations

from benchmarks.fuzz import RANKS, run_one
from benchmarks.fuzz_models import random_workload
from cost_models.precision import Precision
from passes.graph.graph import OpGraph
from runtime.ranks.launch import WorkerPool

MODELS = (41,)
"""Any would do; this one couples its samples twice, which a reference once overlooked."""
PLANS = 2


def test_random_partitions_compute_what_the_model_computes() -> None:
    outcomes = []
    with WorkerPool(RANKS) as pool:
        for model in MODELS:
            workload = random_workload(model)
            graphs: dict[Precision | None, OpGraph] = {}
            outcomes += [run_one(model, number, workload, graphs, pool) for number in range(PLANS)]
    assert [o for o in outcomes if o.outcome in ("DIFFERS", "RAISED")] == []
    assert sum(o.outcome == "verified" for o in outcomes) >= PLANS
