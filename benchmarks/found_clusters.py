"""The hybrid search beside configurations by hand and strategies ``layer`` and ``feature``, over six clusters.

    python -m benchmarks.found_clusters [--models llama-8b] [--clusters unlike-32] [--limit 60] [--json rows.json]

Simulated steps, the certificate's gap, seconds of planning. By hand: the fastest of at most four ``fix`` lines that fit the
cluster (``hand_lines``). Ends with 1 if a hybrid plan is slower than any other. Models are traced in float16, which all
devices know.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch
from torch.utils import _pytree as pytree

from benchmarks.hand_lines import hand_lines
from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError
from cost_models.room import FILLS
from partitioner import Plan, Workload, partition
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


@dataclass(frozen=True)
class Model:
    """``batch``: samples of a step."""

    source: str
    batch: int
    settings: Mapping[str, str] = field(default_factory=dict)


MODELS: Mapping[str, Model] = {
    "gpt2": Model("gpt2", 64, {"seq": "1024"}),
    "t5": Model("t5", 256, {"seq": "512"}),
    "vit": Model("vit", 1024),
    "unet": Model("examples.unet:unet", 128, {"channels": "64", "size": "512"}),
    "llama-8b": Model("llama-8b", 256, {"seq": "4096"}),
    "mixtral": Model("mixtral", 256, {"seq": "4096"}),
    "llama-70b": Model("llama-70b", 1024, {"seq": "4096"}),
}
"""All that ship in unlike structures, at the sizes that were published, the U-Net at its paper's; tokens, images, samples
such that 1,024 devices have work, except for GPT-2."""
SEARCHED = ("hybrid", "layer", "feature")
Cell: TypeAlias = dict[str, object]


@cache
def traced(model: str) -> OpGraph:
    """Trace a model in float16. It is not compared with the model's own steps: half precision takes minutes on a CPU."""
    own = MODELS[model]
    if ":" not in own.source:
        return as_graph(load_workload(own.source, settings={**own.settings, "dtype": "float16"}), check="off")
    workload = load_workload(own.source, settings=own.settings)
    half = pytree.tree_map_only(
        torch.Tensor, lambda t: t.half() if t.is_floating_point() else t, workload.example_inputs
    )
    return as_graph(Workload(workload.model.half(), half, workload.loss_fn, workload.name), check="off")


def planned(
    graph: OpGraph,
    cluster: ClusterSpec,
    strategy: str,
    batch: int,
    limit: float,
    fix: str | None = None,
    risk: float = FILLS,
) -> Cell:
    """Plan by one strategy; the reason where there is no plan. Unless told otherwise predictions fill the memory."""
    started = time.perf_counter()
    try:
        plan = partition(
            graph,
            cluster,
            strategy=strategy,
            fix=fix,
            batch_size=batch,
            precision=replace(graph.precision, loss_scale="dynamic", master=torch.float32),
            risk=risk,
            time_limit_seconds=limit,
        )
    except PartitionerError as error:
        return {"refused": [error.what, *error.because], "seconds": time.perf_counter() - started}
    return {
        "step_seconds": plan.prediction.step_seconds,
        "gap": plan.certificate.gap,
        "chance": plan.intervals.chance_of_not_fitting,
        "too_risky": plan.is_too_risky,
        "plan": words(plan),
        "seconds": time.perf_counter() - started,
    }  # fmt: skip


def words(plan: Plan) -> str:
    """Return the plan in a line."""
    line = next(row for row in str(plan).splitlines() if row.startswith("plan "))
    return line.removeprefix("plan").strip()


def row(model: str, cluster: str, limit: float) -> Cell:
    """Plan a model on a cluster by the search, by other strategies, and by hand."""
    graph, batch, spec = traced(model), MODELS[model].batch, CLUSTERS[cluster]()
    found: Cell = {"model": model, "cluster": cluster, "batch": batch}
    for strategy in SEARCHED:
        found[strategy] = planned(graph, spec, strategy, batch, limit)
    parameters = sum(math.prod(each.shape) for each in graph.parameters.values())
    lines = hand_lines(spec, batch, parameters)
    found["hand"] = {fix: planned(graph, spec, "hybrid", batch, limit, fix) for fix in lines}
    return found


def step_of(cell: object) -> float:
    """Return the step of a plan; infinite where there is none."""
    assert isinstance(cell, dict)
    return float(cell.get("step_seconds", math.inf))


def by_hand(found: Cell) -> tuple[str, float]:
    """Return the fastest line by hand, and its step."""
    hand = found["hand"]
    assert isinstance(hand, dict)
    steps = {fix: step_of(cell) for fix, cell in hand.items()}
    return min(steps.items(), key=lambda own: own[1], default=("", math.inf))


def line(found: Cell) -> str:
    """Write a row of the table in ``docs/06g-hybrid.md``."""
    hybrid, (fix, hand) = found["hybrid"], by_hand(found)
    assert isinstance(hybrid, dict)
    cells = [str(found[name]) for name in ("model", "cluster", "batch")]
    cells += [_seconds(step_of(hybrid)), f"{_seconds(hand)}: `{fix}`" if hand < math.inf else "none fits"]
    cells += [f"{hand / step_of(hybrid):.2f}x" if max(hand, step_of(hybrid)) < math.inf else ""]
    cells += [_seconds(step_of(found[strategy])) for strategy in SEARCHED[1:]]
    if "step_seconds" in hybrid:
        cells += [f"{hybrid['gap']:.1%}", str(hybrid["plan"]), f"{hybrid['seconds']:.0f}"]
    return f"| {' | '.join(cells)} |"


def _seconds(step: float) -> str:
    return f"{step:.3g} s" if step < math.inf else "does not fit"


def slower(found: Cell) -> bool:
    """Tell whether another strategy, or a line by hand, has the faster plan."""
    others = [*(step_of(found[strategy]) for strategy in SEARCHED[1:]), by_hand(found)[1]]
    return step_of(found["hybrid"]) > min(others) * (1 + 1e-9)


def main() -> int:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each search")
    parser.add_argument("--json", type=Path, help="append a line of JSON per row")
    given = parser.parse_args()
    head = "model | cluster | batch | hybrid | by hand | hand / hybrid | layer | feature | gap | plan | planning, s"
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
