"""Cost graphs from elsewhere: the device-placement benchmark's table, and PipeDream's profiles by every strategy.

    python -m benchmarks.device_placement [--limit SECONDS] [--only table|profiles|scaling]

``cpu`` is user CPU time of the search. ``placement_evaluator`` and ``sharded_evaluator`` of ``tests.support``, which share
no code with the planner, evaluate every value again. The data lies in tests/data, each set with its licence.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.placement_measured import DATA, measured
from benchmarks.profile_strategies import profiles
from cost_models.units import percent
from partitioner.cost_graphs.read import read_graph
from partitioner.report.text import columns
from passes.search.cost_graph.contiguous import place_contiguous
from passes.search.cost_graph.result import PlacementResult
from passes.search.cost_graph.throughput import place_for_throughput
from tests.support.placement_evaluator import random_graph

KNOWN = {
    "LayerGraphs/bert24_inference": (17.7899, 17.7147),
    "LayerGraphs/bert24_training": (41.7458, 39.7895),
    "OperatorGraphs/bert_l-3_inference": (27.9186, 21.9084),
    "OperatorGraphs/bert_l-3_training": (65.3031, 54.2074),
    "OperatorGraphs/resnet50_inference": (124.3488, 124.3488),
}
"""Contiguous optimum of the published program; best free placement known."""
SIZES = (100, 200, 500, 1000, 2000)


def table(limit: float) -> str:
    """The benchmark's graphs."""
    rows = []
    for name, (contiguous, free) in KNOWN.items():
        graph = read_graph(DATA / "device-placement" / f"{name}.json").graph
        for search, known in ((place_contiguous, contiguous), (place_for_throughput, free)):
            found, seconds = measured(search, graph, limit)
            kind = search.__name__.removeprefix("place_")
            rows.append([name, kind, f"{known:.4f}", *_figures(found, seconds, "{:.6f}")])
    return columns(
        ("graph", "placement", "known", "found", "bound", "gap", "cpu s", "status"), rows, left=("graph",)
    )


def _figures(found: PlacementResult, seconds: float, form: str) -> list[str]:
    return [
        form.format(found.value),
        form.format(found.bound),
        percent(found.certificate.gap),
        f"{seconds:.2f}",
        found.certificate.solver_status,
    ]


def scaling(limit: float) -> str:
    """Random layered graphs: time and gap against size."""
    rows = []
    for size in SIZES:
        graph = random_graph(size, size, accelerators=8)
        for search in (place_contiguous, place_for_throughput):
            found, seconds = measured(search, graph, limit)
            kind = search.__name__.removeprefix("place_")
            rows.append([f"{size:,}", kind, *_figures(found, seconds, "{:.4f}")])
    return columns(
        ("nodes", "placement", "found", "bound", "gap", "cpu s", "status"), rows, left=("placement",)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parts = {"table": table, "profiles": profiles, "scaling": scaling}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each search")
    parser.add_argument("--only", choices=sorted(parts), action="append")
    given = parser.parse_args(arguments)
    for name in given.only or parts:
        print(f"{name}\n{parts[name](given.limit)}\n", flush=True)


if __name__ == "__main__":
    main()
