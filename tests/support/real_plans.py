"""Real plans of every kind, as the planner makes them: for tests of how plans are shown.

    python -m tests.support.real_plans      makes them anew and writes them to tests/data/plans, where ``stored`` reads them

Tests of texts take plans from files: a search's numbers differ from machine to machine, and planning takes seconds.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.unlike_clusters import UNLIKE
from cost_models.cluster import ClusterSpec
from partitioner import Plan, partition
from partitioner.cost_graphs.plan import GraphPlan, plan_graph
from partitioner.cost_graphs.plan_layouts import plan_feature_wise
from partitioner.cost_graphs.read import read_graph
from partitioner.models.as_graph import as_graph
from partitioner.models.load import load_workload
from tests.support.two_layers import two_layers

DATA = Path(os.path.relpath(Path(__file__).parents[1] / "data"))
"""Relative, so that plans of cost graphs do not say on which machine they were made."""


@cache
def model() -> Any:
    return as_graph(load_workload("gpt2", settings={"size": "tiny"}), check="off")


def planned(cluster: ClusterSpec, batch_size: int = 8, **options: Any) -> Plan:
    return partition(model(), cluster, batch_size=batch_size, **{"strategy": "layer", **options})


def layer() -> Plan:
    return planned(ClusterSpec.local(2), strategy="layer", min_stages=2, microbatches=4)


def layer_64() -> Plan:
    """Far too many devices for so small a model: many stages."""
    return planned(ClusterSpec.preset("dgx-h100", nodes=8), strategy="layer", min_stages=2, microbatches=4)


def feature() -> Plan:
    return planned(ClusterSpec.local(2), strategy="feature")


def feature_64() -> Plan:
    cluster = ClusterSpec.preset("dgx-h100", nodes=8)
    return planned(cluster, 512, strategy="feature", mesh=(16, 4), pins={"*": "zero1 column_row"})


def hybrid() -> Plan:
    return planned(ClusterSpec.local(4), strategy="hybrid", fix="pipeline=2 tensor=2")


def blocks() -> Plan:
    """Split one op's neurons over both devices, which so small a model would not do by itself."""
    return two_layers(
        (8, 16, 8),
        batch_size=8,
        strategy="free",
        splits={"0": (12, 4)},
        pins={"linear_b0": 0, "linear_b1": 1},
        time_limit_seconds=1.0,
    )


def unlike() -> Plan:
    return planned(UNLIKE["1 + 3"], strategy="hybrid", fix="groups=1,3")


def llama_70b_64() -> Plan:
    """Read Llama-70B in pipelines of sharded stages, planned on 2026-11-25; a plan file must stay readable."""
    return stored("llama-70b-64")


def graph() -> GraphPlan:
    """Place the layers of a BERT that was profiled elsewhere on six accelerators."""
    return plan_graph(
        read_graph(DATA / "device-placement" / "LayerGraphs" / "bert24_inference.json"), contiguous=True
    )


def graph_layouts() -> GraphPlan:
    """Spread a profiled AlexNet over four devices."""
    return plan_feature_wise(read_graph(DATA / "pipedream" / "alexnet" / "graph.txt", devices=4))


PLANS: Mapping[str, Callable[[], Plan]] = {
    make.__name__.replace("_", "-"): make
    for make in (layer, layer_64, feature, feature_64, hybrid, blocks, unlike, llama_70b_64)
}
GRAPH_PLANS: Mapping[str, Callable[[], GraphPlan]] = {"graph": graph, "graph-layouts": graph_layouts}


def stored(name: str) -> Plan:
    """Read a plan as it was made on another day."""
    return Plan.from_json(_text(name))


def stored_graph(name: str) -> GraphPlan:
    """Read a plan of a cost graph as it was made on another day."""
    return GraphPlan.from_json(_text(name))


def _text(name: str) -> str:
    return gzip.decompress((DATA / "plans" / f"{name}.json.gz").read_bytes()).decode()


def main() -> None:
    """Make all plans but the large one and write them down."""
    for name, make in {**PLANS, **GRAPH_PLANS}.items():
        if make is not llama_70b_64:
            text = make().model_dump_json(indent=1)
            (DATA / "plans" / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
