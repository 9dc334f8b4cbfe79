"""Scaling: seconds of planning and gap of the free search against the number of ops, on eight unlike devices.

transformer    Llama blocks (hidden 2048, as in the 1B model), more of them, on meta
branchy        a random DAG of linear layers, activations and sums; every value reads one or two of the last twelve
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.free_clusters import clusters
from cost_models.units import percent
from partitioner import Workload, partition
from partitioner.models.as_graph import as_graph
from partitioner.models.load import load_workload
from partitioner.report.text import columns
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph

SIZES = (100, 300, 1000, 3000, 10_000)
KINDS = ("transformer", "branchy")
CLUSTER = "gpu-8"
BATCH, SEQ, WIDTH, WINDOW = 32, 512, 1024, 12
OPS_PER_BLOCK, OPS_AROUND = 61.0, 24
"""Of a Llama block, and of what is before and after all blocks."""
HEAD = (
    *("graph", "ops", "trace s", "costs s", "layer-wise s", "free s", "search s", "layer-wise ms", "free ms"),
    *("free/layer", "segments", "splits", "gap", "to bound", "bounded by"),
)


@dataclass(frozen=True)
class Figures:
    """``free_seconds``: all of planning freely, the layer-wise start, variants, segments and programs included;
    ``search_seconds``: what its certificate says. ``to_bound``: (step - simulated lower bound) / step."""

    kind: str
    ops: int
    trace_seconds: float
    costs_seconds: float
    layer_seconds: float
    free_seconds: float
    search_seconds: float
    layer_step_seconds: float
    step_seconds: float
    segments: int
    splits: int
    gap: float
    to_bound: float
    method: str

    def cells(self) -> list[str]:
        """As ``HEAD`` says."""
        seconds = (
            self.trace_seconds,
            self.costs_seconds,
            self.layer_seconds,
            self.free_seconds,
            self.search_seconds,
        )
        return [
            self.kind,
            f"{self.ops:,}",
            *(f"{each:.1f}" for each in seconds),
            f"{self.layer_step_seconds * 1e3:.4g}",
            f"{self.step_seconds * 1e3:.4g}",
            f"{self.step_seconds / self.layer_step_seconds:.3f}",
            str(self.segments),
            str(self.splits),
            percent(self.gap),
            percent(self.to_bound),
            self.method,
        ]


class Branchy(nn.Module):
    """``ops`` random ops on [batch, WIDTH] values, and the sum of what nobody read."""

    def __init__(self, ops: int, seed: int = 0) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.steps: list[tuple[str, int, int]] = []
        layers: list[nn.Module] = []
        unread = {0}
        while len(self.steps) + len(unread) < ops:
            here = len(self.steps) + 1
            first, second = (draw.randrange(max(0, here - WINDOW), here) for _ in range(2))
            kind = draw.choice(["linear", "linear", "gelu", "add"]) if here > 1 else "linear"
            self.steps.append((kind, first, second))
            unread = unread - {first} - ({second} if kind == "add" else set()) | {here}
            if kind == "linear":
                layers.append(nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        values, linear = [x], iter(self.layers)
        unread = {0: x}
        for here, (kind, first, second) in enumerate(self.steps, start=1):
            unread.pop(first, None)
            if kind == "linear":
                value = next(linear)(values[first])
            elif kind == "gelu":
                value = torch.nn.functional.gelu(values[first])
            else:
                unread.pop(second, None)
                value = values[first] + values[second]
            values.append(value)
            unread[here] = value
        total, *others = unread.values()
        for value in others:
            total = total + value
        return total


def mean_square(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def made(kind: str, ops: int) -> OpGraph:
    """The trace of a graph of about ``ops`` ops."""
    if kind == "transformer":
        layers = max(1, round((ops - OPS_AROUND) / OPS_PER_BLOCK))
        return as_graph(load_workload("llama-1b", settings={"layers": str(layers), "seq": str(SEQ)}))
    with torch.device("meta"):
        workload = Workload(Branchy(ops), torch.empty(2, SEQ, WIDTH), mean_square, name="branchy")
    return as_graph(workload)


def figures(kind: str, ops: int, limit: float) -> Figures:
    """Trace, cost and plan one graph, layer-wise and freely."""
    cluster = clusters()[CLUSTER]
    marks = [time.perf_counter()]
    graph = made(kind, ops)
    marks.append(time.perf_counter())
    costs_of(graph, cluster)
    marks.append(time.perf_counter())
    layer = partition(graph, cluster, batch_size=BATCH, time_limit_seconds=limit, strategy="layer")
    marks.append(time.perf_counter())
    free = partition(graph, cluster, strategy="free", batch_size=BATCH, time_limit_seconds=limit)
    marks.append(time.perf_counter())
    traced, costed, layered, freed = (b - a for a, b in pairwise(marks))
    step = free.prediction.step_seconds
    return Figures(
        kind=kind,
        ops=len(graph),
        trace_seconds=traced,
        costs_seconds=costed,
        layer_seconds=layered,
        free_seconds=freed,
        search_seconds=free.certificate.search_seconds,
        layer_step_seconds=layer.prediction.step_seconds,
        step_seconds=step,
        segments=len(free.stages),
        splits=len(free.splits),
        gap=free.certificate.gap,
        to_bound=(step - free.certificate.whole_ops_bound_seconds) / step,
        method=free.certificate.method,
    )


def run(kinds: Sequence[str], sizes: Sequence[int], limit: float) -> list[Figures]:
    """Print the table; its rows on stderr as they come."""
    found: list[Figures] = []
    for kind in kinds:
        for ops in sizes:
            found.append(figures(kind, ops, limit))
            print(" ".join(found[-1].cells()), file=sys.stderr, flush=True)
    print(columns(HEAD, [each.cells() for each in found], left=("graph", "bounded by")))
    return found
