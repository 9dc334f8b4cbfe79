"""The hybrid search beside strategies ``layer`` and ``feature``, over six clusters: simulated steps, gap, seconds.

    python -m benchmarks.found_clusters [--models llama-8b] [--clusters unlike-32] [--limit 60] [--json rows.json]

Ends with 1 if a hybrid plan is slower than another strategy's. Models are traced in float16, which all devices know.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError
from partitioner import Plan, partition
from partitioner.models.as_graph import as_graph
from partitioner.models.load import load_workload
from passes.graph.graph import OpGraph

CLUSTERS_FOLDER = Path(__file__).parents[1] / "docs" / "clusters"


def on_ethernet(nodes: int) -> ClusterSpec:
    """Return A100 machines behind one 100 Gb/s card each."""
    data = ClusterSpec.parse(f"dgx-a100:{nodes}").to_dict()
    data["network"] = {"preset": "Ethernet-100G", "per": "node"}
    return ClusterSpec.from_dict({**data, "name": f"dgx-a100:{nodes} on Ethernet-100G"})


CLUSTERS: Mapping[str, Callable[[], ClusterSpec]] = {
    "h100-8": lambda: ClusterSpec.parse("dgx-h100:1"),
    "h100-64": lambda: ClusterSpec.parse("dgx-h100:8"),
    "a100-64-ethernet": lambda: on_ethernet(8),
    "unlike-32": lambda: ClusterSpec.load(CLUSTERS_FOLDER / "a100-v100-consumer.yaml"),
    "unlike-6": lambda: ClusterSpec.load(CLUSTERS_FOLDER / "four-unlike-machines.yaml"),
    "h100-1024": lambda: ClusterSpec.parse("dgx-h100:128"),
}
MODELS: Mapping[str, tuple[int, int]] = {
    "gpt2": (1024, 64),
    "llama-8b": (4096, 256),
    "llama-70b": (4096, 1024),
}
"""Tokens of a sample, and samples of a step."""


def planned(
    graph: OpGraph, cluster: ClusterSpec, strategy: str, batch: int, limit: float
) -> dict[str, object]:
    """Plan by one strategy; the reason where there is no plan."""
    started = time.perf_counter()
    try:
        plan = partition(
            graph,
            cluster,
            strategy=strategy,
            batch_size=batch,
            precision=replace(graph.precision, loss_scale="dynamic", master=torch.float32),
            time_limit_seconds=limit,
        )
    except PartitionerError as error:
        return {"refused": [error.what, *error.because], "seconds": time.perf_counter() - started}
    return {
        "step_seconds": plan.prediction.step_seconds,
        "gap": plan.certificate.gap,
        "plan": words(plan),
        "seconds": time.perf_counter() - started,
    }


def words(plan: Plan) -> str:
    """Return the plan in a line."""
    line = next(row for row in str(plan).splitlines() if row.startswith("plan "))
    return line.removeprefix("plan").strip()


def row(model: str, cluster: str, limit: float) -> dict[str, object]:
    """Plan a model on a cluster by all three."""
    seq, batch = MODELS[model]
    graph = as_graph(load_workload(model, settings={}, seq=seq, dtype="float16"))
    found: dict[str, object] = {"model": model, "cluster": cluster, "batch": batch}
    spec = CLUSTERS[cluster]()
    for strategy in ("hybrid", "layer", "feature"):
        found[strategy] = planned(graph, spec, strategy, batch, limit)
    return found


def line(found: dict[str, object]) -> str:
    """Write a row of the table in ``docs/06g-hybrid.md``."""
    cells = [str(found["model"]), str(found["cluster"]), str(found["batch"])]
    hybrid = found["hybrid"]
    assert isinstance(hybrid, dict)
    for strategy in ("hybrid", "layer", "feature"):
        own = found[strategy]
        assert isinstance(own, dict)
        cells.append(f"{own['step_seconds']:.3g} s" if "step_seconds" in own else "does not fit")
    if "step_seconds" in hybrid:
        cells += [f"{hybrid['gap']:.1%}", str(hybrid["plan"]), f"{hybrid['seconds']:.0f}"]
    return f"| {' | '.join(cells)} |"


def slower(found: dict[str, object]) -> bool:
    """Tell whether another strategy has the faster plan."""
    steps = {}
    for strategy in ("hybrid", "layer", "feature"):
        own = found[strategy]
        assert isinstance(own, dict)
        steps[strategy] = own.get("step_seconds", float("inf"))
    return bool(steps["hybrid"] > min(steps.values()) * (1 + 1e-9))


def main() -> int:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each search")
    parser.add_argument("--json", type=Path, help="append a line of JSON per row")
    given = parser.parse_args()
    head = "model | cluster | batch | hybrid | layer | feature | gap | plan | planning, s"
    print(f"| {head} |\n|" + "---|" * (head.count("|") + 1))
    worse = 0
    for model in given.models.split(","):
        for cluster in given.clusters.split(","):
            found = row(model, cluster, given.limit)
            worse += slower(found)
            print(line(found), flush=True)
            if given.json is not None:
                with given.json.open("a") as file:
                    file.write(json.dumps(found) + "\n")
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
