"""PipeDream's profiles by every strategy, beside one device and pure data parallelism. Milliseconds per mini-batch.

All are steady throughput of training. ``one``: one device. ``data``: whole mini-batches on every device, gradients reduced
in a ring. ``layer``: contiguous stages, a device each. ``free``: any layer anywhere. ``feature``: every layer on all
devices, by samples, by features or by inputs (``split``: layers with parameters by features + by inputs); ``two ways``:
without inputs. ``hybrid``: contiguous stages, each on devices that take turns. A ratio is that of the
faster of one device and data parallelism: above 1, the strategy is faster.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.placement_measured import DATA, measured
from cost_models.units import percent
from partitioner.cost_graphs.pipedream import PipeDreamProfile
from partitioner.cost_graphs.plan_layouts import layout_problem
from partitioner.cost_graphs.read import ReadGraph, read_graph
from partitioner.report.text import columns
from passes.search.cost_graph.chains import Chains
from passes.search.cost_graph.contiguous import place_contiguous
from passes.search.cost_graph.downsets import Order, membership
from passes.search.cost_graph.graph import PlacementGraph
from passes.search.cost_graph.groups import contiguous_groups
from passes.search.cost_graph.layouts_ilp import place_layouts
from passes.search.cost_graph.throughput import place_for_throughput
from tests.support.sharded_evaluator import step_seconds

PROFILES = ("vgg16", "resnet18", "alexnet", "squeezenet1_0")
DEVICES = (4, 16)
BYTES_PER_SECOND = 1e9


def data_parallel_ms(profile: PipeDreamProfile, devices: int) -> float:
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
    listed = Order(problem).all_downsets(4000)
    assert listed is not None
    chains = Chains(problem, listed)
    downsets = chains.downsets
    loads, _ = chains.loads(np.arange(len(downsets)), slice(0, len(downsets)))
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


def _totals(profile: PipeDreamProfile) -> tuple[float, float]:
    """(ms, bytes of parameters) of a mini-batch; the data loader's time is not counted."""
    layers = [layer for layer in profile.layers if not layer.what.startswith("Input")]
    compute = math.fsum(layer.forward_ms + layer.backward_ms for layer in layers)
    return compute, math.fsum(layer.parameter_bytes for layer in layers)


def feature_ms(read: ReadGraph, limit: float, by_inputs: bool) -> tuple[float, str, float]:
    """(ms per mini-batch, layers with parameters by features + by inputs, gap); evaluated again."""
    assert read.profile is not None
    problem = layout_problem(read.profile, read.graph.machine.accelerators, read.bytes_per_second)
    found = place_layouts(problem, limit, by_inputs=by_inputs)
    again = step_seconds(problem, found.layouts)
    if not math.isclose(again, found.step_seconds, rel_tol=1e-9):
        raise AssertionError(f"{found.step_seconds} is not what the layouts cost: {again}")
    layouts = [
        layout for layout, op in zip(found.layouts, problem.ops, strict=True) if op.parameter_bytes > 0
    ]
    split = f"{layouts.count('features')}+{layouts.count('inputs')}"
    return again * 1e3 / problem.devices, split, found.certificate.gap


def profiles(limit: float) -> str:
    """Every profile on 4 and 16 devices at 1e9 B/s."""
    rows = [_row(name, devices, limit) for name in PROFILES for devices in DEVICES]
    head = (
        "profile",
        "devices",
        "one",
        "data",
        "layer",
        "free",
        "two ways",
        "feature",
        "split",
        "hybrid",
        "stages",
    )
    return columns((*head, "best", "gap"), rows, left=("profile", "best"))


def _row(name: str, devices: int, limit: float) -> list[str]:
    path = DATA / "pipedream" / name / "graph.txt"
    read = read_graph(path, devices=devices, bytes_per_second=BYTES_PER_SECOND)
    assert read.profile is not None
    one, data = _totals(read.profile)[0], data_parallel_ms(read.profile, devices)
    layer, free = (
        measured(search, read.graph, limit)[0] for search in (place_contiguous, place_for_throughput)
    )
    two_ways, _, _ = feature_ms(read, limit, by_inputs=False)
    feature, split, gap = feature_ms(read, limit, by_inputs=True)
    hybrid, stages = replicated_ms(read.graph)
    found = {"layer": layer.value, "free": free.value, "feature": feature, "hybrid": hybrid}
    plain = min(one, data)

    def against(value: float) -> str:
        return f"{value:.1f} ({plain / value:.2f}x)"

    best = min(found, key=lambda strategy: found[strategy])
    faster = found[best] < plain * (1 - 1e-9)
    cells = [name, str(devices), f"{one:.1f}", f"{data:.1f}", against(layer.value), against(free.value)]
    cells += [against(two_ways), against(feature), split, against(hybrid), stages]
    return [
        *cells,
        best if faster else "none is faster",
        percent(max(layer.certificate.gap, free.certificate.gap, gap)),
    ]
