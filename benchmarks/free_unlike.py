"""Unlike devices: the free search beside the layer-wise plan, for every example model.

Both are planned for the same cluster, batch and (unless the objective is latency, which has one) any number of
micro-batches; seconds are of the simulated training step, read from the plan and simulated again from its JSON.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.free_clusters import clusters
from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from cost_models.units import percent
from partitioner import Plan, Workload, partition
from partitioner.models.as_graph import as_graph
from partitioner.models.load import load_workload
from partitioner.report.text import columns
from passes.graph.graph import OpGraph
from passes.search.free.request import Objective
from runtime.ranks.launch import WorkerPool

CLUSTERS = ("gpu-4", "gpu-2", "cpu-4", "cpu-2")
VERIFY_LIMIT = 6.0
"""Seconds to search for the plans of tiny variants."""
WON = 0.995
"""A ratio below this is a win, not rounding."""


@dataclass(frozen=True)
class Model:
    """``tiny``: settings of the variant that is verified; ``branchy``: planned for latency as well; ``batch``: samples."""

    source: str
    settings: dict[str, str] = field(default_factory=dict)
    tiny: dict[str, str] = field(default_factory=lambda: {"size": "tiny"})
    branchy: bool = False
    batch: int = 16


TINY_ALEXNET = {"classes": "16", "width": "0.0625", "size": "63"}

MODELS: dict[str, Model] = {
    "gpt2": Model("gpt2", {"seq": "256"}),
    "llama-1b": Model("llama-1b", {"seq": "512"}),
    "bert": Model("bert", {"seq": "256"}),
    "t5": Model("t5", {"seq": "128"}, branchy=True),
    "vit": Model("vit", batch=32),
    "resnet50": Model("resnet50", batch=64),
    "whisper": Model("whisper", {"seq": "64"}, branchy=True),
    "mixtral": Model("mixtral", {"seq": "256", "layers": "4"}),
    "alexnet": Model("examples.alexnet:alexnet", {}, TINY_ALEXNET, batch=128),
    "two_towers": Model("examples.alexnet:two_towers", {}, TINY_ALEXNET, branchy=True, batch=128),
    "unet": Model(
        "examples.unet:unet", {"size": "128"}, {"channels": "8", "depth": "2", "size": "16"}, branchy=True
    ),
    "lstm_seq2seq": Model(
        "examples.lstm_seq2seq:lstm_seq2seq",
        {},
        {"vocabulary": "64", "hidden": "16", "layers": "2", "source_steps": "3", "target_steps": "4"},
        branchy=True,
        batch=64,
    ),
    "moe": Model(
        "examples.moe:moe", {}, {"vocabulary": "64", "width": "16", "hidden": "32"}, branchy=True, batch=32
    ),
    "locally_connected": Model(
        "examples.locally_connected:locally_connected",
        {},
        {"channels": "4", "size": "22"},
        branchy=True,
        batch=256,
    ),
    "mlp": Model("examples.mlp:mlp", {}, {"inputs": "16", "hidden": "40"}, batch=1024),
    "byte_gpt": Model("examples/byte_text.py:gpt", {}, {"layers": "2", "width": "32"}, batch=64),
}
HEAD = (
    *("model", "ops", "cluster", "objective", "layer-wise ms", "free ms", "free/layer"),
    *("devices", "segments", "micro", "splits", "gap", "to bound", "layer s", "free s", ""),
)


@dataclass(frozen=True)
class Row:
    """One model on one cluster. ``layer``: None where no layer-wise plan fits."""

    model: str
    cluster: str
    objective: Objective
    layer: Plan | None
    free: Plan
    layer_seconds: float
    free_seconds: float
    """Of planning, tracing and costs apart."""

    @property
    def layer_step_seconds(self) -> float:
        """Of the layer-wise plan or of one device alone, which is layer-wise as well; infinite where nothing fits."""
        if self.layer is None:
            return math.inf
        # For latency the batch is in one piece; one device may need more of them to fit.
        fits = "fits" if self.objective == "throughput" else "fits in 1 micro-batch"
        alone = (
            o for o in self.layer.alternatives if o.strategy == "one device" and o.reason.startswith(fits)
        )
        known = [other.step_seconds for other in alone if other.feasible and other.step_seconds is not None]
        return min([self.layer.prediction.step_seconds, *known])

    @property
    def ratio(self) -> float:
        """Free step over layer-wise step."""
        return self.free.prediction.step_seconds / self.layer_step_seconds

    def problems(self) -> Iterator[str]:
        """What must not be."""
        name = f"{self.model} on {self.cluster}, {self.objective}"
        if self.ratio > 1 + 1e-9:
            yield f"{name}: free is slower than layer-wise, {self.ratio:.6f}"
        again = Plan.from_json(self.free.model_dump_json()).simulate().step_seconds
        if not math.isclose(again, self.free.prediction.step_seconds, rel_tol=1e-9):
            yield f"{name}: predicted {self.free.prediction.step_seconds}, simulated {again}"
        if self.free.certificate.bound_seconds > self.free.certificate.objective_seconds * (1 + 1e-9):
            yield f"{name}: the bound is above what it bounds"

    def cells(self) -> list[str]:
        """As ``HEAD`` says."""
        plan, step = self.free, self.free.prediction.step_seconds
        floor = max(plan.certificate.simulated_lower_bound_seconds, plan.certificate.whole_ops_bound_seconds)
        won = (
            "won"
            if self.ratio < WON
            else "is layer-wise"
            if plan.certificate.method.startswith("layer-wise")
            else ""
        )
        return [
            self.model,
            f"{plan.model.ops:,}",
            self.cluster,
            self.objective,
            f"{self.layer_step_seconds * 1e3:.4g}" if self.layer else "none fits",
            f"{step * 1e3:.4g}",
            f"{self.ratio:.3f}" if self.layer else "-",
            str(len(plan.used_devices)),
            str(len(plan.stages)),
            str(plan.microbatches),
            str(len(plan.splits)),
            percent(plan.certificate.gap),
            percent((step - floor) / step),
            f"{self.layer_seconds:.1f}",
            f"{self.free_seconds:.1f}",
            won,
        ]


def load(model: str, *, tiny: bool = False) -> tuple[Workload, OpGraph]:
    """The model at its size here, or at the size that is verified, and its trace."""
    entry = MODELS[model]
    workload = load_workload(entry.source, settings=entry.tiny if tiny else entry.settings)
    return workload, as_graph(workload)


def compared(graph: OpGraph, model: str, cluster: ClusterSpec, objective: Objective, limit: float) -> Row:
    """Plan both ways. For latency the layer-wise plan runs the batch in one piece as well."""
    layer: Plan | None = None
    began = time.perf_counter()
    try:
        layer = partition(
            graph,
            cluster,
            batch_size=MODELS[model].batch,
            microbatches=1 if objective == "latency" else "auto",
            time_limit_seconds=limit,
            strategy="layer",
        )
    except InfeasibleError as error:
        print(error.render(), file=sys.stderr)
    between = time.perf_counter()
    free = partition(
        graph,
        cluster,
        strategy="free",
        objective=objective,
        batch_size=MODELS[model].batch,
        time_limit_seconds=limit,
    )
    ended = time.perf_counter()
    return Row(model, cluster.name, objective, layer, free, between - began, ended - between)


def verified(model: str, objective: Objective, devices: int, pool: WorkerPool) -> str:
    """The tiny variant, planned freely for slow devices so that it is divided, run in float64 and compared."""
    workload, graph = load(model, tiny=True)
    cluster = clusters()[f"slow-{devices}"]
    plan = partition(
        graph, cluster, strategy="free", objective=objective, batch_size=8, time_limit_seconds=VERIFY_LIMIT
    )
    report = plan.verify(workload, pool=pool, graph=graph)
    what = f"{plan.world_size} ranks, {len(plan.stages)} segments, {len(plan.splits)} ops split"
    worst = (
        f"{report.worst.severity:.1e} of what is allowed" if report.worst is not None else "nothing compared"
    )
    return f"{model}, {objective}: {'verified' if report.passed else 'DIFFERS'}, {what}, {worst}"


def run(models: Sequence[str], names: Sequence[str], limit: float, verify: bool) -> int:
    """Print the table, then what was verified; 1 if anything is not as it must be."""
    rows: list[Row] = []
    problems: list[str] = []
    for model in models:
        _, graph = load(model)
        for name in names:
            for objective in objectives(model):
                row = compared(graph, model, clusters()[name], objective, limit)
                rows.append(row)
                problems += row.problems()
                print(" ".join(row.cells()), file=sys.stderr, flush=True)
    print(columns(HEAD, [row.cells() for row in rows], left=("model", "cluster", "objective", "")))
    won = {(row.model, row.objective): row for row in rows if row.layer is not None and row.ratio < WON}
    print(f"\nwon: {len({model for model, _ in won})} of {len(models)} models\n")
    if verify and won:
        with WorkerPool(4) as pool:
            for model, objective in won:
                line = verified(model, objective, 4, pool)
                print(line, flush=True)
                problems += [line] if "DIFFERS" in line else []
    print(*problems, sep="\n")
    return 1 if problems else 0


def objectives(model: str) -> tuple[Objective, ...]:
    """What the model is planned for."""
    return ("throughput", "latency") if MODELS[model].branchy else ("throughput",)
