"""Cost graphs from elsewhere: the device-placement benchmark's table, and PipeDream's profiles beside data parallelism.

    python -m benchmarks.device_placement [--limit SECONDS] [--only table|profiles|scaling]

``cpu`` is user CPU time of the search. ``tests.placement_evaluator``, which shares no code with the planner, evaluates
every value again. The data lies in tests/data, each set with its licence.
"""

from __future__ import annotations

import argparse
import math
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from partitioner.graph_files.pipedream import Profile
from partitioner.graph_files.read import read_graph
from partitioner.report.text import columns, percent
from passes.place_contiguous import place_contiguous
from passes.place_freely import place_freely
from passes.placement_chains import device_loads
from passes.placement_graph import PlacementGraph, named
from passes.placement_groups import contiguous_groups
from passes.placement_ideals import Order, all_downsets, membership
from passes.placement_result import Placed
from tests.placement_evaluator import is_allowed, is_contiguous, loads_of, random_graph

DATA = Path(__file__).parents[1] / "tests" / "data"
KNOWN = {
    "LayerGraphs/bert24_inference": (17.7899, 17.7147),
    "LayerGraphs/bert24_training": (41.7458, 39.7895),
    "OperatorGraphs/bert_l-3_inference": (27.9186, 21.9084),
    "OperatorGraphs/bert_l-3_training": (65.3031, 54.2074),
    "OperatorGraphs/resnet50_inference": (124.3488, 124.3488),
}
"""Contiguous optimum of the published program; best free placement known."""
PROFILES = ("vgg16", "resnet18", "alexnet", "squeezenet1_0")
BYTES_PER_SECOND = 1e9
SIZES = (100, 200, 500, 1000, 2000)


def measured(
    search: Callable[[PlacementGraph, float], Placed], graph: PlacementGraph, limit: float
) -> tuple[Placed, float]:
    """A placement, evaluated again, and its user CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    found = search(graph, limit)
    seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
    placement = dict(named(graph, found.placement))
    value = max(loads_of(graph, placement).values())
    contiguous = search is not place_contiguous or is_contiguous(graph, placement)
    if not (is_allowed(graph, placement) and contiguous and math.isclose(value, found.value, rel_tol=1e-9)):
        raise AssertionError(f"{found.value} is not what the placement costs: {value}")
    return found, seconds


def table(limit: float) -> str:
    """The benchmark's graphs."""
    rows = []
    for name, (contiguous, free) in KNOWN.items():
        graph = read_graph(DATA / "device-placement" / f"{name}.json").graph
        for search, known in ((place_contiguous, contiguous), (place_freely, free)):
            found, seconds = measured(search, graph, limit)
            kind = search.__name__.removeprefix("place_")
            rows.append([name, kind, f"{known:.4f}", *_figures(found, seconds, "{:.6f}")])
    return columns(
        ("graph", "placement", "known", "found", "bound", "gap", "cpu s", "status"), rows, left=("graph",)
    )


def _figures(found: Placed, seconds: float, form: str) -> list[str]:
    return [
        form.format(found.value),
        form.format(found.bound),
        percent(found.gap),
        f"{seconds:.2f}",
        found.status,
    ]


def data_parallel_ms(profile: Profile, devices: int) -> float:
    """ms per mini-batch: every device runs whole mini-batches, then all reduce gradients in a ring, not overlapped.

    (Σ compute + 2·(n-1)/n·parameter bytes / bandwidth) / n: n mini-batches are done in that time.
    """
    compute, parameters = _totals(profile)
    reduce_ms = 2 * (devices - 1) / devices * parameters / BYTES_PER_SECOND * 1e3
    return (compute + reduce_ms) / devices


def replicated_ms(graph: PlacementGraph) -> tuple[float, str]:
    """(ms per mini-batch, replicas per stage): contiguous stages, each on r devices that take turns with mini-batches.

    A stage costs (load + 2·(r-1)/r·parameter bytes / bandwidth) / r, as ``data_parallel_ms`` counts one stage on all
    devices; load is that of the placement model. best[n, J] = min over I ⊂ J, r ≤ n of max(best[n-r, I], cost(J∖I, r)):
    PipeDream's plans, over all downsets instead of one order of layers.
    """
    problem = contiguous_groups(graph)
    listed = all_downsets(Order(problem), 4000)
    assert listed is not None
    downsets, loads = device_loads(problem, listed)
    held = membership(downsets, problem.count) @ problem.size
    parameters = held[None, :] - held[:, None]
    devices, count = graph.machine.accelerators, len(downsets)
    best = np.full((devices + 1, count), math.inf)
    best[:, 0] = 0.0
    choice = np.zeros((devices + 1, count, 2), dtype=int)
    for n in range(1, devices + 1):
        for r in range(1, n + 1):
            costs = (loads + 2e3 * (r - 1) / r * parameters / BYTES_PER_SECOND) / r
            through = np.maximum(best[n - r][:, None], costs)
            np.fill_diagonal(through, math.inf)
            found = through.min(axis=0)
            better = found < best[n]
            better[0] = False
            choice[n][better] = np.stack([through.argmin(axis=0), np.full(count, r)], axis=1)[better]
            best[n][better] = found[better]
    at, left, stages = count - 1, devices, []
    while at:
        at, replicas = choice[left, at].tolist()
        stages.append(replicas)
        left -= replicas
    return float(best[devices, -1]), "-".join(map(str, reversed(stages)))


def _totals(profile: Profile) -> tuple[float, float]:
    """(ms, bytes of parameters) of a mini-batch; the data loader's time is not counted."""
    layers = [layer for layer in profile.layers if not layer.what.startswith("Input")]
    compute = math.fsum(layer.forward_ms + layer.backward_ms for layer in layers)
    return compute, math.fsum(layer.parameter_bytes for layer in layers)


def profiles(limit: float) -> str:
    """PipeDream's profiles on 4 and 16 devices at 1e9 B/s."""
    rows = []
    for name in PROFILES:
        for devices in (4, 16):
            read = read_graph(
                DATA / "pipedream" / name / "graph.txt", devices=devices, bytes_per_second=BYTES_PER_SECOND
            )
            assert read.profile is not None
            one = _totals(read.profile)[0]
            parallel = data_parallel_ms(read.profile, devices)
            cells = [name, str(devices), f"{one:.1f}", f"{parallel:.1f}"]
            for search in (place_contiguous, place_freely):
                found, seconds = measured(search, read.graph, limit)
                cells += [f"{found.value:.1f}", percent(found.gap), f"{seconds:.1f}"]
            replicated, stages = replicated_ms(read.graph)
            cells += [f"{replicated:.1f}", stages]
            best = min(one, parallel, found.value, replicated)
            cells.append(f"{one / best:.2f}x")
            rows.append(cells)
    head = (
        "profile",
        "devices",
        "one",
        "data par.",
        "contiguous",
        "gap",
        "cpu s",
        "free",
        "gap",
        "cpu s",
        "replicated",
        "stages",
        "best",
    )
    return columns(head, rows, left=("profile",))


def scaling(limit: float) -> str:
    """Random layered graphs: time and gap against size."""
    rows = []
    for size in SIZES:
        graph = random_graph(size, size, accelerators=8)
        for search in (place_contiguous, place_freely):
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
